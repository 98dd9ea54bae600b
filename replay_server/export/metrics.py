"""The metrics: one prefix, base units, `_total` counters, every series there from the start, and labels from bounded sets.

Gauges are 0 while no server answers, counters and histograms stay where they were; those of a new server start anew, as Prometheus expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from replay_server import __version__
from replay_server.counters import WAIT_BOUNDS_S
from replay_server.export.client_totals import ClientTotals
from replay_server.export.reading import Report, clients, fill, found, number
from replay_server.export.record import Record
from replay_server.export.sample_age import AGE_BOUNDS_S
from replay_server.flow import FlowState

PREFIX = "replay_server_"
PHASES = ("waiting_for_schema", "waiting_for_memory", "restoring", "serving", "closing")

_GAUGES = (
    ("uptime_seconds", "Seconds since the server's start.", "uptime_s"),
    ("ring_capacity_rows", "Rows that can be sampled at most.", "ring.capacity_rows"),
    ("ring_allocated_rows", "Rows of the ring, headroom among them.", "ring.ring_rows"),
    ("ring_size_rows", "Rows that can be sampled now.", "ring.size_rows"),
    ("ring_device_bytes", "Device memory of the ring.", "ring.device_bytes"),
    ("ring_host_bytes", "Host memory of the ring.", "ring.host_bytes"),
    ("row_bytes", "Bytes from one row to the next.", "schema.stride_bytes"),
    ("ingress_host_bytes", "Host memory of the collectors' slots.", "ingress.host_bytes"),
    ("ingress_occupied_slots", "Published slots whose credit was not returned yet.", "ingress.occupied_slots"),
    ("ingress_waiting_slots", "Those of them that wait for room in the ring or for the limiter.", "ingress.waiting_slots"),
    ("mailboxes_host_bytes", "Host memory of all mailboxes.", "mailboxes.host_bytes"),
    ("in_flight_rows", "Rows published and not yet committed.", "counters.rows_in_flight"),
    ("samples_per_insert_ratio", "Rows sampled per row inserted so far.", "flow.samples_per_insert"),
    ("samples_per_insert_target_ratio", "The limiter's target; 0: neither side is limited.", "flow.samples_per_insert_target"),
)
_COUNTERS = (
    ("published_rows", "Rows in publishes received.", "rows_published"),
    ("committed_rows", "Rows made visible.", "rows_committed"),
    ("rejected_rows", "Rows rejected.", "rows_rejected"),
    ("masked_rows", "Rows left out by masks.", "rows_masked"),
    ("overwritten_rows", "Committed rows that the ring has overwritten.", "rows_overwritten"),
    ("lost_rows", "Rows that died with an earlier generation.", "rows_lost"),
    ("nonfinite_rows", "Rows with NaN or infinity that were kept.", "nonfinite_rows"),
    ("stale_messages", "Messages of another session or generation.", "stale_messages"),
    ("bad_messages", "Messages that were malformed or not allowed.", "bad_messages"),
    ("refused_connections", "Connections turned away while too few files could be opened.", "connections_refused"),
    ("leases_revoked", "Leases whose deadline passed.", "leases_revoked"),
    ("batches_granted", "Leases opened.", "batches_granted"),
    ("batches_dropped", "Batches given back unused or orphaned by a death.", "batches_dropped"),
    ("sessions_opened", "Sessions opened.", "sessions_opened"),
    ("sessions_lost", "Sessions that ended by a death, a lost connection or a refusal.", "sessions_lost"),
)
_WAITS = (
    ("commit_duration_seconds", "From a publish's arrival to its commit.", "commit"),
    ("slot_wait_duration_seconds", "From a publish's arrival to the submission of its copies.", "slot_wait"),
    ("grant_duration_seconds", "From a request's arrival to its grant.", "grant"),
)
_CLIENT_SUMS = {
    "committed_rows": ("committed_rows", "Rows committed"),
    "rejected_rows": ("rejected_rows", "Rows rejected"),
    "batches": ("batches", "Batches gathered"),
    "rows": ("sampled_rows", "Rows of batches gathered"),
    "dropped": ("dropped_batches", "Batches given back unused"),
}
_AGE_TEXT = "Age of sampled rows, as a uniform draw sees them: rows sampled, by the ages in the window."


class Metrics(Collector):
    """Turns the record into metric families at each scrape."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def collect(self) -> Iterable[Metric]:
        with self._record.lock:
            return list(_families(self._record))


def registry_of(record: Record) -> CollectorRegistry:
    """A registry of this record's metrics alone."""
    registry = CollectorRegistry()
    registry.register(Metrics(record))
    return registry


def _families(record: Record) -> Iterator[Metric]:
    report, last = record.look.report, record.last_report
    yield _gauge("up", "1 while the server answers.", float(report is not None))
    yield _labelled(GaugeMetricFamily, "build_info", "The exporter's version.", "version", {__version__: 1.0})
    yield _labelled(CounterMetricFamily, "looks", "Questions to the status socket, by what came.", "result", record.looks)
    yield _counter("restarts", "New generations seen in place of an earlier one.", record.restarts)
    phase = str(found(report, "phase") or "").partition(" ")[0]  # "restoring 43%"
    yield _labelled(GaugeMetricFamily, "phase", "1 for the server's present phase.", "phase", {p: float(p == phase) for p in PHASES})
    for name, text, path in _GAUGES:
        yield _gauge(name, text, number(report, path))
    yield _gauge("ring_fill_ratio", "Share of the capacity that can be sampled.", fill(report))
    for name, text, key in _COUNTERS:
        yield _counter(name, text, number(last, f"counters.{key}"))
    copied_bytes = number(last, "counters.rows_committed") * number(last, "schema.stride_bytes")
    yield _counter("committed_bytes", "Bytes of committed rows.", copied_bytes)
    yield from _flow(report, last)
    for name, text, key in _WAITS:
        yield _waits(name, text, found(last, f"histograms.{key}"))
    yield _sample_age(record)
    yield from _clients("collector", record.collectors, clients(report, "collectors"), (("credits", "credits", "Slots it may fill."),))
    yield from _clients("learner", record.learners, clients(report, "learners"), (("open_leases", "open_leases", "Leases it holds."),))


def _flow(report: Report | None, last: Report | None) -> Iterator[Metric]:
    state, seconds = found(report, "flow.state"), found(last, "flow.time_in_state_s")
    present = {s.value: float(s.value == state) for s in FlowState}
    yield _labelled(GaugeMetricFamily, "flow_state", "1 for the present state of flow control.", "state", present)
    lasted = {s.value: number(seconds, s.value) for s in FlowState}
    yield _labelled(CounterMetricFamily, "flow_state_seconds", "Time in each state of flow control.", "state", lasted)


def _waits(name: str, text: str, histogram: Any) -> Metric:
    counts = found(histogram, "counts")
    if not isinstance(counts, list) or len(counts) != len(WAIT_BOUNDS_S) + 1:  # none yet, or of another release
        counts = [0] * (len(WAIT_BOUNDS_S) + 1)
    below, buckets = 0, []
    for bound, count in zip((*map(repr, WAIT_BOUNDS_S), "+Inf"), counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=number(histogram, "sum_s"))


def _sample_age(record: Record) -> Metric:
    age = record.sample_age
    buckets = [(repr(bound_s), rows) for bound_s, rows in zip(AGE_BOUNDS_S, age.below_rows, strict=True)]
    return HistogramMetricFamily(PREFIX + "sample_age_seconds", _AGE_TEXT, buckets=[*buckets, ("+Inf", age.rows)], sum_value=age.sum_s)


def _clients(side: str, totals: ClientTotals, present: Sequence[Report], gauges: Sequence[tuple[str, str, str]]) -> Iterator[Metric]:
    """Sums over all sessions of a name, gauges over those attached now; names beyond the limit share one label."""
    yield _gauge(f"{side}s", f"{side.capitalize()}s attached.", len(present))
    for key in totals.keys:
        name, text = _CLIENT_SUMS[key]
        values = {label: sums[key] for label, sums in totals.totals.items()}
        yield _labelled(CounterMetricFamily, f"{side}_{name}", f"{text}, over all sessions of the name.", side, values)
    for name, key, text in (*gauges, ("waiting_seconds", "waiting_s", "How long it has waited.")):
        now = dict.fromkeys(totals.totals, 0.0)
        for client in present:
            label = totals.label(str(client.get("name")))
            now[label] = now.get(label, 0.0) + number(client, key)
        yield _labelled(GaugeMetricFamily, f"{side}_{name}", text, side, now)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, label: str, values: Mapping[str, float]
) -> Metric:
    family = kind(PREFIX + name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
