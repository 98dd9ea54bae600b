"""A learner's steps, after ``prefetch.py`` of the client: one batch buffer, asked for, gathered, checked against the clock, handed out."""

from __future__ import annotations

from model.daemon import ROWS, SAMPLER
from model.explore import BrokenPromise
from model.promises import chain_fault, row_fault
from model.server_side import Steps
from model.states import Learner, Sizes, State
from replay_server_protocol.messages import Grant, Release, Sample
from replay_server_protocol.states import BUFFER, BufferEvent, BufferState, move


class LearnerSide:
    """Asks, gathers, reads the clock, hands in, attaches again."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def steps(self, state: State) -> Steps:
        for learner in state.learners:
            if learner.is_alive:
                yield from self.steps_of(state, learner)

    def steps_of(self, state: State, learner: Learner) -> Steps:
        name = learner.name
        if learner.buffer is BufferState.FREE and learner.batches < self.sizes.batches:
            yield f"{name} sends request {learner.number}", lambda: state.having(self.asked(_moved(learner, BufferEvent.REQUEST)))
        if learner.from_server:
            grant = learner.from_server[0]
            what = f"lease {grant.lease} on [{grant.tail}, {grant.committed})"
            yield f"{name} takes the grant of {what}", lambda: state.having(self.granted(learner))
        if self.may_repeat(state, learner):
            yield f"{name} repeats request {learner.number}", lambda: self.repeat(state, learner)
        if learner.buffer is BufferState.GATHERING:
            yield from self.gathering(state, learner)
        if not state.is_open(learner):
            yield f"{name} notices that its session is gone and attaches again", lambda: self.attach(state, learner)

    def gathering(self, state: State, learner: Learner) -> Steps:
        """The gather is complete, and seen so; only then the clock is read; then the batch is handed in. A stop may lie between any two."""
        name = learner.name
        if learner.fault is None:
            yield f"{name}'s gather reads the window and is seen complete", lambda: state.having(self.gathered(state, learner))
        elif learner.is_late is None:
            yield f"{name} reads the clock", lambda: state.having(self.clocked(learner))
        else:
            word = "drops its late batch" if learner.is_late else "returns the batch"
            yield f"{name} releases and {word}", lambda: state.having(self.handed_in(learner))

    def asked(self, learner: Learner) -> Learner:
        message = Sample(learner.session, learner.generation, SAMPLER, learner.number, ROWS, 0, None)
        return learner._replace(to_server=(*learner.to_server, message))

    def granted(self, learner: Learner) -> Learner:
        grant, *left = learner.from_server
        learner = learner._replace(from_server=tuple(left))
        if not self.is_mine(learner, grant) or self.is_repeat(learner, grant):
            return learner
        learner = self.noted(learner, grant)
        if grant.number != learner.number or learner.buffer is not BufferState.REQUESTED:
            return self.released(learner, grant, is_used=False)
        learner = learner._replace(grant=grant)
        if grant.deadline_ns < 0:
            return self.asked(self.released(learner, grant, is_used=False))
        return _moved(learner, BufferEvent.GRANT)

    def is_mine(self, learner: Learner, grant: Grant) -> bool:
        return (grant.session, grant.generation) == (learner.session, learner.generation)

    def is_repeat(self, learner: Learner, grant: Grant) -> bool:
        """A grant is repeated if its request was; leases come in the order of their numbers."""
        return grant.lease <= learner.seen_lease

    def noted(self, learner: Learner, grant: Grant) -> Learner:
        """Also one that is given back must be known when it is repeated: its lease has ended."""
        return learner._replace(seen_lease=grant.lease)

    def released(self, learner: Learner, grant: Grant, *, is_used: bool) -> Learner:
        return learner._replace(to_server=(*learner.to_server, Release(grant.session, grant.generation, grant.lease, is_used)))

    def gathered(self, state: State, learner: Learner) -> Learner:
        return learner._replace(fault=self.read(state, _grant(learner)))

    def clocked(self, learner: Learner) -> Learner:
        return learner._replace(is_late=self.is_late(_grant(learner)))

    def is_late(self, grant: Grant) -> bool:
        return grant.deadline_ns < 0

    def handed_in(self, learner: Learner) -> Learner:
        """Late: dropped, the same number is asked again. In time: the caller has it, and whatever it read."""
        learner = self.released(learner, _grant(learner), is_used=not learner.is_late)
        if learner.is_late:
            return _settled(_moved(learner, BufferEvent.LATE))
        if learner.fault:
            raise BrokenPromise(f"{learner.name} returns a batch that was never in its window: {learner.fault}")
        if learner.number <= learner.batches:
            raise BrokenPromise(f"{learner.name} returns two batches drawn alike: both are request {learner.number}'s")
        for event in (BufferEvent.COMPLETE, BufferEvent.TAKE, BufferEvent.RETURN, BufferEvent.IDLE):
            learner = _moved(learner, event)
        return _settled(learner)._replace(number=self.next_number(learner), batches=learner.batches + 1)

    def next_number(self, learner: Learner) -> int:
        return learner.number + 1

    def read(self, state: State, grant: Grant) -> str:
        """What is wrong with what a gather of the whole window reads now; "" if nothing is."""
        fault = row_fault(state, grant, self.sizes)
        if fault or not self.sizes.has_links:
            return fault
        links, ring_rows = state.ring_of(grant.generation)[0].links, self.sizes.ring_rows
        followed = {seq: self.walk(seq, links[seq % ring_rows], grant) for seq in range(grant.tail, grant.committed)}
        return chain_fault(state, grant, self.sizes, followed)

    def walk(self, seq: int, link: int, grant: Grant) -> int | None:
        """The seq one link further, by the rule of the client's ``walk.py``; None where the chain ends or leaves the window."""
        ring_rows = self.sizes.ring_rows
        if not 0 <= link < ring_rows:
            return None
        return seq + (link - seq) % ring_rows if self.is_in_window(seq, link, grant) else None

    def is_in_window(self, seq: int, link: int, grant: Grant) -> bool:
        """Whether the link leads to a later row of the window: read from the slot after the newest row, it comes after ``seq``."""
        return (link - grant.committed) % self.sizes.ring_rows > (seq - grant.committed) % self.sizes.ring_rows

    def may_repeat(self, state: State, learner: Learner) -> bool:
        """After a second of silence: with nothing under way and nothing at the server it is needed, else it counts among the faults."""
        if learner.buffer is not BufferState.REQUESTED:
            return False
        is_waiting = any(request.session == learner.session for request in state.server.requests)
        is_needed = not (learner.to_server or learner.from_server or is_waiting)
        return (is_needed and state.is_open(learner)) or state.faults.repeats > 0

    def repeat(self, state: State, learner: Learner) -> State:
        if learner.to_server or learner.from_server or state.faults.repeats:
            state = state._replace(faults=state.faults._replace(repeats=max(0, state.faults.repeats - 1)))
        return state.having(self.asked(learner))

    def attach(self, state: State, learner: Learner) -> State:
        """A new session, in one step; a running gather is finished and dropped."""
        session = learner.session + 1
        server = state.server._replace(learners=(*state.server.learners, session))
        if learner.buffer in (BufferState.REQUESTED, BufferState.GATHERING):
            learner = _moved(learner, BufferEvent.FORGET)
        learner = learner._replace(session=session, generation=server.generation, sessions=learner.sessions + 1, seen_lease=0)
        state = state._replace(server=server).having(_settled(learner))
        mapped = {x.generation for x in state.learners if x.is_alive}
        return state._replace(pasts=tuple(past for past in state.pasts if past.generation in mapped))


def _grant(learner: Learner) -> Grant:
    assert learner.grant is not None
    return learner.grant


def _moved(learner: Learner, event: BufferEvent) -> Learner:
    return learner._replace(buffer=move(BUFFER, learner.buffer, event))


def _settled(learner: Learner) -> Learner:
    """A grant that is used up is forgotten, but for its lease's number."""
    return learner._replace(grant=None, fault=None, is_late=None)
