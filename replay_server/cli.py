"""The command ``replay-server``: serve, up, status, top, trace, doctor, export; others are in files of their own."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import InvalidRequest, ReplayError

from replay_server import __version__
from replay_server.config import ServerConfig
from replay_server.exit_codes import EXIT_CODES_TEXT, UNSOUND, exit_code_of
from replay_server.loading import add_command as add_load
from replay_server.log_lines import occupy_standard_streams
from replay_server.looking import add_commands as add_looking
from replay_server.operating import add_commands as add_operating
from replay_server.saved.manifest import Manifest
from replay_server.snapshots import add_command as add_snapshot

log = logging.getLogger("replay_server")

_LONGEST_INTERVAL_S = 86_400
_SHORTEST_INTERVAL_S = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors go to stderr in one line that says what to do."""
    occupy_standard_streams()
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
    from replay_server.descriptors import raise_limit
    from replay_server.log_lines import LogLines
    from replay_server.server import Server
    from replay_server.stop_signals import StopSignals

    given = {f.name: getattr(options, f.name) for f in fields(ServerConfig) if getattr(options, f.name) is not None}
    config = ServerConfig.from_options(given, options.config)
    if options.dry_run:
        return _print_plan(config)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", handlers=[LogLines()])
    if config.restore is not None:
        for difference in config.differences(Manifest.load(Path(config.restore))):
            log.info("--restore %s: %s", config.restore, difference)
    raise_limit()
    logging.raiseExceptions = False  # a log pipe may break; the data path goes on
    signals = StopSignals()
    server = Server(config, signals)
    try:
        server.run()
    finally:
        server.close()
        signals.ignore()
    log.info("stopped")
    return 0


def _up(options: argparse.Namespace) -> int:
    from replay_server.cuda_runtime import CudaRuntime
    from replay_server.host import HostServers, devices_of, plans_of
    from replay_server.log_lines import LogLines
    from replay_server.stop_signals import StopSignals

    given = {f.name: getattr(options, f.name) for f in fields(ServerConfig) if getattr(options, f.name, None) is not None}
    config = ServerConfig.from_options(dict(given), options.config)
    if options.cpus is not None and not 1 <= options.cpus <= 64:
        raise InvalidRequest(f"--cpus {options.cpus}: 1 to 64 servers")
    devices = ["cpu"] * options.cpus if options.cpus else devices_of(options.gpus, lambda: CudaRuntime.load().device_count())
    name = Endpoints.resolve(config.name).name
    texts = {key: text for key, text in given.items() if key not in ("name", "run_dir")}
    if options.config is not None:
        texts["config"] = options.config
    lines = LogLines(sys.stdout)  # whoever reads them may be slow, and the servers are watched all the same
    lines.setFormatter(logging.Formatter("replay-server: %(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    logging.raiseExceptions = False
    signals = StopSignals()
    try:
        plans = plans_of(name, devices, texts)
        return HostServers(plans, config.run_dir, signals, lambda line: log.info("%s", line)).run()
    finally:
        signals.ignore()


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


def _cluster_status(options: argparse.Namespace) -> int:
    try:
        from replay_server_client.ray.survey import status_at
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"--cluster needs the package {error.name}: pip install 'replay-server[ray]'") from error

    from replay_server.cluster_text import cluster_lines

    found = status_at(options.cluster, options.timeout)
    print(json.dumps(found, indent=2) if options.json else "\n".join(cluster_lines(found)))
    return 0


def _status(options: argparse.Namespace) -> int:
    if options.cluster is not None:
        return _cluster_status(options)
    from replay_server_client.status import query

    from replay_server.status_text import status_lines

    endpoints = Endpoints.resolve(options.name, options.run_dir)
    if not 0 <= options.interval <= _LONGEST_INTERVAL_S:
        raise InvalidRequest(f"--interval {options.interval:g}: 0 to {_LONGEST_INTERVAL_S:,} seconds")
    while True:
        found = query(endpoints, options.timeout)
        text = json.dumps(found, indent=None if options.watch else 2) if options.json else "\n".join(status_lines(found))
        if options.watch and not options.json and sys.stdout.isatty():
            text = "\x1b[H\x1b[2J" + text
        print(text, flush=True)
        if not options.watch:
            return 0
        time.sleep(max(0.05, options.interval))


def _top(options: argparse.Namespace) -> int:
    from replay_server.top.terminal import run

    if not _SHORTEST_INTERVAL_S <= options.interval <= _LONGEST_INTERVAL_S:
        raise InvalidRequest(f"--interval {options.interval:g}: {_SHORTEST_INTERVAL_S:g} to {_LONGEST_INTERVAL_S:,} seconds")
    return run(Endpoints.resolve(options.name, options.run_dir), options.interval)


def _trace(options: argparse.Namespace) -> int:
    from replay_server_client.admin import Admin

    with Admin.connect(options.name, run_dir=options.run_dir, timeout=options.timeout) as admin:
        if options.verb == "start":
            admin.trace_start(timeout=options.timeout)
            print("a trace is on: `replay-server trace stop FILE` ends and writes it")
            return 0
        found = admin.trace_stop(options.file, wait=options.wait, timeout=options.timeout)
    taken = [traced for traced in found if not traced.left_out]
    print(f"wrote {options.file}: {sum(t.spans for t in taken):,} spans of {len(taken)} processes; https://ui.perfetto.dev opens it")
    for traced in taken:
        dropped = f", {traced.dropped:,} older ones dropped" if traced.dropped else ""
        print(f"  {traced.process} (pid {traced.pid}): {traced.spans:,} spans{dropped}")
    for traced in found:
        if traced.left_out:
            print(f"  left out: {traced.process} (pid {traced.pid}): {traced.left_out}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from replay_server.doctor.examination import as_json, as_lines, examine, has_failures
    from replay_server.doctor.scene import Scene

    config = ServerConfig(device=options.device)  # checks its form
    scene = Scene(Endpoints.resolve(options.name, options.run_dir), config.device, limit_s=options.timeout)
    findings = examine(scene)
    print(json.dumps(as_json(scene, findings), indent=2) if options.json else "\n".join(as_lines(findings)))
    return UNSOUND if has_failures(findings) else 0


def _export(options: argparse.Namespace) -> int:
    from replay_server.stop_signals import StopSignals

    try:
        from replay_server.export.service import Exporter, run_until_stopped
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"export needs the package {error.name}: pip install 'replay-server[export]'") from error

    endpoints = Endpoints.resolve(options.name, options.run_dir)
    if not 0.2 <= options.interval <= 60:
        raise InvalidRequest(f"--interval {options.interval:g}: 0.2 to 60 seconds")
    if not 0 <= options.port <= 65535:
        raise InvalidRequest(f"--port {options.port}: 0 to 65535, 0 for one that is free")
    signals = StopSignals()
    exporter = Exporter(endpoints, options.host, options.port, interval_s=options.interval, timeout_s=options.timeout)
    print(f"replay-server: exporting {endpoints.name!r} at {exporter.url}", flush=True)
    run_until_stopped(exporter, signals)
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
    _add_serving(commands)
    _add_watching(commands)
    _add_operating(commands)
    _add_doctor(commands)
    _add_export(commands)
    add_looking(commands, _reach)
    add_snapshot(commands, _reach)
    add_load(commands, _reach)
    return parser


def _add_serving(commands: Any) -> None:
    serve_help = "serve in the foreground until SIGTERM, SIGINT or `replay-server stop`"
    serve = commands.add_parser("serve", help=serve_help, epilog=EXIT_CODES_TEXT, allow_abbrev=False)
    _add_serve_options(serve)
    serve.add_argument("--dry-run", action="store_true", help="print the memory plan, check it, and allocate nothing")
    serve.set_defaults(run=_serve)

    up_help = "serve from every GPU of this host: a server each, NAME-0, NAME-1, …, watched and started again when one dies"
    up = commands.add_parser("up", help=up_help, epilog=EXIT_CODES_TEXT, allow_abbrev=False)
    where = up.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpus", metavar="all|0,1", help="all visible GPUs, or these, by ordinal")
    where.add_argument("--cpus", type=int, metavar="N", help="N servers with rings in host memory instead, to try things out")
    _add_serve_options(up, but=("device", "parent_pid", "debug_profile"))
    up.set_defaults(run=_up)


def _add_watching(commands: Any) -> None:
    status = commands.add_parser("status", allow_abbrev=False, help="print the status report", parents=[_reach()])
    status.add_argument("--json", action="store_true", help="the report as JSON (with --watch one line each)")
    status.add_argument("--watch", action="store_true", help="again and again until Ctrl-C")
    status.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two reports (default: 1)")
    cluster_help = "every host and forwarder of a Ray cluster instead (default: the one of $RAY_ADDRESS, or of this machine)"
    status.add_argument("--cluster", nargs="?", const="auto", metavar="ADDRESS", help=cluster_help)
    status.set_defaults(run=_status)

    top_help = "watch a running server, also over its restarts, until q or Ctrl-C (both: exit code 0)"
    top = commands.add_parser("top", allow_abbrev=False, help=top_help, epilog=EXIT_CODES_TEXT, parents=[_server()])
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two reports (default: 1)")
    top.set_defaults(run=_top)


def _add_operating(commands: Any) -> None:
    add_operating(commands, _reach)
    trace = commands.add_parser("trace", allow_abbrev=False, help="record what a running server and its clients do, for ui.perfetto.dev")
    verbs = trace.add_subparsers(metavar="start|stop", required=True)
    start = verbs.add_parser("start", allow_abbrev=False, help="begin to record", epilog=EXIT_CODES_TEXT, parents=[_reach()])
    start.set_defaults(run=_trace, verb="start")
    stop_trace = verbs.add_parser("stop", allow_abbrev=False, help="end it and write FILE", epilog=EXIT_CODES_TEXT, parents=[_reach()])
    stop_trace.add_argument("file", metavar="FILE", help="written whole or not at all")
    stop_trace.add_argument("--wait", type=float, default=5.0, metavar="SECONDS", help="for the clients to hand in (default: 5)")
    stop_trace.set_defaults(run=_trace, verb="stop")


def _add_doctor(commands: Any) -> None:
    doctor_help = "check this machine, and say what to do about each finding"
    reach = _reach(20.0, "how long one try may take")
    doctor = commands.add_parser("doctor", allow_abbrev=False, help=doctor_help, epilog=EXIT_CODES_TEXT, parents=[reach])
    doctor.add_argument("--device", default="auto", help="the device that is meant: auto, cpu, cuda[:N] or mps (default: auto)")
    doctor.add_argument("--json", action="store_true", help="the findings as JSON")
    doctor.set_defaults(run=_doctor)


def _add_export(commands: Any) -> None:
    export_help = "serve metrics for Prometheus, health, the report and a page of charts by HTTP"
    reach = _reach(2.0, "how long one question to the server may take")
    export = commands.add_parser("export", allow_abbrev=False, help=export_help, epilog=EXIT_CODES_TEXT, parents=[reach])
    export.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than loopback let everybody there read (default: 127.0.0.1)"
    )
    export.add_argument("--port", type=int, default=9108, help="port to listen on (default: 9108)")
    export.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two questions to the server (default: 1)")
    export.set_defaults(run=_export)


def _add_serve_options(parser: argparse.ArgumentParser, but: Sequence[str] = ()) -> None:
    for option in fields(ServerConfig):
        if option.name in but:
            continue
        help_text = argparse.SUPPRESS if option.metadata["hidden"] else _help_of(option.metadata["help"], option.default)
        choices, metavar = option.metadata["choices"], option.metadata["metavar"]
        parser.add_argument(f"--{option.name.replace('_', '-')}", dest=option.name, help=help_text, choices=choices, metavar=metavar)
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same options; the command line wins")


def _reach(timeout_s: float = 5.0, waits: str = "how long to wait for an answer") -> argparse.ArgumentParser:
    reach = _server()
    reach.add_argument("--timeout", type=float, default=timeout_s, metavar="SECONDS", help=f"{waits} (default: {timeout_s:g})")
    return reach


def _server() -> argparse.ArgumentParser:
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument("--name", help="the server's name (default: $REPLAY_SERVER_NAME, else default)")
    server.add_argument("--run-dir", metavar="DIR", help="its run directory")
    return server


def _help_of(text: str, default: object) -> str:
    if default is not None and "default" not in text:
        text = f"{text} (default: {','.join(default) if isinstance(default, tuple) else default})"
    return text.replace("%", "%%")
