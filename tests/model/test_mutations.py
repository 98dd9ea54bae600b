"""Each guard of the protocol is needed: without it the explorer finds a schedule that breaks a promise, and shows its decisive steps.

A mutation (mutations.py) is a subclass of one of the server's parts or of one side of the model, or replaces one pure function.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from model import mutations as without
from model.daemon import AS_BUILT, Parts
from model.explore import Counterexample, explore
from model.protocol_model import ProtocolModel
from model.states import Faults, Sizes

from replay_server import ingress, links
from replay_server.flow import Flow

WRAP = Sizes(publishes=3)
LINKS = Sizes(publishes=3, capacity=2, has_links=True)
GRANT, GATHER, CLOCK, RETURN = "takes the grant", "gather reads", "reads the clock", "returns the batch"
COPY, COMMIT, REVOKE = "the stream copies", "sees the copies complete", "server revokes"
TORN = "returns a batch that was never in its window"


@dataclass(frozen=True)
class Mutation:
    """What is changed, which promise must break then, and steps its schedule must show, in this order."""

    name: str
    sizes: Sizes
    promise: str
    steps: tuple[str, ...]
    parts: Parts = AS_BUILT
    sides: dict[str, Any] = field(default_factory=dict)

    def explore(self) -> Counterexample | None:
        exploration = explore(ProtocolModel(self.sizes, parts=self.parts, **self.sides))
        print(f"\n{self.name}: {exploration}")
        return exploration.counterexample


MUTATIONS = [
    Mutation(
        "floor without leases",
        WRAP,
        TORN,
        ("server grants", "publishes it as 3", COPY, GATHER, CLOCK, RETURN),
        Parts(ring=without.FloorWithoutLeases),
    ),
    Mutation(
        "credit at submit",
        WRAP,
        "written again before its copy",
        ("server drains", "takes the credit up to 1", "fills slot 0 and publishes it as 2"),
        Parts(credits=without.CreditedAtSubmit),
        {"server": without.CreditsAtSubmit},
    ),
    Mutation(
        "commit at launch",
        WRAP,
        "the window shows",
        ("drains", COMMIT),
        Parts(stream=without.CommitsAtLaunch),
        {"server": without.SeesAllAtOnce},
    ),
    Mutation("grant of reserved rows", WRAP, TORN, ("drains", "server grants", GATHER, RETURN), Parts(requests=without.GrantsReservedRows)),
    Mutation(
        "clock read before the gather's end",
        WRAP,
        TORN,
        (GRANT, CLOCK, "the clock ticks", REVOKE, COPY, GATHER, RETURN),
        sides={"learner": without.ClockFirst},
    ),
    Mutation(
        "learner's clock behind the server's",
        WRAP,
        TORN,
        (GRANT, "the clock ticks", REVOKE, COPY, GATHER, CLOCK, RETURN),
        sides={"learner": without.ClockBehind, "world": without.LongMemory},
    ),
    Mutation(
        "no revocation",
        Sizes(publishes=3, faults=Faults(breaks=1)),
        "waits for ever: lease 1 is open",
        (GRANT, "releases", "what learner 0 sent is lost"),
        Parts(leases=without.NeverRevokes),
    ),
    Mutation(
        "release without the lease's number",
        Sizes(publishes=3, faults=Faults(repeats=1)),
        TORN,
        ("server grants", REVOKE, "server grants", GRANT + " of lease 1", "takes the release of lease 1", GRANT + " of lease 2", RETURN),
        Parts(leases=without.EndsAnyLease),
    ),
    Mutation(
        "a lost connection ends leases",
        Sizes(publishes=3, faults=Faults(partings=1)),
        TORN,
        ("server grants", "connection is gone", COPY, GATHER, RETURN),
        sides={"server": without.PartingIsDeath},
    ),
    Mutation(
        "buried before all was read",
        Sizes(publishes=1, faults=Faults(deaths=1)),
        "1 publishes of collector 0 were never committed",
        ("fills slot 0", "collector 0 dies", "buries it"),
        sides={"server": without.BuriesUnread},
    ),
    Mutation(
        "links completed after the event",
        LINKS,
        "the link of seq 0 leads to none instead of seq 1",
        ("publishes it as 2", COMMIT, GRANT + " of lease 1 on [0, 2)", GATHER, RETURN),
        Parts(ingress=without.LinksCompletedAfterTheEvent),
    ),
    Mutation(
        "no window mask on links",
        LINKS,
        "the link of seq 0 leads to seq 1 instead of none",
        ("the stream writes links [1]", GRANT + " of lease 1 on [0, 1)", GATHER, RETURN),
        sides={"learner": without.NoWindowMask},
    ),
    Mutation(
        "request numbers used again",
        Sizes(publishes=1, batches=2),
        "two batches drawn alike",
        (RETURN, "sends request 1", RETURN),
        sides={"learner": without.SameNumberAgain},
    ),
    Mutation(
        "a repeated grant is given back",
        Sizes(publishes=3, faults=Faults(repeats=1)),
        TORN,
        ("repeats request 1", GRANT, GRANT, "takes the release", COPY, GATHER, RETURN),
        sides={"learner": without.GivesRepeatsBack},
    ),
    Mutation(
        "a grant given back is forgotten",
        Sizes(publishes=3, faults=Faults(repeats=2)),
        TORN,
        (
            "repeats request 1",
            "repeats request 1",
            GRANT + " of lease 1",
            REVOKE,
            GRANT + " of lease 2",
            "release of lease 2",
            "drops its late batch",
            GRANT + " of lease 2",
            RETURN,
        ),
        sides={"learner": without.KnowsOnlyTakenGrants},
    ),
    Mutation(
        "repeats taken again",
        Sizes(publishes=1, faults=Faults(repeats=1)),
        "publish 1 of collector 0 is taken a second time",
        (COMMIT, "repeats what is unanswered", "server takes publish 1", "server drains"),
        Parts(credits=without.TakesRepeats),
    ),
    Mutation(
        "gaps taken",
        Sizes(publishes=2, depth=2, faults=Faults(breaks=1)),
        "publish 2 of collector 0 is taken though 1 is missing",
        ("publishes it as 1", "what collector 0 sent is lost", "publishes it as 2", "server takes publish 2"),
        Parts(credits=without.TakesGaps),
    ),
    Mutation(
        "a publish is never repeated",
        Sizes(publishes=1, faults=Faults(breaks=1)),
        "waits for ever: collector 0 wait for credits",
        ("publishes it as 1", "what collector 0 sent is lost"),
        sides={"collector": without.NeverRepeats},
    ),
    Mutation(
        "publishes of an old generation taken",
        Sizes(publishes=2, faults=Faults(restarts=1)),
        "its credit was doubled",
        ("another one starts", "publishes it as 1", "attaches again", "server takes publish 1"),
        sides={"server": without.AsksOnlyWho},
    ),
    Mutation(
        "credits of an old generation taken",
        Sizes(publishes=3, faults=Faults(restarts=1)),
        "",
        (COMMIT, "another one starts", "attaches again", "takes the credit up to 1"),
        sides={"collector": without.TakesAnyCredit},
    ),
    Mutation(
        "a smaller span overtakes",
        Sizes(publishes=3, depth=3, capacity=1, headroom=2, spans=((0, 0), (0, 0), (0,))),
        "publish 3 of collector 0 is taken though 2 is missing",
        ("publishes it as 2", "publishes it as 3", "server drains"),
        Parts(ingress=without.TakesWhatFits),
    ),
    Mutation(
        "headroom below a span",
        Sizes(publishes=3, capacity=2, headroom=1, spans=((0, 0),)),
        "waits for ever: .*publishes are queued",
        ("publishes it as 2", "server takes publish 2"),
    ),
    Mutation(
        "one segment for all sessions",
        Sizes(publishes=2, faults=Faults(partings=1)),
        "the window shows",
        ("publishes it as 1", "connection is gone", "attaches again", COPY, COMMIT),
        sides={"world": without.OneSegmentForAllSessions},
    ),
]


def assert_shows(found: Counterexample | None, promise: str, steps: tuple[str, ...]) -> None:
    """The schedule breaks that promise, and has these steps among its own in this order."""
    assert found is not None, "the explorer finds nothing wrong without this guard"
    assert re.search(promise, found.promise), str(found)
    left = iter(str(found).splitlines()[1:])
    for step in steps:
        assert any(step in line for line in left), f"no step {step!r} where it is looked for:\n{found}"


QUICK = {
    "floor without leases",
    "credit at submit",
    "clock read before the gather's end",
    "no revocation",
    "release without the lease's number",
    "links completed after the event",
    "gaps taken",
}
"""The others run with ``scripts/test model --all``."""


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(each, marks=() if each.name in QUICK else pytest.mark.slow, id=each.name.replace(" ", "-")) for each in MUTATIONS],
)
def test_without_the_guard_a_promise_breaks(mutation: Mutation) -> None:
    assert_shows(mutation.explore(), mutation.promise, mutation.steps)


SLOW_LANE = Sizes(collectors=2, publishes=2, capacity=2, headroom=2, spans=((0,), (0, 0)), has_links=True)


def test_without_the_skip_a_slow_lanes_link_lands_in_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete_all(
        previous: links.LinkedSpan, span: links.LinkedSpan, first_offset: links.Int64s, ring_rows: int, oldest_owned_seq: int
    ) -> links.LinkRun | None:
        return links.complete(previous, span, first_offset, ring_rows, 0)

    monkeypatch.setattr(ingress, "complete", complete_all)
    mutation = Mutation("links of overwritten rows completed", SLOW_LANE, "the link of seq", ())
    assert_shows(mutation.explore(), "the link of seq 4 leads to none instead of seq 5", ("the stream writes links", GRANT, GATHER, RETURN))


def test_a_tolerance_that_flow_control_refuses_is_a_dead_end() -> None:
    limited = Sizes(publishes=2, samples_per_insert=1.0, tolerance=0)
    assert Flow(0, 1.0, 0).why_impossible(1, 1) is not None
    found = Mutation("tolerance below half a batch and a span", limited, "", ()).explore()
    assert_shows(found, "waits for ever: .*collector 0 wait for credits; learner 0 wait for batches", ())
