"""What must hold of reports, sums and rows, whatever was done to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from replay_server_protocol.endpoints import Endpoints
from support.fault_actors import Actor
from support.fault_players import Cell
from support.fault_schedules import CollectorPart
from support.numbered_rows import NUMBERED, Rows, broken, is_continuous
from support.raw_client import RawLearner
from support.reports import assert_conserved


class Broken(AssertionError):
    """A promise that was not kept."""


def check_report(report: dict[str, Any], depth: int) -> None:
    """At any moment: conserved, and no more credits than slots."""
    try:
        assert_conserved(report)
    except AssertionError as error:
        raise Broken(f"the status report is not true: {error}; {report}") from error
    for collector in report["collectors"]:
        if not 0 <= collector["credits"] <= depth:
            raise Broken(f"credits of {collector['name']}: {collector['credits']} of {depth}")


def present(report: dict[str, Any]) -> set[tuple[str, int]]:
    """Names and pids of the sessions."""
    return {(who["name"], who["pid"]) for who in (*report["collectors"], *report["learners"])}


def what_is_missing(report: dict[str, Any], names: set[tuple[str, int]], depth: int) -> list[str]:
    """Of rest: all credits and leases back, nothing in flight, the sessions those of ``names`` (with pids)."""
    missing = [f"{found['name']} has {found['credits']} credits" for found in report["collectors"] if found["credits"] != depth]
    missing += [f"{found['name']} has {found['open_leases']} leases" for found in report["learners"] if found["open_leases"]]
    if report["ingress"]["occupied_slots"] or report["counters"]["rows_in_flight"]:
        missing.append(f"in flight: {report['ingress']}")
    missing += [f"{name} (pid {pid}) is still there" for name, pid in present(report) - names]
    missing += [f"{name} (pid {pid}) is not there" for name, pid in names - present(report)]
    return missing


def check_sums(report: dict[str, Any], generation: int, actors: dict[str, Actor]) -> None:
    """At rest server and clients agree on this generation's rows: exactly for the living, between sent and credited for the dead."""
    counters = report["counters"]
    if report["generation"] != generation:
        raise Broken(f"status tells generation {report['generation']}, the lock file {generation}")
    pages = [a.page for a in actors.values() if isinstance(a.part, CollectorPart) and a.page[Cell.GENERATION] == generation]
    sent, credited = (sum(page[cell] for page in pages) for cell in (Cell.SENT_ROWS, Cell.CREDITED_ROWS))
    published = counters["rows_published"] - counters["rows_lost"]
    if not credited <= published <= sent:
        raise Broken(f"published {published} rows, clients have sent {sent} and were credited {credited}")
    for found in report["collectors"]:
        page = actors[found["name"]].page
        if found["published_rows"] != found["committed_rows"] + found["rejected_rows"]:
            raise Broken(f"an idle collector's rows: {found}")
        if page[Cell.SENT_ROWS] != page[Cell.CREDITED_ROWS] and page[Cell.GENERATION] == generation:
            raise Broken(f"{found['name']} has sent {page[Cell.SENT_ROWS]} rows and was credited {page[Cell.CREDITED_ROWS]}")


@dataclass(frozen=True, slots=True)
class Window:
    """Everything that can be sampled at one moment, read by hand under a lease: rows and links of the seqs [first, end)."""

    first: int
    end: int
    ring_rows: int
    rows: Rows
    links: Any

    @classmethod
    def read(cls, endpoints: Endpoints) -> Window:
        with RawLearner(endpoints, name="reader") as reader:
            grant = reader.grant(1)
            first, end = grant.tail, grant.committed
            rows = {field.name: np.array(reader.read(field.name, first, end)) for field in NUMBERED}
            links = np.array(reader.read_links(first, end))
            reader.release(grant)
            return cls(first, end, reader.at.ring_rows, rows, links)

    def check(self) -> None:
        """Rows whole, in each collector's order without gap or double; links to the same lane's next row."""
        rows, first = self.rows, self.first
        wrong = broken(rows)
        if wrong.any():
            raise Broken(f"torn or strange rows in the ring: seqs {first + np.flatnonzero(wrong)}")
        if not is_continuous(rows["collector"], rows["number"]):
            raise Broken(f"rows of a collector miss, double or overtake: {rows['collector'].tolist()} {rows['number'].tolist()}")
        seqs = np.arange(first, self.end)
        following = seqs + (self.links - seqs % self.ring_rows) % self.ring_rows
        is_linked = (self.links >= 0) & (following < self.end)
        source, target = seqs[is_linked] - first, following[is_linked] - first
        for name, step in (("collector", 0), ("lane", 0), ("step", 1)):
            if (rows[name][target].astype(np.int64) - rows[name][source] != step).any():
                raise Broken(f"a link leads to another {name}")

    def check_sampled(self, who: str, seqs: Iterable[tuple[int, tuple[int, int]]]) -> None:
        """What somebody was given as rows of these seqs, as (collector, number), is what lies there."""
        for seq, row in seqs:
            at = seq - self.first
            if 0 <= at < self.end - self.first and (self.rows["collector"][at], self.rows["number"][at]) != tuple(row):
                raise Broken(f"{who} was given row {row} as seq {seq}, which is another one")
