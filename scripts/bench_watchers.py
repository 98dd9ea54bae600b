"""What watching costs the data path: ingest and sampling at full rate, with everything that watches open, and with all of it stopped.

Watching are ``replay-server top`` on a terminal, ``replay-server export``, a scraper of its metrics and what an open page asks for, each a
process of its own; scraper and page ask once a second. They are stopped and continued by signals, so that windows with and without them
take turns on the very same server and clients. A figure is the median of a run's windows; each run also gives the ratio of its two medians.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pty
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Event

import benchmark
from bench_ingest import collect
from benchmark import OURS, Options, Report, serve, transition_schema
from replay_server_client import Learner

from replay_server import ReplayServer

BATCH_ROWS = 2048
TIMEOUT_S = 30.0
ASK_EVERY_S = 1.0
WATCHED, ALONE = "watched", "alone"
INGEST, SAMPLING = "ingest", "sampling"


def main() -> None:
    options = benchmark.parse(__doc__)
    report = Report("bench_watchers", options)
    found: dict[tuple[str, str], list[float]] = {}
    ratios: dict[str, list[float]] = {INGEST: [], SAMPLING: []}
    with loaded(options) as server, watching(server) as watchers:
        for _ in range(options.runs):
            run = one_run(options, server, watchers)
            for what, ratio in ratios.items():
                ratio.append(run[what, WATCHED] / run[what, ALONE])
            for key, rate in run.items():
                found.setdefault(key, []).append(rate)
    for (what, side), rates in found.items():
        report.add(what, f"{what}, {side}", OURS, "rows/s", rates)
    for what, ratio in ratios.items():
        report.add("watched / alone", f"{what}, watched / alone", OURS, "", ratio)
        if options.device == "cuda":
            report.expect(f"{what}, watched / alone", statistics.median(ratio), at_least=0.97)
    report.publish()


def one_run(options: Options, server: ReplayServer, watchers: Sequence[int]) -> dict[tuple[str, str], float]:
    """Median rows a second of each, over windows that take turns."""
    windows, window_s = options.pick((10, 0.5), (2, 0.3))
    rates: dict[tuple[str, str], list[float]] = {}
    for index in range(2 * windows):
        side = WATCHED if index % 2 else ALONE
        for pid in watchers:
            os.kill(pid, signal.SIGCONT if side is WATCHED else signal.SIGSTOP)
        for what, rate in rows_per_s(server, window_s).items():
            rates.setdefault((what, side), []).append(rate)
    return {key: statistics.median(figures) for key, figures in rates.items()}


def rows_per_s(server: ReplayServer, window_s: float) -> dict[str, float]:
    before, start_s = server.status(), time.perf_counter()
    time.sleep(window_s)
    after, elapsed_s = server.status(), time.perf_counter() - start_s
    committed = after["ring"]["committed"] - before["ring"]["committed"]
    batches = sum(each["batches"] for each in after["learners"]) - sum(each["batches"] for each in before["learners"])
    return {INGEST: committed / elapsed_s, SAMPLING: batches * BATCH_ROWS / elapsed_s}


@contextlib.contextmanager
def loaded(options: Options) -> Iterator[ReplayServer]:
    """A server with collectors and one learner at full rate, processes of their own."""
    collectors, slot_rows = options.pick((4, 4096) if options.device == "cuda" else (1, 512), (1, 256))
    context = multiprocessing.get_context("spawn")
    stop, running = context.Event(), [context.Event() for _ in range(collectors + 1)]
    with serve(options, capacity=16 * 4096, headroom=4 * 4096, slot_rows=slot_rows) as server:
        place = server.name, str(server.run_dir)
        processes = [
            context.Process(target=collect, args=(*place, slot_rows, True, options.seed + n, running[n], stop), daemon=True)
            for n in range(collectors)
        ]
        processes.append(context.Process(target=learn, args=(*place, options.device, running[-1], stop), daemon=True))
        for process in processes:
            process.start()
        try:
            for event in running:
                if not event.wait(TIMEOUT_S):
                    raise TimeoutError(f"a client did not start within {TIMEOUT_S:g} s; its error is above")
            yield server
        finally:
            stop.set()
            for process in processes:
                process.join(TIMEOUT_S)


def learn(name: str, run_dir: str, device: str, running: Event, stop: Event) -> None:
    with Learner.connect(name, device=device, run_dir=run_dir, timeout=TIMEOUT_S, schema=transition_schema()) as learner:
        learner.sample(BATCH_ROWS, timeout=TIMEOUT_S)
        running.set()
        while not stop.is_set():
            learner.sample(BATCH_ROWS, timeout=TIMEOUT_S)


@contextlib.contextmanager
def watching(server: ReplayServer) -> Iterator[list[int]]:
    """Pids of all that watches, once the exporter answers."""
    port = free_port()
    command = [sys.executable, "-m", "replay_server"]
    place = ["--name", server.name, "--run-dir", str(server.run_dir)]
    terminal, end = pty.openpty()
    threading.Thread(target=read_away, args=(terminal,), daemon=True).start()
    processes = [
        subprocess.Popen([*command, "top", *place], stdin=end, stdout=end, stderr=end, env=os.environ | {"TERM": "xterm-256color"}),
        subprocess.Popen([*command, "export", *place, "--port", str(port)], stdout=subprocess.DEVNULL),
    ]
    os.close(end)
    try:
        wait_for(f"http://127.0.0.1:{port}/metrics")
        for path in ("metrics", "view?after=0"):
            script = f"import bench_watchers; bench_watchers.ask_for_ever('http://127.0.0.1:{port}/{path}')"
            processes.append(subprocess.Popen([sys.executable, "-c", script], cwd=os.path.dirname(os.path.abspath(__file__))))
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(TIMEOUT_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def read_away(terminal: int) -> None:
    with contextlib.suppress(OSError):  # its other end is closed
        while os.read(terminal, 65536):
            pass


def wait_for(address: str) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:  # noqa: S310 - http, to this machine
                answer.read()
                return
        except OSError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.1)


def ask_for_ever(address: str) -> None:
    """As a scraper or a page does; an answer that fails, because the exporter was stopped meanwhile, is asked for again."""
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5.0) as answer:  # noqa: S310 - http, to this machine
            answer.read()
        time.sleep(ASK_EVERY_S)


if __name__ == "__main__":
    main()
