"""The command ``replay-server``: serve, status, set, stop."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import fields

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import InvalidRequest, ReplayError

from replay_server import __version__
from replay_server.config import ServerConfig
from replay_server.exit_codes import EXIT_CODES_TEXT, exit_code_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors go to stderr in one line that says what to do."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except ReplayError as error:
        print(f"replay-server: {error}", file=sys.stderr)
        return exit_code_of(error)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _serve(options: argparse.Namespace) -> int:
    from replay_server.server import Server
    from replay_server.stop_signals import StopSignals

    given = {f.name: getattr(options, f.name) for f in fields(ServerConfig) if getattr(options, f.name) is not None}
    config = ServerConfig.from_options(given, options.config)
    if options.dry_run:
        return _print_plan(config)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.raiseExceptions = False  # a log pipe may break; the data path goes on
    signals = StopSignals()
    server = Server(config, signals)
    try:
        server.run()
    finally:
        server.close()
        signals.ignore()
    return 0


def _print_plan(config: ServerConfig) -> int:
    from replay_server.budget import free_host_bytes
    from replay_server.store import choose_device, free_device_bytes, plan_memory

    schema = config.load_schema()
    if schema is None:
        raise InvalidRequest("--dry-run needs --schema FILE: rows have no size before that")
    device = choose_device(config)
    plan = plan_memory(config, schema, 1, device)
    print("\n".join(plan.lines()))
    free_device = free_device_bytes(device) if plan.is_on_device else None
    if free_device is not None:
        print(f"free     {free_device:,} bytes on {device.name}")
    print(f"free     {free_host_bytes():,} bytes of host memory")
    plan.check(free_device, free_host_bytes())
    return 0


def _status(options: argparse.Namespace) -> int:
    from replay_server_client.status import query

    from replay_server.status_text import status_lines

    endpoints = Endpoints.resolve(options.name, options.run_dir)
    while True:
        found = query(endpoints, options.timeout)
        text = json.dumps(found, indent=None if options.watch else 2) if options.json else "\n".join(status_lines(found))
        if options.watch and not options.json and sys.stdout.isatty():
            text = "\x1b[H\x1b[2J" + text
        print(text, flush=True)
        if not options.watch:
            return 0
        time.sleep(max(0.05, options.interval))


def _admin(options: argparse.Namespace) -> int:
    from replay_server_client.admin import Admin

    with Admin.connect(options.name, run_dir=options.run_dir, timeout=options.timeout) as admin:
        if options.verb == "set":
            admin.set(options.key, options.value, timeout=options.timeout)
        else:
            admin.stop(timeout=options.timeout)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay-server",
        description="A sidecar daemon that owns the replay ring of off-policy RL.",
        epilog=EXIT_CODES_TEXT,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"replay-server {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve_help = "serve in the foreground until SIGTERM, SIGINT or `replay-server stop`"
    serve = commands.add_parser("serve", help=serve_help, epilog=EXIT_CODES_TEXT, allow_abbrev=False)
    for option in fields(ServerConfig):
        help_text = argparse.SUPPRESS if option.metadata["hidden"] else _help_of(option.metadata["help"], option.default)
        choices, metavar = option.metadata["choices"], option.metadata["metavar"]
        serve.add_argument(f"--{option.name.replace('_', '-')}", dest=option.name, help=help_text, choices=choices, metavar=metavar)
    serve.add_argument("--config", metavar="FILE", help="TOML file with the same options; the command line wins")
    serve.add_argument("--dry-run", action="store_true", help="print the memory plan, check it, and allocate nothing")
    serve.set_defaults(run=_serve)

    status = commands.add_parser("status", allow_abbrev=False, help="print the status report", parents=[_reach()])
    status.add_argument("--json", action="store_true", help="the report as JSON (with --watch one line each)")
    status.add_argument("--watch", action="store_true", help="again and again until Ctrl-C")
    status.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two reports (default: 1)")
    status.set_defaults(run=_status)

    set_ = commands.add_parser(
        "set", allow_abbrev=False, help="change samples-per-insert or tolerance of a running server", parents=[_reach()]
    )
    set_.add_argument("key", metavar="KEY")
    set_.add_argument("value", metavar="VALUE")
    set_.set_defaults(run=_admin, verb="set")

    stop = commands.add_parser("stop", allow_abbrev=False, help="stop a running server in good order", parents=[_reach()])
    stop.set_defaults(run=_admin, verb="stop")
    return parser


def _reach() -> argparse.ArgumentParser:
    reach = argparse.ArgumentParser(add_help=False)
    reach.add_argument("--name", help="the server's name (default: $REPLAY_SERVER_NAME, else default)")
    reach.add_argument("--run-dir", metavar="DIR", help="its run directory")
    reach.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="how long to wait for an answer (default: 5)")
    return reach


def _help_of(text: str, default: object) -> str:
    if default is not None and "default" not in text:
        text = f"{text} (default: {','.join(default) if isinstance(default, tuple) else default})"
    return text.replace("%", "%%")
