"""Plays fault schedules with real processes on a real server, and says of each what was broken of the promises.

``python -c "from support.fault_stage import main; main()" cpu 0 7 12`` plays the seeds 0, 7 and 12 and prints a line of JSON for each.
Server and clients are forked from this process, which has imported everything and runs one thread: starting one takes milliseconds. The
clients' part is fault_players.py, what a seed means is fault_schedules.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq
from replay_server_client.status import query
from replay_server_protocol.codec import client_codec
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ServerGone
from replay_server_protocol.messages import Explain
from replay_server_protocol.segment import segment_dir
from support.fault_actors import Actor, adopt_orphans, children_of, descriptors_of, fork, overlap, state_of, weight_of
from support.fault_players import Cell, CollectorPlayer, LearnerPlayer, Page, Phase, Player, note_publishes, play
from support.fault_schedules import WORK_MS, CollectorPart, Fault, LearnerPart, Part, Schedule, draw
from support.fault_verdicts import Broken, Window, check_report, check_sums, present, what_is_missing
from support.numbered_rows import NUMBERED
from support.points import arm
from support.run_queues import RunQueues
from support.servers import _listens

from replay_server import cli
from replay_server.run_directory import read_record

UNDISTURBED_S = 1.0
"""A wait of a client may last so long beyond the time for which server or lease were away."""
CAPTURED_S = 4.0
"""More on CUDA: a learner's first batch of a ring loads kernels and captures a graph."""
SETTLED_S = 1.0
"""Credits, leases and the sessions of the dead are back after so long."""
BURIED_WITH_CHILD_S = 1.0
"""More for a dead process whose forked child holds its connection open."""
WENT_ON_S = 2.0
"""After a new server is ready, its predecessor's living clients have done something there."""
_TURN_S = 0.004
_STATUS_EVERY_S = 0.06
_STATUS_WITHIN_S = 1.0


@dataclass(slots=True)
class Outcome:
    """What became of a seed.

    ``waits_ms``: how long clients to which nothing was done waited in each call, beyond the time for which server or leases were away;
    ``queued_ms``: the same less what client, server and stage waited for a core.
    """

    seed: int
    broken: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    waits_ms: dict[str, list[float]] = field(default_factory=dict)
    settled_ms: float = 0.0
    buried_ms: list[float] = field(default_factory=list)
    went_on_ms: list[float] = field(default_factory=list)
    stale_refused: int = 0
    revoked: int = 0
    late: int = 0
    rows: int = 0
    took_s: float = 0.0
    queued_ms: dict[str, list[float]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)


class Stage:
    """One schedule."""

    def __init__(self, schedule: Schedule, device: str, scratch: Path) -> None:
        self.schedule = schedule
        self.outcome = Outcome(schedule.seed, lines=schedule.lines())
        self._device = device
        self._is_on_host = device == "cpu"
        self._is_weighed = self._is_on_host and schedule.has_schema  # its memory is there from the start
        self._scratch = scratch
        self._endpoints = Endpoints.resolve(f"s{schedule.seed}", scratch / "run")
        self._schema = scratch / "schema.json"
        self._actors: dict[str, Actor] = {}
        self._gone: list[Actor] = []
        self._server: Actor | None = None
        self._servers: list[Actor] = []
        self._ready_s = 0.0
        self._generations: list[int] = []
        self._runs: set[str] = set()
        self._away: list[tuple[float, float]] = []  # when server or rows may have been out of reach
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._buried: list[tuple[float, str, int, float]] = []
        self._opened_s = self._began_s = time.monotonic()
        self._status_at_s = 0.0
        self._silent_since_s: float | None = None
        self._baseline: tuple[int, int] | None = None
        self._can_disturb = True
        self._queues = RunQueues()

    def play(self) -> Outcome:
        began_s = time.monotonic()
        before = _held()
        try:
            self._play()
            self._check_left(before)
        except Broken as error:
            self.outcome.broken.append(str(error))
        except Exception:  # noqa: BLE001 - what the harness met is told like what it found
            self.outcome.broken.append(traceback.format_exc())
        finally:
            self._clear()
        if self.outcome.broken:
            self.outcome.logs = {path.name: path.read_text("utf-8", "replace")[-6000:] for path in sorted(self._scratch.glob("*.log"))}
        self.outcome.took_s = time.monotonic() - began_s
        return self.outcome

    def _play(self) -> None:
        self._schema.write_text(json.dumps(NUMBERED.to_wire()), "utf-8")
        self._start_server()
        if self._is_weighed and not any(fault.who == "server" and fault.point for fault in self.schedule.faults):
            self._turn_until(lambda: self._baseline is not None, "the first report")
        for part in self.schedule.parts:
            self._join(part)
        self._turn_until(lambda: all(actor.page[Cell.READY] or not actor.is_alive for actor in self._clients()), "all clients attached")
        self._began_s = time.monotonic()
        self._away.append((0.0, self._began_s))  # no row before that is promised
        self._note("work begins")
        for place, fault in enumerate(self.schedule.faults):
            if not fault.point:
                self._at(fault.at_ms / 1000, lambda fault=fault, place=place: self._do(fault, place))  # type: ignore[misc]
        self._turn_until(lambda: time.monotonic() - self._began_s > WORK_MS / 1000 and not self._is_disturbed(), "the work is over")
        self._can_disturb = False
        self._note("work ends")
        self._finish()

    # The course of things

    def _turn_until(self, is_done: Callable[[], bool], what: str, within_s: float = 15.0) -> None:
        end = time.monotonic() + within_s
        while not is_done():
            if time.monotonic() > end:
                self._dump()
                raise Broken(f"not within {within_s:g} s: {what}; {self._states()}")
            time.sleep(_TURN_S)  # other processes' memory and states are no events
            self._queues.sample([os.getpid(), *(actor.pid for actor in self._living())])
            self._turn()

    def _turn(self) -> None:
        now_s = time.monotonic()
        for timer in [timer for timer in self._timers if timer[0] <= now_s]:
            self._timers.remove(timer)
            timer[1]()
        self._reap()
        for actor in self._living():
            if actor.fault is not None and actor.page[Cell.REACHED] and state_of(actor.pid) == "T":
                fault, actor.fault = actor.fault, None
                self._at_point(actor, fault)
        if now_s >= self._status_at_s:
            self._status_at_s = now_s + _STATUS_EVERY_S
            self._look_at_status()

    def _at(self, in_s: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + in_s, action))

    def _is_disturbed(self) -> bool:
        """Whether something is under way that must end before the end."""
        return self._server is None or bool(self._timers) or any(actor.stopped_until_s for actor in [self._server, *self._clients()])

    def _at_point(self, actor: Actor, fault: Fault) -> None:
        self._note(f"{fault} came true")
        if not self._can_disturb:
            os.kill(actor.pid, signal.SIGCONT)
        elif fault.what == "stop":
            self._stop(actor, fault.for_ms / 1000, is_stopped=True)
        else:
            self._do(fault, actor.place)

    def _do(self, fault: Fault, place: int) -> None:
        actor = self._server if fault.who == "server" else self._actors.get(fault.who)
        if actor is None or not actor.is_alive:
            return
        self._note(str(fault))
        if fault.what == "stop":
            self._stop(actor, fault.for_ms / 1000)
        elif fault.what == "kill":
            self._kill(actor, place)
        elif fault.what == "restart":
            self._restart(actor, fault)
        else:
            self._order(actor, fault, place)

    def _stop(self, actor: Actor, for_s: float, is_stopped: bool = False) -> None:
        """SIGSTOP now (unless it has stopped itself), SIGCONT later. A second stop meanwhile makes it longer."""
        now_s = time.monotonic()
        if not is_stopped:
            os.kill(actor.pid, signal.SIGSTOP)
        until_s = max(now_s + for_s, actor.stopped_until_s or 0.0)
        actor.stopped_until_s = until_s
        self._disturb(actor, now_s, until_s)

        def go_on() -> None:
            if actor.is_alive and actor.stopped_until_s is not None and time.monotonic() >= actor.stopped_until_s - 1e-4:
                actor.stopped_until_s = None
                os.kill(actor.pid, signal.SIGCONT)
                self._disturb(actor, now_s, time.monotonic())

        self._timers.append((until_s, go_on))

    def _disturb(self, actor: Actor, from_s: float, until_s: float) -> None:
        """Notes that ``actor`` was away, and what that means for others: a server is missed by all, a learner's lease holds the ring."""
        actor.disturbed.append((from_s, until_s))
        if actor.part is None:
            self._away.append((from_s, until_s))
        elif isinstance(actor.part, LearnerPart):
            self._away.append((from_s, min(until_s, from_s + self.schedule.lease_s)))

    def _kill(self, actor: Actor, place: int) -> None:
        killed_s = time.monotonic()
        os.kill(actor.pid, signal.SIGKILL)
        actor.reap()
        self._disturb(actor, killed_s, killed_s + 60.0)
        if self._server is not None:  # else its session has ended with the server
            self._buried.append((killed_s, actor.name, actor.pid, BURIED_WITH_CHILD_S if actor.has_heir else 0.0))
        newcomer = self.schedule.newcomers[place]
        if newcomer is not None:
            self._at(0.03, lambda: self._join(newcomer))

    def _restart(self, server: Actor, fault: Fault) -> None:
        began_s = time.monotonic()
        self._server, self._silent_since_s = None, None
        self._buried.clear()  # their sessions end with the server
        if fault.how == "kill":
            os.kill(server.pid, signal.SIGKILL)
        else:
            server.stopped_until_s = None
            os.kill(server.pid, signal.SIGTERM)
            os.kill(server.pid, signal.SIGCONT)
        place = len(self._away)
        self._away.append((began_s, began_s + 60.0))

        def succeed() -> None:
            self._start_server()
            self._away[place] = (began_s, self._ready_s + WENT_ON_S)  # who must have gone on by then is looked at below
            for actor in self._clients():
                self._expect_to_go_on(actor, began_s, self._ready_s)

        def wait_end() -> None:
            if not server.reap_nowait():
                if time.monotonic() - began_s > 5.0:
                    raise Broken("the server has not ended 5 s after SIGTERM")
                self._at(0.005, wait_end)
            else:
                if fault.how == "term" and server.status != 0:
                    raise Broken(server.last_words())
                self._at(fault.for_ms / 1000, succeed)

        wait_end()

    def _expect_to_go_on(self, actor: Actor, began_s: float, ready_s: float) -> None:
        """Within WENT_ON_S of a new server's readiness, or of the moment at which whoever was away came back."""

        def look() -> None:
            if not actor.is_alive or self._ready_s != ready_s:
                return
            now_s = time.monotonic()
            stopped = [*actor.disturbed, *(stop for stop in self._away if stop[0] > ready_s)]
            away_s = overlap(ready_s, now_s, stopped) + self._queued_s(ready_s, now_s, *self._clients())
            went_on_s = actor.page[Cell.WENT_ON_NS] / 1e9
            if went_on_s > began_s:
                self.outcome.went_on_ms.append(max(0.0, went_on_s - ready_s - away_s) * 1000)
                if went_on_s - ready_s - away_s > WENT_ON_S:
                    raise Broken(f"{actor.name} went on {went_on_s - ready_s:.2f} s after the new server was ready")
            elif now_s - ready_s - away_s > WENT_ON_S:
                self._dump()
                raise Broken(f"{actor.name} has not gone on {WENT_ON_S} s after the new server was ready; {self._states()}")
            else:
                self._at(0.01, look)

        look()

    def _order(self, actor: Actor, fault: Fault, place: int) -> None:
        """The player does it to itself: between two calls, or while it is stopped at none."""
        actor.page[Cell.ORDER] = 1 + place
        now_s = time.monotonic()
        self._disturb(actor, now_s, now_s + 0.5)
        if fault.how != "outlives":
            return
        actor.has_heir = True
        if actor.name != "c0":

            def kill_parent() -> None:
                if actor.is_alive and actor.page[Cell.CHILD]:
                    self._note(f"kill {actor.name}, whose forked child lives on")
                    self._kill(actor, place)

            self._at(0.1, kill_parent)

    # Processes

    def _start_server(self) -> None:
        page, log = Page(), self._scratch / f"server{len(self._generations)}.log"
        options = [*self.schedule.options, *(("--schema", str(self._schema)) if self.schedule.has_schema else ())]
        command = ["serve", "--name", self._endpoints.name, "--run-dir", str(self._endpoints.run_dir), "--device", self._device, *options]
        fault, place = self._armed("server") if not self._generations else (None, -1)

        def serve() -> int:
            if fault is not None:
                _arm(fault, page)
            return cli.main(command)

        server = Actor("server", fork(serve, log), page, None, log, fault, place)
        end = time.monotonic() + 10.0
        while not (_listens(self._endpoints.control_path) and _listens(self._endpoints.status_path)):
            server.reap_nowait()
            if not server.is_alive or time.monotonic() > end:
                raise Broken(f"no server: {log.read_text('utf-8')}")
            time.sleep(0.002)
        self._server, self._ready_s = server, time.monotonic()
        self._servers.append(server)
        record = read_record(self._endpoints.lock_path)
        self._generations.append(int(str(record["generation"])))
        self._runs.add(str(record["run_id"]))
        if len(self._generations) > 1:
            self._say_old_things()

    def _join(self, part: Part) -> None:
        page, log, tell = Page(), self._scratch / f"{part.name}.log", self._scratch / f"{part.name}.json"
        fault, place = self._armed(part.name)
        where = (self._endpoints.name, str(self._endpoints.run_dir))
        orders = tuple(fault.how if fault.what == "fork" else fault.what for fault in self.schedule.faults)
        arguments = (page, where, orders, self.schedule.seed * 100 + len(self._actors))

        def take_part() -> int:
            player: Player
            if isinstance(part, CollectorPart):
                note_publishes(page)
                player = CollectorPlayer(part, *arguments)
            else:
                player = LearnerPlayer(part, self._device, *arguments)
            if fault is not None:
                _arm(fault, page)
            play(player, tell)
            return 0

        self._actors[part.name] = Actor(part.name, fork(take_part, log), page, part, log, fault, place)

    def _armed(self, who: str) -> tuple[Fault | None, int]:
        return next(((f, place) for place, f in enumerate(self.schedule.faults) if f.who == who and f.point), (None, -1))

    def _clients(self) -> list[Actor]:
        return [actor for actor in self._actors.values() if actor.is_alive]

    def _living(self) -> list[Actor]:
        return [*self._clients(), *([self._server] if self._server else [])]

    def _queued_s(self, since_s: float, until_s: float, *actors: Actor) -> float:
        """For how long the machine kept these, the servers and this process from running."""
        servers = {server.pid for server in self._servers}
        return self._queues.delayed_s(since_s, until_s, os.getpid(), *servers, *(actor.pid for actor in actors))

    def _reap(self) -> None:
        for actor in self._clients():
            if actor.reap_nowait():
                raise Broken(actor.last_words())
        if self._server is not None and self._server.reap_nowait():
            raise Broken(self._server.last_words())

    # What is looked at meanwhile

    def _report(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            return query(self._endpoints, timeout_s)
        except ServerGone:
            return None

    def _look_at_status(self) -> None:
        server = self._server
        if server is None or server.stopped_until_s is not None or state_of(server.pid) == "T":
            self._silent_since_s = None
            return
        report = self._report(0.15)
        now_s = time.monotonic()
        if report is None:
            self._silent_since_s = self._silent_since_s or now_s
            silent_s = now_s - self._silent_since_s - self._queued_s(self._silent_since_s, now_s)
            if state_of(server.pid) != "T" and silent_s > _STATUS_WITHIN_S:
                raise Broken(f"status has not answered for {_STATUS_WITHIN_S} s")
            return
        self._silent_since_s = None
        check_report(report, self.schedule.depth)
        if self._baseline is None and self._is_weighed and not self._actors:
            self._baseline = weight_of(server.pid)
        there = present(report)
        for entry in list(self._buried):
            killed_s, name, pid, more_s = entry
            since_s = now_s - killed_s - overlap(killed_s, now_s, server.disturbed) - self._queued_s(killed_s, now_s)
            if (name, pid) not in there:
                self._buried.remove(entry)
                self.outcome.buried_ms.append(max(0.0, since_s - more_s) * 1000)
            elif since_s > SETTLED_S + more_s:
                raise Broken(f"the session of {name}, killed {since_s:.2f} s ago, is still there")

    def _say_old_things(self) -> None:
        """A message of the generation before, as a client might send that has not noticed: refused and counted."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(self._endpoints.control)
            socket.send(client_codec.encode(Explain(4711, self._generations[-2], "credit", 0, 0)))
            if not socket.poll(3000):
                raise Broken("a message of an old generation was not answered within 3 s")
            socket.recv()

    # The end

    def _finish(self) -> None:
        collectors = [actor for actor in self._clients() if isinstance(actor.part, CollectorPart)]
        for actor in self._living():
            actor.page[Cell.PHASE] = Phase.FINISH
        self._turn_until(lambda: all(actor.page[Cell.IDLE] for actor in collectors), "all collectors flushed")
        report = self._report(2.0)
        if report is None:
            raise Broken("no status at the end")
        committed = report["ring"]["committed"]
        for actor in self._clients():
            actor.page[Cell.FINAL_SEQ] = max(1, committed)
        self._turn_until(lambda: all(actor.page[Cell.IDLE] for actor in self._clients()), "all learners have a last batch")
        self._note("all idle")
        self._settle()
        window = Window.read(self._endpoints) if self._is_on_host else None  # a GPU's ring is judged by the learners alone
        if window is not None:
            window.check()
        self._note("checked")
        for actor in self._clients():
            actor.page[Cell.PHASE] = Phase.LEAVE
        self._turn_until_ended()
        self._note("all gone")
        self._judge_told(window)
        self._end_server()

    def _settle(self) -> None:
        """Everybody is idle: within a second all credits and leases are back, nothing is in flight, the dead are gone."""
        began_s = time.monotonic()
        bound_s = SETTLED_S + (BURIED_WITH_CHILD_S if any(more_s for _, _, _, more_s in self._buried) else 0.0)
        names = {(actor.name, actor.pid) for actor in self._clients()}
        while True:
            report = self._report(2.0)
            if report is None:
                raise Broken("no status at the end")
            check_report(report, self.schedule.depth)
            missing = what_is_missing(report, names, self.schedule.depth)
            if not missing:
                break
            self._queues.sample([os.getpid(), *(actor.pid for actor in self._living())])
            if (now_s := time.monotonic()) - began_s - self._queued_s(began_s, now_s) > bound_s:
                raise Broken(f"not settled within {bound_s:g} s: {missing}")
            time.sleep(0.01)
        self.outcome.settled_ms = (time.monotonic() - began_s) * 1000
        check_sums(report, self._generations[-1], self._actors)
        counters = report["counters"]
        self.outcome.stale_refused, self.outcome.revoked = counters["stale_messages"], counters["leases_revoked"]
        self.outcome.rows = counters["rows_committed"]
        if len(self._generations) > 1 and counters["stale_messages"] < 1:
            raise Broken("an old message was refused and not counted")
        if counters["bad_messages"]:
            raise Broken(f"{counters['bad_messages']} messages of our own clients were bad")

    def _turn_until_ended(self) -> None:
        end = time.monotonic() + 8.0
        while clients := self._clients():
            for actor in clients:
                if actor.reap_nowait():
                    self._gone.append(actor)
                    if actor.status != 0:
                        raise Broken(actor.last_words())
            if time.monotonic() > end:
                self._dump()
                raise Broken(f"not ended 8 s after they were told to leave: {[actor.name for actor in clients]}")
            time.sleep(0.002)

    def _judge_told(self, window: Window | None) -> None:
        outcome = self.outcome
        for actor in self._gone:
            told = json.loads((self._scratch / f"{actor.name}.json").read_text("utf-8"))
            if told["left"] and self._is_on_host:  # CUDA keeps descriptors to a process's end
                raise Broken(f"{actor.name} left {told['left']}")
            outcome.late += told["late"]
            for call, began_s, lasted_s in told["waits"]:
                ended_s = began_s + lasted_s
                own_s = overlap(began_s, ended_s, actor.disturbed)
                beyond_s = lasted_s - overlap(began_s, ended_s, [*actor.disturbed, *self._away])
                queued_s = self._queued_s(began_s, ended_s, actor)
                if beyond_s - queued_s > UNDISTURBED_S + (0.0 if self._is_on_host else CAPTURED_S):
                    away = [(round(a - self._began_s, 2), round(b - self._began_s, 2)) for a, b in self._away]
                    raise Broken(
                        f"{actor.name} waited {lasted_s:.2f} s in {call} from {began_s - self._began_s:.2f} s on, of them "
                        f"{beyond_s - queued_s:.2f} s for nothing that was done; away: {away}"
                    )
                if not own_s:
                    outcome.waits_ms.setdefault(call, []).append(round(max(0.0, beyond_s) * 1000, 3))
                    outcome.queued_ms.setdefault(call, []).append(round(max(0.0, beyond_s - queued_s) * 1000, 3))
            if window is not None:
                window.check_sampled(actor.name, ((int(seq), row) for seq, row in told["seqs"].items()))

    def _end_server(self) -> None:
        server = self._server
        assert server is not None
        for pid in set(children_of(os.getpid())) - {server.pid}:  # forked children of those who are gone: they hold connections
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + SETTLED_S
        while True:
            report = self._report(2.0)
            weight = weight_of(server.pid)
            is_empty = report is not None and not report["collectors"] and not report["learners"] and not report["ingress"]["segments"]
            if is_empty and (self._baseline is None or weight <= self._baseline):
                break
            self._queues.sample([os.getpid(), server.pid])
            if (now_s := time.monotonic()) > end + self._queued_s(end - SETTLED_S, now_s):
                raise Broken(
                    f"after all have gone the server holds (descriptors, threads) {weight}, at first {self._baseline}: "
                    f"{descriptors_of(server.pid)}"
                )
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGTERM)
        server.reap()
        if server.status != 0:
            raise Broken(server.last_words())

    def _check_left(self, before: set[str]) -> None:
        left = sorted(_held() - before)
        left += [f"segment {name}" for name in os.listdir(segment_dir()) if any(f"-{run}-" in name for run in self._runs)]
        run_dir = self._endpoints.run_dir
        left += [str(path) for path in (run_dir.iterdir() if run_dir.exists() else ())]
        if left:
            raise Broken(f"left behind: {left}")

    def _clear(self) -> None:
        """Ends whatever lives, also forked children of the dead, which belong to this process now."""
        for actor in [*self._actors.values(), *([self._server] if self._server else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(actor.pid, signal.SIGKILL)
        for pid in children_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        for run in self._runs:
            for path in segment_dir().glob(f"*-{run}-*"):
                path.unlink(missing_ok=True)

    def _note(self, what: str) -> None:
        self.outcome.happened.append(f"{(time.monotonic() - self._opened_s) * 1000:.0f} ms: {what}")

    def _states(self) -> str:
        return ", ".join(f"{a.name}: {state_of(a.pid)} ready {a.page[Cell.READY]} idle {a.page[Cell.IDLE]}" for a in self._living())

    def _dump(self) -> None:
        """Every thread's stack goes to the logs."""
        for actor in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(actor.pid, signal.SIGCONT)
                os.kill(actor.pid, signal.SIGUSR2)
        time.sleep(0.3)


def _arm(fault: Fault, page: Page) -> None:
    """For the time of the work."""
    arm(fault.point, fault.passes, lambda: page[Cell.PHASE] == Phase.WORK, lambda: page.__setitem__(Cell.REACHED, 1))


def _held() -> set[str]:
    """Of this process: what its own checks leave would be told as the product's."""
    return {fd for fd in descriptors_of(os.getpid()) if "/proc/" not in fd}


def run_seed(seed: int, device: str = "cpu") -> Outcome:
    scratch = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
    try:
        return Stage(draw(seed), device, scratch).play()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    """Arguments: the device, then seeds."""
    device, *seeds = sys.argv[1:]
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or each child's first collection would copy this process's whole heap
    adopt_orphans()
    for seed in seeds:
        print(json.dumps(dataclasses.asdict(run_seed(int(seed), device))), flush=True)
