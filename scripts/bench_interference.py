"""What ingest costs the learner: its update step alone, while it samples, and while collectors write at full rate besides.

The step is a real one: forward, backward and Adam of a multilayer perceptron on batches of 2,048 rows; on CUDA launched from Python, which
feels every busy core, and as the user's own CUDA graph of each batch buffer, which feels the GPU alone. The three conditions take turns
within each run, so a change of clock speed meets all of them.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import benchmark
from bench_ingest import collect
from benchmark import OURS, Options, Report, rows_of, serve, slots_of_a_lap, synchronize, transition_schema
from replay_server_client import Batch, Collector, Learner

BATCH_ROWS = 2048
TIMEOUT_S = 30.0
ALONE, SAMPLING, INGEST = "step on a fixed batch", "step and sample", "step and sample, full-rate ingest"
EAGER, CAPTURED = "eager", "captured"


def main() -> None:
    options = benchmark.parse(__doc__)
    report = Report("bench_interference", options)
    collectors, slot_rows = options.pick((8, 4096) if options.device == "cuda" else (1, 512), (1, 512))
    kinds = (EAGER, CAPTURED) if options.device == "cuda" else (EAGER,)
    found: dict[str, list[float]] = {f"{kind} {what}": [] for kind in kinds for what in (ALONE, SAMPLING, INGEST)}
    rates: list[float] = []
    for _ in range(options.runs):
        run = run_once(options, kinds, collectors, slot_rows)
        report.keep(runs=dict(run))
        rates.append(run.pop("GB/s"))
        for what, step_ms in run.items():
            found[what].append(step_ms)
    for what, steps_ms in found.items():
        report.add("learner step", what, OURS, "ms", steps_ms)
    report.add("ingest meanwhile", f"write, {collectors} × {slot_rows} rows", OURS, "GB/s", rates)
    if options.device == "cuda":
        for kind in kinds:
            report.expect_ratio_of(f"{kind} {INGEST}", f"{kind} {SAMPLING}", at_most=1.03)
    report.publish()


def run_once(options: Options, kinds: Sequence[str], collectors: int, slot_rows: int) -> dict[str, float]:
    """Median milliseconds of a step in each condition, and the rate of ingest in the third."""
    schema, steps = transition_schema(), options.pick(200 if options.device == "cuda" else 60, 10)
    capacity = options.pick(131_072 if options.device == "cuda" else 20_000, 5000)
    found = {}
    with serve(options, capacity=capacity, slot_rows=slot_rows, depth=2) as server:
        where: dict[str, Any] = {"run_dir": server.run_dir, "timeout": TIMEOUT_S}
        with Collector.connect(server.name, schema=schema, lanes=slot_rows, name="warm-up", **where) as collector:
            rows = rows_of(schema, slot_rows, options.seed)
            for _ in range(slots_of_a_lap(server, slot_rows)):  # all conditions draw from a full ring that has wrapped
                collector.write(rows)
            collector.flush(timeout=TIMEOUT_S)
        with Learner.connect(server.name, device=options.device, seed=options.seed, **where) as learner:
            updates = {kind: make_update(options) if kind == EAGER else Captured(make_update(options)) for kind in kinds}

            def sample() -> Batch:
                return learner.sample(BATCH_ROWS, timeout=TIMEOUT_S)

            for kind, update in updates.items():
                batch = sample()
                found[f"{kind} {ALONE}"] = step_ms(options, steps, partial(update, batch))
                found[f"{kind} {SAMPLING}"] = step_ms(options, steps, lambda update=update: update(sample()))
            with ingesting(server, collectors, slot_rows, options.seed):
                before, start_s = server.status()["ring"]["committed"], time.perf_counter()
                for kind, update in updates.items():
                    found[f"{kind} {INGEST}"] = step_ms(options, steps, lambda update=update: update(sample()))
                ingested = server.status()["ring"]["committed"] - before
                found["GB/s"] = ingested * schema.stride / (time.perf_counter() - start_s) / 1e9
    return found


class Captured:
    """An update as CUDA graphs, one for each batch buffer: addresses repeat, so a graph reads what the buffer holds now."""

    def __init__(self, update: Callable[[Batch], None]) -> None:
        self._update = update
        self._graphs: dict[int, Any] = {}

    def __call__(self, batch: Batch) -> None:
        if batch.buffer not in self._graphs:
            self._graphs[batch.buffer] = self._capture(batch)
        self._graphs[batch.buffer].replay()

    def _capture(self, batch: Batch) -> Any:
        import torch

        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._update(batch)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._update(batch)
        return graph


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


def make_update(options: Options) -> Callable[[Batch], None]:
    """One Adam step of a critic-like network on ``float32[n, obs + action]``; its products in TensorFloat-32 where the device has it."""
    import torch
    from torch import nn

    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    width, depth = options.pick((4096, 6) if options.device == "cuda" else (256, 2), (64, 1))
    layers: list[nn.Module] = [nn.Linear(benchmark.OBS + benchmark.ACTION, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(width, 1)).to(options.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, capturable=options.device == "cuda")

    def update(batch: Batch) -> None:
        loss = network(batch.span("obs", "action")).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return update


def ingesting(server: Any, collectors: int, slot_rows: int, seed: int) -> AbstractContextManager[None]:
    """Collectors that write as fast as credits allow."""
    return at_work(collect, [(server.name, str(server.run_dir), slot_rows, True, seed + n) for n in range(collectors)])


@contextmanager
def at_work(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """``work(*each, running, stop)`` in a process of its own for each of ``arguments``, for as long as the block lasts. The block begins
    when all have set ``running``; each ends once ``stop`` is set."""
    context = multiprocessing.get_context("spawn")
    stop, running = context.Event(), [context.Event() for _ in arguments]
    processes = [
        context.Process(target=work, args=(*each, event, stop), daemon=True) for each, event in zip(arguments, running, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        if not all(event.wait(TIMEOUT_S) for event in running):
            raise TimeoutError(f"a process did not start within {TIMEOUT_S:g} s; its error is above")
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(TIMEOUT_S)


if __name__ == "__main__":
    main()
