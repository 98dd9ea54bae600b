"""Leases wherever a state names them: in the server, on their way, at the learners. Their deadlines and their numbers.

Numbers of leases rise for ever; two states that differ only in them are one. So before a grant the leases that are still named anywhere
are numbered anew, in their order.
"""

from __future__ import annotations

from model.states import Learner, State
from replay_server_protocol.messages import Grant, Release


def names(state: State) -> list[int]:
    """Every lease that is named somewhere, in the order of opening."""
    named = {held.lease for held in state.server.leases}
    for learner in state.learners:
        named.update(message.lease for message in learner.to_server if isinstance(message, Release))
        named.update(grant.lease for grant in learner.from_server)
        named.add(learner.seen_lease)
        if learner.grant is not None:
            named.add(learner.grant.lease)
    named.discard(0)
    return sorted(named)


def renumbered(state: State) -> State:
    """The same state, with leases numbered from 1."""
    new = {lease: number for number, lease in enumerate([0, *names(state)])}
    if all(lease == number for lease, number in new.items()):
        return state
    leases = tuple(held._replace(lease=new[held.lease]) for held in state.server.leases)

    def renamed(learner: Learner) -> Learner:
        return learner._replace(
            to_server=tuple(x._replace(lease=new[x.lease]) if isinstance(x, Release) else x for x in learner.to_server),
            from_server=tuple(x._replace(lease=new[x.lease]) for x in learner.from_server),
            seen_lease=new[learner.seen_lease],
            grant=None if learner.grant is None else learner.grant._replace(lease=new[learner.grant.lease]),
        )

    return state._replace(server=state.server._replace(leases=leases), learners=tuple(map(renamed, state.learners)))


def ticked(state: State, long_past: int) -> State:
    """One tick later: every deadline is closer by one. From ``long_past`` on no difference is made any more."""

    def later(grant: Grant) -> Grant:
        return grant._replace(deadline_ns=max(grant.deadline_ns - 1, long_past))

    leases = tuple(held._replace(left=max(held.left - 1, long_past)) for held in state.server.leases)
    learners = tuple(
        x._replace(from_server=tuple(map(later, x.from_server)), grant=None if x.grant is None else later(x.grant)) for x in state.learners
    )
    return state._replace(server=state.server._replace(leases=leases), learners=learners)
