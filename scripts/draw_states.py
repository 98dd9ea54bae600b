"""Draws the state tables of replay_server_protocol.states into docs/design.md, between its markers.

`python scripts/draw_states.py` rewrites the page; with `--check` it only says whether the page is in step (exit code 1 if not).
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Any

from replay_server_protocol import states

PAGE = Path(__file__).parent.parent / "docs" / "design.md"
BEGIN, END = "<!-- states: drawn by scripts/draw_states.py -->\n", "<!-- states end -->\n"
TABLES: dict[str, dict[tuple[Any, Any], Any]] = {
    "Session, in the server": states.SESSION,
    "Slot": states.SLOT,
    "Lease": states.LEASE,
    "Batch buffer, in the learner": states.BUFFER,
}


def draw() -> str:
    """All tables as Mermaid state diagrams."""
    return "\n".join(f"**{title}**\n\n```mermaid\nstateDiagram-v2\n{_diagram(table)}\n```\n" for title, table in TABLES.items())


def _diagram(table: dict[tuple[Enum, Enum], Enum]) -> str:
    first = next(iter(table))[0]
    moves = [f"    {before.value} --> {after.value}: {event.value}" for (before, event), after in table.items()]
    return "\n".join([f"    [*] --> {first.value}", *moves])


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
