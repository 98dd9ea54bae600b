"""The daemon's loop as steps: receive, drain, commit, grant, revoke, bury. What they do is done by the server's own parts (daemon.py).

Each may come at any time, alone: that is more than the loop does, which takes them in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from model.daemon import SAMPLER, Daemon, Parts
from model.explore import BrokenPromise
from model.leases import names, renumbered
from model.promises import promised
from model.states import Collector, Learner, Server, Sizes, State, Ticket
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Credit, Grant, Publish, Release, Sample
from replay_server_protocol.states import SessionEvent, SessionState

from replay_server.credit import Verdict
from replay_server.requests import grant_of
from replay_server.sessions import CollectorSession

Message = Publish | Sample | Release
Steps = Iterator[tuple[str, Callable[[], State]]]
Answers = Iterable[Credit | Grant]
Verb = Callable[[Daemon, Any], Answers]


class ServerSide:
    """The server; a mutation overrides one method, or replaces one of its parts."""

    def __init__(self, sizes: Sizes, parts: Parts) -> None:
        self.sizes = sizes
        self.parts = parts
        self._done: dict[Hashable, tuple[Server, tuple[Ticket, ...], tuple[Credit | Grant, ...]]] = {}

    def steps(self, state: State) -> Steps:
        server = state.server
        for client in state.clients:
            if client.to_server:
                yield f"server takes {_told(client.to_server[0])} of {client.name}", lambda c=client: self.take(state, c)  # type: ignore[misc]
        if server.queue:
            yield "server drains: reserves and submits what fits", lambda: self.act(state, self.drain)
        if self.may_commit(state):
            yield "server sees the copies complete, commits and credits", lambda: self.act(state, self.commit)
        if server.requests:
            yield "server grants", lambda: self.act(renumbered(state), self.grant, len(names(state)))
        if any(held.left < 0 for held in server.leases):
            yield "server revokes: the deadline has passed", lambda: self.act(state, self.revoke)
        for client in state.clients:
            if not client.is_alive and state.is_open(client) and self.may_bury(client):
                yield f"server has read all from {client.name} and buries it", lambda c=client: self.act(state, self.end, (c.session, True))  # type: ignore[misc]
            elif client.is_alive and state.faults.partings and state.is_open(client):
                yield f"{client.name}'s connection is gone for 10 s, its session ends", lambda c=client: self.part(state, c)  # type: ignore[misc]

    def may_commit(self, state: State) -> bool:
        return bool(state.device.stream) and not state.device.stream[0]

    def may_bury(self, client: Collector | Learner) -> bool:
        return not client.to_server

    def is_current(self, state: State, message: Message, client: Collector | Learner) -> bool:
        return message.session in state.open_sessions and message.generation == state.server.generation

    def session_of(self, state: State, message: Message, client: Collector | Learner) -> int:
        return message.session

    def act(self, state: State, verb: Verb, argument: Hashable = None) -> State:
        """Runs ``verb`` on the server's parts and sends what it answers. Done before in the same state of the server, it is only repeated.

        What was reserved meanwhile goes into the ledger, as the publishes promised it.
        """
        key = verb.__name__, argument, state.server, state.device.stream
        done = self._done.get(key)
        if done is None:
            daemon = Daemon.of(state, self.sizes, self.parts)
            answers = verb(daemon, argument)
            done = self._done[key] = daemon.server(), daemon.tickets(), tuple(answers)
        server, stream, answers = done
        ledger = state.ledger
        if server.reserved > len(ledger):
            for publish, first_seq in server.in_flight:
                if publish is not None and first_seq >= len(state.ledger):
                    ledger = promised(ledger, state.segments, self.sizes, publish)
        state = State(server, state.device._replace(stream=stream), *state[2:5], ledger, state.faults, state.pasts)
        for answer in answers:
            state = _sent(state, answer)
        return state

    def take(self, state: State, client: Collector | Learner) -> State:
        """The client's oldest message. One of another session or generation changes nothing."""
        message: Message = client.to_server[0]
        state = state.having(client._replace(to_server=client.to_server[1:]))  # type: ignore[arg-type]
        if not self.is_current(state, message, client):
            return state
        message = message._replace(session=self.session_of(state, message, client))
        if isinstance(message, Publish):
            return self.act(state, self.publish, message)
        return self.act(state, self.sample if isinstance(message, Sample) else self.release, message)

    def publish(self, daemon: Daemon, message: Publish) -> Answers:
        session = daemon.sessions[message.session]
        try:
            verdict = daemon.ingress.accept(session, message, 0)
        except ProtocolViolation as error:
            raise BrokenPromise(f"a collector that keeps the rules is refused: {error}") from error
        is_answered = verdict is Verdict.REPEAT and message.number <= session.credits.credited
        return [credit_of(daemon, session)] if is_answered else []

    def sample(self, daemon: Daemon, message: Sample) -> Answers:
        lease = daemon.leases.find(message.session, SAMPLER, message.number)
        if lease is not None:
            return [grant_of(lease, message)]
        daemon.requests.ask(daemon.learner(message.session), message, 0)
        return []

    def release(self, daemon: Daemon, message: Release) -> Answers:
        lease = daemon.leases.release(message.lease, message.session)
        if lease is not None and not message.is_used:
            daemon.flow.refund(lease.rows)
        return []

    def drain(self, daemon: Daemon, _: object) -> Answers:
        daemon.ingress.drain(0)
        return []

    def commit(self, daemon: Daemon, _: object) -> Answers:
        """Sends each collector the credit for all that is committed; one whose session has ended gets none."""
        credited = daemon.ingress.commit(0)
        return [credit_of(daemon, session) for session in credited if session.state is not SessionState.ENDED]

    def grant(self, daemon: Daemon, last: int) -> Answers:
        daemon.leases._last = last
        return [grant_of(x.lease, x.message) for x in daemon.requests.grant(daemon.ring, daemon.flow, daemon.leases, 0)]

    def revoke(self, daemon: Daemon, _: object) -> Answers:
        for lease in daemon.leases.expire(0):
            daemon.flow.refund(lease.rows)
        return []

    def end(self, daemon: Daemon, ended: tuple[int, bool]) -> Answers:
        """As AttachDesk.end: published slots go on to the ring, leases end now only with their process."""
        token, is_dead = ended
        daemon.requests.forget(token)
        if is_dead:
            for lease in daemon.leases.orphan(token):
                daemon.flow.refund(lease.rows)
        if token in daemon.sessions:
            daemon.sessions[token].happen(SessionEvent.END)
        daemon.learners = tuple(session for session in daemon.learners if session != token)
        return []

    def part(self, state: State, client: Collector | Learner) -> State:
        faults = state.faults._replace(partings=state.faults.partings - 1)
        return self.act(state._replace(faults=faults), self.end, (client.session, False))


def credit_of(daemon: Daemon, session: CollectorSession) -> Credit:
    return Credit(session.token, daemon.generation, session.credits.credited, session.last_committed_seq)


def _sent(state: State, answer: Credit | Grant) -> State:
    """To the session's client, if it lives: the server doesn't know."""
    for client in state.clients:
        if client.session == answer.session and client.is_alive and client.generation == answer.generation:
            return state.having(client._replace(from_server=(*client.from_server, answer)))  # type: ignore[arg-type]
    return state


def _told(message: Message) -> str:
    if isinstance(message, Publish):
        return f"publish {message.number}"
    return f"request {message.number}" if isinstance(message, Sample) else f"the release of lease {message.lease}"
