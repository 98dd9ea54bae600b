"""No schedule of any of these worlds breaks a promise, and from each of their states some schedule leads to rest.

The first table takes half a minute of one core; ``scripts/test model --all`` explores the second one too.
"""

from __future__ import annotations

import os

import pytest
from model.explore import explore
from model.protocol_model import ProtocolModel
from model.states import Faults, Sizes
from support.rarely import rarely

LINKED = Sizes(publishes=4, capacity=2, has_links=True)

WORLDS = {
    "two collectors": Sizes(collectors=2),
    "two learners": Sizes(learners=2),
    "two slots, the ring wraps": Sizes(publishes=4, depth=2, batches=2, lease_ticks=1),
    "spans of one and two rows": Sizes(publishes=4, depth=2, batches=2, capacity=2, headroom=2, spans=((0, 0), (0,))),
    "a span larger than the capacity": Sizes(publishes=3, capacity=1, headroom=2, spans=((0, 0),)),
    "two deaths, two collectors": Sizes(collectors=2, publishes=1, faults=Faults(deaths=2)),
    "a death, two slots": Sizes(publishes=3, depth=2, faults=Faults(deaths=1)),
    "a broken connection": Sizes(publishes=3, batches=2, faults=Faults(breaks=1)),
    "a needless repeat": Sizes(publishes=3, batches=2, faults=Faults(repeats=1)),
    "a session of a living process ends": Sizes(publishes=3, batches=2, faults=Faults(partings=1)),
    "a restart": Sizes(publishes=3, batches=2, faults=Faults(restarts=1)),
    "a restart, a death and a broken connection": Sizes(faults=Faults(restarts=1, breaks=1, deaths=1)),
    "links": LINKED,
    "links of two collectors, one of them slow": Sizes(collectors=2, capacity=2, headroom=2, spans=((0,), (0, 0)), has_links=True),
    "links of two lanes, cuts and steps left out": Sizes(
        publishes=4, depth=2, capacity=3, headroom=2, spans=((0, 1), (0,), (0, ~1)), has_links=True
    ),
    "links over a restart": Sizes(publishes=3, capacity=2, has_links=True, faults=Faults(restarts=1)),
    "samples per insert": Sizes(publishes=3, depth=2, batches=3, capacity=2, samples_per_insert=1.0, tolerance=1),
    "samples per insert, a death": Sizes(publishes=3, batches=3, samples_per_insert=1.0, tolerance=1, faults=Faults(deaths=1)),
}

LONG = (
    "two deaths, two collectors",
    "a needless repeat",
    "a session of a living process ends",
    "links of two collectors, one of them slow",
)

LARGE_WORLDS = {
    "two deaths, two slots": Sizes(publishes=3, depth=2, faults=Faults(deaths=2)),
    "links over the end of a session": Sizes(publishes=3, capacity=2, has_links=True, faults=Faults(partings=1)),
    "two collectors with two slots": Sizes(collectors=2, depth=2),
    "two learners, the ring wraps": Sizes(publishes=3, learners=2),
    "two collectors, two learners": Sizes(collectors=2, publishes=1, learners=2),
    "a death among two learners": Sizes(learners=2, faults=Faults(deaths=1)),
    "a broken connection and a needless repeat": Sizes(depth=2, faults=Faults(breaks=1, repeats=1)),
    "a session ends, then a death": Sizes(publishes=3, depth=2, faults=Faults(partings=1, deaths=1)),
    "two restarts": Sizes(depth=2, faults=Faults(restarts=2)),
    "two needless repeats": Sizes(publishes=3, faults=Faults(repeats=2)),
    "two batches, two needless repeats": Sizes(publishes=3, batches=2, faults=Faults(repeats=2)),
    "links, a lane cut and a broken connection": Sizes(
        publishes=3, capacity=3, headroom=2, spans=((0, 1), (0,), (0, ~1)), has_links=True, faults=Faults(breaks=1)
    ),
}


def assert_holds(name: str, sizes: Sizes, most_states: int) -> None:
    exploration = explore(ProtocolModel(sizes), most_states)
    print(f"\n{name}: {exploration}")
    assert exploration.counterexample is None, str(exploration)
    assert exploration.states > 1000  # it was not over before it began


@pytest.mark.parametrize("name", [*(name for name in WORLDS if name not in LONG), *rarely(*LONG)])
def test_every_schedule_keeps_every_promise(name: str) -> None:
    assert_holds(name, WORLDS[name], most_states=150_000)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LARGE_WORLDS)
def test_every_schedule_of_a_larger_world_keeps_every_promise(name: str) -> None:
    if not os.environ.get("REPLAY_TEST_ALL"):
        pytest.skip("minutes; scripts/test model --all")
    assert_holds(name, LARGE_WORLDS[name], most_states=2_000_000)
