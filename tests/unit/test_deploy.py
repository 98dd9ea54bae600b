"""The deployment files: well formed, true to the options there are, and units that systemd accepts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replay_server.cli import main

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
UNITS = ("replay-server@", "replay-server-export@")


def settings(unit: str) -> dict[str, str]:
    lines = (DEPLOY / f"{unit}.service").read_text("utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_a_unit_without_a_word(unit: str, tmp_path: Path) -> None:
    text = (DEPLOY / f"{unit}.service").read_text("utf-8")
    assert not verified(tmp_path / f"{unit}.service", installed(text))
    assert "LimitMEMLOK" in verified(tmp_path / f"{unit}.service", installed(text) + "\n[Service]\nLimitMEMLOK=1\n")


def installed(text: str) -> str:
    """The unit with a command that exists here."""
    return text.replace("/opt/replay-server/bin/replay-server", sys.executable)


def verified(path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    instance = path.with_name(path.name.replace("@.", "@gpu0."))
    done = subprocess.run(["systemd-analyze", "verify", str(instance)], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_the_server_unit_is_told_ready_watched_and_alone_in_its_directory() -> None:
    unit = settings("replay-server@")
    assert (unit["Type"], unit["NotifyAccess"], unit["LimitMEMLOCK"], unit["RuntimeDirectoryMode"]) == (
        "notify",
        "main",
        "infinity",
        "0700",
    )
    assert int(unit["WatchdogSec"]) >= 60
    assert unit["Environment"] == f"REPLAY_SERVER_RUN_DIR=/run/{unit['RuntimeDirectory']}"
    assert f"/run/{unit['RuntimeDirectory']} " in settings("replay-server-export@")["ExecStart"]
    assert unit["User"] == "replay-server"
    users = (DEPLOY / "replay-server.sysusers").read_text("utf-8")
    assert all(f"{line}\n" in users for line in (f"m {unit['User']} video", f"m {unit['User']} render"))
    assert f"u {unit['User']} " in users


def test_a_server_whose_file_system_is_read_only_has_a_place_for_snapshots_of_its_own() -> None:
    unit = settings("replay-server@")
    assert (unit["ProtectSystem"], unit["StateDirectory"]) == ("strict", "replay-server/%i")
    assert f"/var/lib/{unit['StateDirectory'].replace('%i', 'gpu0')}" in (DEPLOY.parent / "deploy.md").read_text("utf-8")


def test_two_exporters_of_a_host_can_have_two_ports() -> None:
    unit = settings("replay-server-export@")
    assert unit["Environment"] == "PORT=9108"
    assert unit["ExecStart"].endswith("--port ${PORT}")


def commands() -> Iterator[list[str]]:
    """Every command line of ours in the files, without the program's name."""
    for unit in UNITS:
        told = settings(unit)
        variable, _, value = told["Environment"].partition("=")
        yield told["ExecStart"].replace("%i", "gpu0").replace(f"${{{variable}}}", value).split()[1:]
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    for words in re.findall(r"^(?:HEALTHCHECK.* )?CMD (\[.*\])", dockerfile, re.MULTILINE):
        yield [word for word in re.findall(r'"([^"]*)"', words) if word != "replay-server"]
    for name in ("compose.yaml", "kubernetes.yaml"):
        for words in re.findall(r"(?:command|args|test): \[([^\]]*)\]", (DEPLOY / name).read_text("utf-8")):
            split = [word.strip(' "') for word in words.split(",") if word.strip(' "') not in ("CMD", "replay-server")]
            if split[0] not in ("python",):
                yield split


def test_every_command_in_the_files_is_one_that_there_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` at the end stops each before it does anything, after its verb was read."""
    found = list(commands())
    assert {words[0] for words in found} == {"serve", "status", "export"}
    assert len(found) >= 8
    for words in found:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0, words
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_a_file_is_yaml(name: str) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / name).read_text("utf-8")))
    assert all(isinstance(document, dict) for document in documents)
    if name == "compose.yaml":
        services = documents[0]["services"]
        assert {services[name][space] for name in ("server", "training") for space in ("ipc", "pid")} == {"service:pause"}
        assert (services["pause"]["ipc"], "restart" in services["pause"]) == (
            "shareable",
            False,
        )  # a new one would be a namespace of its own
    else:
        sidecars = documents[1]["spec"]["template"]["spec"]["initContainers"]
        assert [sidecar["restartPolicy"] for sidecar in sidecars] == ["Always", "Always"]


def test_the_compose_file_fits_the_specifications_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, DEPLOY / "compose.yaml"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kubernetes_file_fits_the_api_without_an_unknown_key() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8")):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_image_installs_what_the_daemon_imports() -> None:
    project = tomllib.loads((DEPLOY.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cuda"], *extras["export"]]
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    assert set(re.findall(r'"([a-z-]+[>=<,.0-9]*)"', dockerfile)) >= {w.split(";")[0].strip() for w in wanted if not w.startswith("torch")}
