"""A view drawn with rich, at whatever size the console has. Pure: the same view and size give the same picture.

```
default  serving  cpu  pid 4711  generation 1  up 0:12:03
ring       ━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━  62.5 %          a section a line or more;
           625,000 of 1,000,000 rows, window [0, 625,000)      long texts wrap, nothing is cut
flow       collectors blocked for 2.3 s …
collectors name    pid  lanes …                                those that wait first; too many: "and 12 more, 3 of them waiting"
events     12:00:01  collector walker (pid 4712) came          as many of the last ones as there is room for
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from replay_server.top.events import LONG_S
from replay_server.top.plain import blocked, percentiles
from replay_server.top.watch import View
from replay_server.units import human_bytes, human_count, human_seconds

_CLIENTS = {
    "collectors": {"lanes": "lanes", "committed_rows": "rows", "credits": "credits", "rate": "rows/s"},
    "learners": {"batches": "batches", "open_leases": "leases", "dropped": "dropped", "rate": "per s"},
}
"""Of each kind of client: keys of the report, and the headings of their columns."""
_NARROW = 90
"""Below so many columns a table of clients has the whole width: at 60 its widest figures just fit."""
_BARS = "▁▂▃▄▅▆▇█"
_LABEL_COLUMNS = 11
_FEWEST_EVENTS = 3
_BAD, _WAITS, _DIM, _LABEL = "bold red", "yellow", "dim", "bold cyan"

Lines = list[list[Segment]]


class Picture:
    """A view as a renderable, as high as it takes; with ``fits_screen`` a low screen has fewer clients and events, and says so."""

    def __init__(self, view: View, *, fits_screen: bool = False) -> None:
        self._view = view
        self._fits_screen = fits_screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, height = self._view, options.size.height if self._fits_screen else None
        flat = options.update(height=None)

        def drawn(most_clients: int | None) -> Lines:
            return _lines(console, flat, [*_head(view), *_body(view, options.max_width, most_clients)])

        events = _lines(console, flat, _events(view.events[-height:] if height is not None else view.events))
        if height is None:
            head = drawn(None)
        else:
            most = min(height, max((len(view.report[kind]) for kind in _CLIENTS), default=0) if view.report is not None else 0)
            needed = height - min(_FEWEST_EVENTS, len(events)) - 1  # the last line says how to leave
            while len(head := drawn(most)) > needed and most > 1:
                most = max(1, most - (len(head) - needed))
            room = max(0, height - 1 - len(head))
            events = events[len(events) - room :] if room < len(events) else events
            if len(head) > height - 1:
                head = [*head[: max(0, height - 2)], *_lines(console, flat, [Text("… enlarge the terminal to see the rest", style=_BAD)])]
        last = _lines(console, flat, [Text("q leaves", style=_DIM)]) if height is not None else []
        for drawn_line in [*head, *events, *last]:
            yield from drawn_line
            yield Segment.line()


def _lines(console: Console, options: ConsoleOptions, parts: Iterable[ConsoleRenderable]) -> Lines:
    return [line for part in parts for line in console.render_lines(part, options, pad=False)]


def _section(label: str, *parts: ConsoleRenderable) -> Table:
    """Parts one below the other, after a label; texts wrap inside."""
    grid = Table.grid(expand=True, padding=0)
    grid.add_column(width=_LABEL_COLUMNS, no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(Text(label, style=_LABEL), Group(*parts))
    return grid


def _head(view: View) -> Iterator[ConsoleRenderable]:
    if view.missing is not None:
        yield Text(view.missing, style=_BAD, overflow="fold")
    report = view.report
    if report is not None:
        device = report["device"]
        minutes, seconds = divmod(int(report["uptime_s"]), 60)
        parts = [
            (report["name"], "bold"),
            (report["phase"], "green" if report["phase"] == "serving" else _WAITS),
            device["name"] or device["kind"],
        ]
        parts += [f"pid {report['pid']}", f"generation {report['generation']}", f"up {minutes // 60}:{minutes % 60:02}:{seconds:02}"]
        if view.missing is not None:
            parts.insert(0, ("last seen:", _DIM))
        if report["run_id"] is not None:
            parts.append(f"run {report['run_id']}")
        yield Text("  ", overflow="fold").join(Text.assemble(part) for part in parts)


def _body(view: View, width: int, most_clients: int | None) -> Iterator[ConsoleRenderable]:
    report = view.report
    if report is None:
        return
    if report["ring"] is not None:
        yield _ring(report["ring"])
    yield _rates(view, report["rates"], width - _LABEL_COLUMNS)
    latency = report["latency"]
    yield _section("latency", Text(f"p50/p99: commit {percentiles(latency['commit_us'])}, grant {percentiles(latency['grant_us'])}"))
    yield _flow(report["flow"])
    yield _memory(report)
    if report["episodes"] is not None and report["episodes"]["count"]:
        yield _episodes(report["episodes"])
    if report["staleness"] is not None and report["staleness"]["mean"] is not None:
        stale = report["staleness"]
        yield _section("staleness", Text(f"mean {stale['mean']:.2f}, at most {stale['max']:,} policy versions behind"))
    for kind, columns in _CLIENTS.items():
        if report[kind]:
            parts = _clients(view, kind, report[kind], columns, most_clients, is_narrow=width < _NARROW)
            yield from [Text(kind, style=_LABEL), *parts] if width < _NARROW else [_section(kind, *parts)]


def _ring(ring: Mapping[str, Any]) -> Table:
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    fill = ring["size_rows"] / ring["capacity_rows"]
    bar.add_row(ProgressBar(total=1.0, completed=fill, complete_style="cyan", finished_style="cyan"), Text(f"{100 * fill:.1f} %"))
    words = f"{ring['size_rows']:,} of {ring['capacity_rows']:,} rows, window [{ring['tail']:,}, {ring['committed']:,})"
    return _section("ring", bar, Text(words))


def _rates(view: View, rates: Mapping[str, float], width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    bars = max(0, width - 36)
    grid.add_row(Text(f"{rates['rows_per_s']:,.0f} rows/s"), Text(f"{human_bytes(rates['bytes_per_s'])}/s"), _sparks(view.row_rates, bars))
    grid.add_row(Text(f"{rates['batches_per_s']:,.1f} batches/s"), Text(), _sparks(view.batch_rates, bars))
    return _section("rates", grid)


def _sparks(rates: Sequence[float], columns: int) -> Text:
    """The last rates as bars, the highest one full."""
    shown = rates[-columns:] if columns else ()
    most = max(shown, default=0.0)
    bars = "".join(_BARS[round(rate / most * (len(_BARS) - 1))] if most else _BARS[0] for rate in shown)
    return Text(bars, style="cyan", no_wrap=True, overflow="crop")


def _flow(flow: Mapping[str, Any]) -> Table:
    lines = [Text(blocked(flow), style=_WAITS) if flow["blocked_side"] else Text(f"{flow['state']} for {flow['since_s']:.0f} s")]
    if flow["samples_per_insert"] is not None:
        aim = flow["samples_per_insert_target"]
        told = f", aims at {aim:g}, tolerance {flow['tolerance_rows']:,} rows" if aim is not None else ""
        lines.append(Text(f"samples per insert {flow['samples_per_insert']:.3g}{told}"))
    seconds = flow["time_in_state_last_minute_s"]
    whole_s = sum(seconds.values())
    shares = sorted(((s / whole_s, state) for state, s in seconds.items() if whole_s and s >= whole_s / 100), reverse=True)
    if shares:
        lines.append(Text("last minute: " + ", ".join(f"{state} {100 * share:.0f} %" for share, state in shares), style=_DIM))
    return _section("flow", *lines)


def _memory(report: Mapping[str, Any]) -> Table:
    ring, ingress, parts = report["ring"], report["ingress"], []
    if ring is not None:
        held = [f"{human_bytes(ring[f'{place}_bytes'])} ({place})" for place in ("device", "host") if ring[f"{place}_bytes"]]
        parts.append(f"ring {' and '.join(held)}")
    parts.append(f"slots {human_bytes(ingress['host_bytes'])} ({ingress['segments']} segments, {ingress['occupied_slots']} slots occupied)")
    parts.append(f"mailboxes {human_bytes(report['mailboxes']['host_bytes'])}")
    return _section("memory", Text(", ".join(parts)))


def _episodes(episodes: Mapping[str, Any]) -> Table:
    last = episodes["last"]
    words = f"{episodes['count']:,} ended; the last {last['count']}: "
    return _section("episodes", Text(f"{words}return {last['mean_return']:.4g}, length {last['mean_length']:.4g} on average"))


def _clients(
    view: View, kind: str, clients: Sequence[Mapping[str, Any]], columns: Mapping[str, str], most: int | None, *, is_narrow: bool
) -> Iterator[ConsoleRenderable]:
    """A table of those that wait longest and then the others; below it what for, after a second, and whose rows were rejected."""
    ordered = sorted(clients, key=lambda client: -client["waiting_s"] if client["waiting_on"] else 1.0)
    shown, left_out = ordered[:most], ordered[most:] if most is not None else []
    table = Table(box=None, padding=(0, 1 if is_narrow else 2, 0, 0), pad_edge=False, header_style=_DIM)
    table.add_column("name", overflow="fold", min_width=6)
    for heading in ("pid", *columns.values(), "waits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for client in shown:
        rate = view.client_rates.get((kind, client["name"], client["pid"]))
        figures = {**client, "rate": None if rate is None else round(rate)}
        away = "" if client["state"] == "attached" else f" ({client['state']})"
        waits = Text(human_seconds(client["waiting_s"]), style=_WAITS) if client["waiting_on"] else Text("-")
        table.add_row(Text(client["name"] + away), str(client["pid"]), *(human_count(figures[key]) for key in columns), waits)
    yield table
    for client in shown:
        yield from _notes(client)
    if left_out:
        waiting = sum(client["waiting_on"] is not None for client in left_out)
        yield Text(f"and {len(left_out)} more, {waiting} of them waiting", style=_DIM)


def _notes(client: Mapping[str, Any]) -> Iterator[Text]:
    if client["waiting_on"] and client["waiting_s"] >= LONG_S:
        yield Text(f"{client['name']} waits {human_seconds(client['waiting_s'])}: {client['waiting_on']}", style=_WAITS)
    if client.get("rejected_rows"):
        where = client["last_nonfinite"]
        told = f", the last non-finite one in field {where['field']} of row {where['row']:,}" if where else ""
        yield Text(f"{client['name']}: {client['rejected_rows']:,} rows rejected{told}", style=_BAD)


def _events(events: Sequence[Any]) -> list[Table]:
    return [_section(event.clock, Text(event.words)) for event in events]
