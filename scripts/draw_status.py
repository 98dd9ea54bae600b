"""Draws the keys of replay_server/status_report.schema.json into docs/status.md, between its markers.

`python scripts/draw_status.py` rewrites the page; with `--check` it only says whether the page is in step (exit code 1 if not).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parent.parent
PAGE = CHECKOUT / "docs" / "status.md"
SCHEMA = CHECKOUT / "replay_server" / "status_report.schema.json"
BEGIN, END = "<!-- keys: drawn by scripts/draw_status.py -->\n", "<!-- keys end -->\n"

Node = dict[str, Any]


def draw() -> str:
    """Every key with its type and meaning: the top level first, then a table for each part that has keys of its own."""
    top: dict[str, Node] = json.loads(SCHEMA.read_text("utf-8"))["properties"]
    tables = ["## The report\n\n" + _table((name, node) for name, node in top.items())]
    for name, node in top.items():
        keys = list(_keys(node, ""))
        if keys:
            tables.append(f"## {name}\n\n{node['description']}\n\n" + _table(keys))
    return "\n".join(tables)


def _keys(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """The keys below ``node``, each with its path: ``commit_us.p50``, ``fields[].name``, ``NAME.mean``."""
    for name, below in _parts(node):
        at = name if name == "[]" or not path else f".{name}"
        if name != "[]" or below.get("type") != "object":
            yield path + at, below
        yield from _keys(below, path + at)


def _parts(node: Node) -> Iterator[tuple[str, Node]]:
    """What lies directly in ``node``: named keys, the values of a map (NAME stands for each), the elements of a list ([])."""
    yield from node.get("properties", {}).items()
    values = node.get("additionalProperties")
    if isinstance(values, dict):
        yield "NAME", values
    elements = node.get("items")
    if isinstance(elements, dict) and "properties" in elements:
        yield "[]", elements


def _table(keys: Iterator[tuple[str, Node]] | list[tuple[str, Node]]) -> str:
    lines = [f"| `{path.removeprefix('[].')}` | {_type(node)} | {_text(node)} |\n" for path, node in keys]
    return "| key | type | meaning |\n|---|---|---|\n" + "".join(lines)


def _type(node: Node) -> str:
    if "const" in node:
        return f"{node['const']}"
    kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
    return " or ".join(kinds)


def _text(node: Node) -> str:
    """The description, and the values there are where it doesn't tell them all."""
    text: str = node["description"]
    values = [value for value in node.get("enum", ()) if value is not None]
    told = all(value in text for value in values)
    return (text if told else f"{text} One of {', '.join(values)}.").replace("|", "\\|")


def main() -> int:
    page = PAGE.read_text("utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    drawn = f"{head}{BEGIN}\n{draw()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        return 0 if drawn == page else 1
    PAGE.write_text(drawn, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
