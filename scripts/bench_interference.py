"""What ingest costs the learner: its update step alone, while it samples, and while collectors write at full rate besides.

The step is a real one: forward, backward and Adam of a multilayer perceptron, captured nowhere, on batches of 2,048 rows. The three
conditions take turns within each run, so a change of clock speed meets all of them.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import benchmark
from bench_ingest import collect
from benchmark import OURS, Options, Report, rows_of, serve, synchronize, transition_schema
from replay_server_client import Collector, Learner

BATCH_ROWS = 2048
TIMEOUT_S = 30.0
ALONE, SAMPLING, INGEST = "step on a fixed batch", "step and sample", "step and sample, full-rate ingest"


def main() -> None:
    options = benchmark.parse(__doc__)
    report = Report("bench_interference", options)
    collectors, slot_rows = options.pick((8, 4096) if options.device == "cuda" else (1, 512), (1, 512))
    found: dict[str, list[float]] = {ALONE: [], SAMPLING: [], INGEST: []}
    rates: list[float] = []
    for _ in range(options.runs):
        run = run_once(options, collectors, slot_rows)
        rates.append(run.pop("GB/s"))
        for what, step_ms in run.items():
            found[what].append(step_ms)
    for what, steps_ms in found.items():
        report.add("learner step", what, OURS, "ms", steps_ms)
    report.add("ingest meanwhile", f"write, {collectors} × {slot_rows} rows", OURS, "GB/s", rates)
    quiet, loud = statistics.median(found[SAMPLING]), statistics.median(found[INGEST])
    if options.device == "cuda":
        report.expect("step with full-rate ingest / without", loud / quiet, at_most=1.03)
    report.publish()


def run_once(options: Options, collectors: int, slot_rows: int) -> dict[str, float]:
    """Median milliseconds of a step in each condition, and the rate of ingest in the third."""
    schema, steps = transition_schema(), options.pick(400 if options.device == "cuda" else 60, 10)
    capacity = options.pick(131_072 if options.device == "cuda" else 20_000, 5000)
    found = {}
    with serve(options, capacity=capacity, slot_rows=slot_rows, depth=2) as server:
        where: dict[str, Any] = {"run_dir": server.run_dir, "timeout": TIMEOUT_S}
        with Collector.connect(server.name, schema=schema, lanes=slot_rows, name="warm-up", **where) as collector:
            collector.write(rows_of(schema, slot_rows, options.seed))
            collector.flush(timeout=TIMEOUT_S)
        with Learner.connect(server.name, device=options.device, seed=options.seed, **where) as learner:
            update = make_update(options)
            fixed = learner.sample(BATCH_ROWS, timeout=TIMEOUT_S).span("obs", "action").clone()
            fresh = fresh_inputs(learner)
            found[ALONE] = step_ms(options, steps, lambda: update(fixed))
            found[SAMPLING] = step_ms(options, steps, lambda: update(fresh()))
            with ingesting(server, collectors, slot_rows, options.seed):
                before, start_s = server.status()["ring"]["committed"], time.perf_counter()
                found[INGEST] = step_ms(options, steps, lambda: update(fresh()))
                rows = server.status()["ring"]["committed"] - before
                found["GB/s"] = rows * schema.stride / (time.perf_counter() - start_s) / 1e9
    return found


def fresh_inputs(learner: Learner) -> Callable[[], Any]:
    return lambda: learner.sample(BATCH_ROWS, timeout=TIMEOUT_S).span("obs", "action")


def step_ms(options: Options, steps: int, step: Callable[[], None]) -> float:
    """Median milliseconds from one finished step to the next."""
    for _ in range(5):
        step()
    synchronize(options.device)
    ends_s = [time.perf_counter()]
    for _ in range(steps):
        step()
        synchronize(options.device)
        ends_s.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(ends_s)) * 1e3


def make_update(options: Options) -> Callable[[Any], None]:
    """One Adam step of a critic-like network on ``float32[n, obs + action]``; about 4 ms on an H200."""
    import torch
    from torch import nn

    torch.manual_seed(options.seed)
    width, depth = options.pick((4096, 6) if options.device == "cuda" else (256, 2), (64, 1))
    layers: list[nn.Module] = [nn.Linear(benchmark.OBS + benchmark.ACTION, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(width, 1)).to(options.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)

    def update(inputs: torch.Tensor) -> None:
        loss = network(inputs).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return update


@contextmanager
def ingesting(server: Any, collectors: int, slot_rows: int, seed: int) -> Iterator[None]:
    """Collectors in processes of their own that write as fast as credits allow, for as long as the block lasts."""
    context = multiprocessing.get_context("spawn")
    stop, running = context.Event(), [context.Event() for _ in range(collectors)]
    arguments = [(server.name, str(server.run_dir), slot_rows, True, seed + n, running[n], stop) for n in range(collectors)]
    processes = [context.Process(target=collect, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    try:
        for event in running:
            if not event.wait(TIMEOUT_S):
                raise TimeoutError(f"a collector did not start within {TIMEOUT_S:g} s; its error is above")
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(TIMEOUT_S)


if __name__ == "__main__":
    main()
