"""Pages that are drawn from the code are in step with it, and what the others name exists."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from replay_server.config import ServerConfig

CHECKOUT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "docs/design.md",
    "docs/adapters.md",
    "docs/deploy.md",
    "docs/doctor.md",
    "docs/look.md",
    "docs/export.md",
    "docs/flow.md",
    "docs/protocol.md",
    "docs/rows.md",
    "docs/sampling.md",
    "docs/several_gpus.md",
    "docs/snapshots.md",
    "docs/several_nodes.md",
    "docs/status.md",
    "docs/trace.md",
    "docs/index.md",
    "docs/tutorial.md",
    "docs/reasons.md",
    "docs/comparison.md",
    *(
        f"docs/{page.parent.name}/{page.name}"
        for folder in ("how-to", "reference")
        for page in sorted((CHECKOUT / "docs" / folder).glob("*.md"))
    ),
)
OTHER_OPTIONS = {
    "--config",
    "--dry-run",
    "--json",
    "--watch",
    "--help",
    "--timeout",
    "--host",
    "--port",
    "--interval",
    "--all",
    "--read",
    "--wait",
    "--newest",
    "--seqs",
    "--episode-of",
    "--fields",
    "--gpus",
    "--cpus",
    "--keep",
    "--cluster",
}
RAYS_OPTIONS = {"--head", "--port", "--address", "--object-store-memory"}
DOCKERS_OPTIONS = {
    "--cpuset-cpus",
    "--entrypoint",
    "--gpus",
    "--init",
    "--ipc",
    "--memory",
    "--network",
    "--no-healthcheck",
    "--pid",
    "--shm-size",
}
DOCKERS_OPTIONS |= {"--ulimit", "--user"}
OTHERS_OPTIONS = {*RAYS_OPTIONS, *DOCKERS_OPTIONS, "--index-url", "--now", "--nproc-per-node"}
LINK = re.compile(r"\]\((?!https?://)([^)#]+)\)")
PATH = re.compile(r"`((?:replay_server|client|protocol|scripts|tests|docs)/[\w./-]+)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def page_text(page: str) -> str:
    return (CHECKOUT / page).read_text("utf-8")


@pytest.mark.parametrize("script", ["draw_states.py", "draw_status.py"])
def test_a_drawn_page_is_in_step(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [script, "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(CHECKOUT / "scripts" / script), run_name="__main__")
    assert ended.value.code == 0, f"run scripts/{script}"


@pytest.mark.parametrize("script", ["draw_states.py", "draw_status.py"])
def test_a_page_that_is_out_of_step_is_found_and_redrawn(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawer = runpy.run_path(str(CHECKOUT / "scripts" / script))
    right = drawer["PAGE"].read_text("utf-8")
    page = tmp_path / "page.md"
    page.write_text(right.replace(drawer["BEGIN"], drawer["BEGIN"] + "out of step\n"), "utf-8")
    monkeypatch.setitem(drawer["main"].__globals__, "PAGE", page)
    monkeypatch.setattr("sys.argv", [script, "--check"])
    assert drawer["main"]() == 1
    monkeypatch.setattr("sys.argv", [script])
    assert drawer["main"]() == 0
    assert page.read_text("utf-8") == right


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_or_names_exists(page: str) -> None:
    text = page_text(page)
    links = [(CHECKOUT / page).parent / target for target in LINK.findall(text)]
    named = [CHECKOUT / path for path in PATH.findall(text)]
    missing = [str(path) for path in [*links, *named] if not path.exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_option_a_page_names_exists(page: str) -> None:
    known = {f"--{option.name.replace('_', '-')}" for option in fields(ServerConfig)} | OTHER_OPTIONS | OTHERS_OPTIONS
    assert set(OPTION.findall(page_text(page))) <= known


def test_the_readme_tells_every_exit_code() -> None:
    from replay_server.exit_codes import EXIT_CODES_TEXT

    told = re.findall(r"^\| (\d) \|", page_text("README.md"), re.MULTILINE)
    assert told == sorted(set(digits(EXIT_CODES_TEXT)))


def digits(text: str) -> Iterator[str]:
    return (digit for digit in text if digit.isdigit())


def test_every_text_of_the_troubleshooting_page_is_one_the_code_says() -> None:
    folders = ("replay_server", "client", "protocol")
    code = "\n".join(path.read_text("utf-8") for folder in folders for path in sorted((CHECKOUT / folder).rglob("*.py")))
    quoted = re.findall(r"^\| `([^`]+)` \|", page_text("docs/how-to/troubleshooting.md"), re.MULTILINE)
    assert len(quoted) > 20
    assert [part for text in quoted for part in text.split(" … ") if part not in code] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (CHECKOUT / "scripts/site/mkdocs.yml").read_text("utf-8").partition("nav:")[2]
    pages = [str(page.relative_to(CHECKOUT / "docs")) for page in (CHECKOUT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}" not in navigation] == []
