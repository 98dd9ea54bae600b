"""What a tick of a GPU simulator costs its collector: 4,096 lanes of 430 float32, as CUDA tensors, one slot a tick.

  write       the call alone, slots free: the packing is queued and nothing is waited for
  busy        the same call behind a kernel of 2 ms on the caller's stream
  commit      write and flush: until the rows are in the ring
  stream      ticks back to back, as fast as the slots come back
  copies      a tick's bytes to the host and back to the device, and within the device: what slots in device memory would save
The sides: the tensors given as they are; brought to the host field by field before the call; rows that were never on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import benchmark
from benchmark import OURS, Options, Report, rows_of, serve, synchronize, transition_schema
from replay_server_client import Collector

THROUGH_HOST, HOST_ROWS = "tensor.cpu() first", "rows of the host"
PATH, WITHIN = "slots in host memory", "slots in device memory"
BUSY_S, CYCLES_PER_S = 2e-3, 1.9e9
WARM_UP_TICKS = 5
TIMEOUT_S = 30.0

Write = Callable[[], None]


def main() -> None:
    options = benchmark.parse(__doc__)
    report = Report("bench_device_rows", options)
    lanes, ticks = options.pick(4096, 256), options.pick(100, 10)
    shape = f"{lanes} rows × {transition_schema().row_bytes} B"
    with sides(options, lanes) as collectors:
        for group, what, unit, run in (
            ("the call", f"write, {shape}", "µs", write_us),
            ("the call", f"write, GPU busy, {shape}", "µs", partial(write_us, is_busy=True)),
            ("until committed", f"commit, {shape}", "ms", commit_ms),
            ("back to back", f"stream, {shape}", "GB/s", stream_gb_per_s),
        ):
            if options.device == "cpu" and "busy" in what:
                continue
            report.measure(group, what, unit, {side: partial(run, *each, ticks) for side, each in collectors.items()})
    if options.device == "cuda":
        measure_copies(report, lanes)
    report.publish()


@contextmanager
def sides(options: Options, lanes: int) -> Iterator[dict[str, tuple[Collector, Write]]]:
    """A collector for each side, all of one server, and the call that writes its tick."""
    schema = transition_schema()
    host = rows_of(schema, lanes, options.seed)
    with ExitStack() as stack:
        server = stack.enter_context(
            serve(options, capacity=16 * lanes, headroom=16 * lanes, slot_rows=lanes, depth=2, moments=("reward",))
        )

        def connect(name: str) -> Collector:
            where: dict[str, Any] = {"run_dir": server.run_dir, "timeout": TIMEOUT_S, "linger": TIMEOUT_S}
            return stack.enter_context(Collector.connect(server.name, schema=schema, lanes=lanes, name=name, **where))

        of_host = connect("host")
        found: dict[str, tuple[Collector, Write]] = {HOST_ROWS: (of_host, lambda: of_host.write(host))}
        if options.device == "cuda":
            import torch

            tensors = {name: torch.from_numpy(array).cuda() for name, array in host.items()}
            direct, through = connect("direct"), connect("through-host")
            found = {
                OURS: (direct, lambda: direct.write(tensors)),
                THROUGH_HOST: (through, lambda: through.write({name: tensor.cpu() for name, tensor in tensors.items()})),
            } | found
        yield found


def write_us(collector: Collector, write: Write, ticks: int, *, is_busy: bool = False) -> float:
    """Median of the call, all slots free."""
    took = []
    for tick in range(WARM_UP_TICKS + ticks):
        collector.flush(timeout=TIMEOUT_S)
        if is_busy:
            hold(BUSY_S)
        start_s = time.perf_counter()
        write()
        if tick >= WARM_UP_TICKS:
            took.append(time.perf_counter() - start_s)
    collector.flush(timeout=TIMEOUT_S)
    return statistics.median(took) * 1e6


def commit_ms(collector: Collector, write: Write, ticks: int) -> float:
    """Median time from the call to the flush's end."""
    took = []
    for _ in range(WARM_UP_TICKS + ticks):
        start_s = time.perf_counter()
        write()
        collector.flush(timeout=TIMEOUT_S)
        took.append(time.perf_counter() - start_s)
    return statistics.median(took[WARM_UP_TICKS:]) * 1e3


def stream_gb_per_s(collector: Collector, write: Write, ticks: int) -> float:
    collector.flush(timeout=TIMEOUT_S)
    start_s = time.perf_counter()
    for _ in range(4 * ticks):
        write()
    collector.flush(timeout=TIMEOUT_S)
    return 4 * ticks * collector.lanes * collector.schema.stride / (time.perf_counter() - start_s) / 1e9


def measure_copies(report: Report, lanes: int) -> None:
    """Times on the device, by its own events. What is saved is the difference of the two sides, a tick."""
    import torch

    n_bytes = lanes * transition_schema().stride
    host = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=True)
    here, there = (torch.zeros(n_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    path = {"to the host": (host, here), "to the ring": (there, host)}
    for what, (to, source) in path.items():
        report.measure("copies of a tick", f"copy {what}, {n_bytes:,} B", "µs", {PATH: partial(copy_us, to, source)})
    report.measure("copies of a tick", f"copy into the ring, {n_bytes:,} B", "µs", {WITHIN: partial(copy_us, there, here)})
    medians: Mapping[str, float] = {series.what: series.median for series in report.series if series.group == "copies of a tick"}
    to_host, to_ring, within = medians.values()
    report.raw["a slot in device memory would save, µs a tick"] = to_host + to_ring - within
    synchronize(report.options.device)


def copy_us(to: Any, source: Any, copies: int = 50) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    to.copy_(source, non_blocking=True)
    hold(BUSY_S)  # the copies are all queued before the first begins: launching them is no part of the figure
    start.record()
    for _ in range(copies):
        to.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / copies * 1e3


def hold(seconds: float) -> None:
    """Queues a kernel that spins so long."""
    import torch

    torch.cuda._sleep(round(seconds * CYCLES_PER_S))


if __name__ == "__main__":
    main()
