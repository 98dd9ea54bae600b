"""A hook of mkdocs: the command line's page from the parser, and the status report's schema beside the pages."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from replay_server.cli import _parser

CHECKOUT = Path(__file__).parents[2]
COMMANDS = "<!-- commands -->"
SCHEMA = CHECKOUT / "replay_server" / "status_report.schema.json"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the commands where a page has the mark for them."""
    return markdown.replace(COMMANDS, command_text(_parser())) if COMMANDS in markdown else markdown


def on_post_build(config: Any, **_: Any) -> None:
    """Lays the schema beside the pages, so that its address is the site's."""
    (Path(config["site_dir"]) / SCHEMA.name).write_bytes(SCHEMA.read_bytes())


def command_text(parser: argparse.ArgumentParser, level: int = 2) -> str:
    """Every command of ``parser``, those below others too, as Markdown."""
    return "\n".join(_section(name, command, about, level) for name, command, about in _commands(parser))


def _commands(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser, str]]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found += [(name, command, about.get(name, "")) for name, command in action.choices.items()]
    return found


def _section(name: str, command: argparse.ArgumentParser, about: str, level: int) -> str:
    below = command_text(command, level + 1)
    lines = [f"{'#' * level} {command.prog.removeprefix('replay-server ')}", "", f"{about[:1].upper()}{about[1:]}.", ""]
    arguments = [action for action in command._actions if _is_told(action)]
    if arguments and not below:
        lines += ["| argument | |", "|---|---|", *map(_row, arguments), ""]
    return "\n".join(lines) + below


def _is_told(action: argparse.Action) -> bool:
    silent = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not silent and action.help is not argparse.SUPPRESS


def _row(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else action.metavar or (",".join(action.choices) if action.choices else action.dest.upper())
    written = " ".join(filter(None, [", ".join(action.option_strings), f"{value}".replace("|", " or ")]))
    return f"| `{written}` | {(action.help or '').replace('%%', '%').replace('|', chr(92) + '|')} |"
