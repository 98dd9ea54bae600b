"""What a ReplayHost does, without Ray: the hand of remote collectors and remote learners on the local sidecar.

Nothing that matters lives here. Killed at any moment and started again it goes on: the ring and the knowledge of which publishes were
taken are the sidecar's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ReplayError, ServerGone
from replay_server_protocol.schema import Schema

from replay_server_client.deadline import Deadline
from replay_server_client.ray.intake import Intake
from replay_server_client.ray.outlet import Outlet
from replay_server_client.ray.parcel import Answer, Asked, Bytes, Drawn, Header, Priorities, Sender
from replay_server_client.ray.row_sampler import RowSampler
from replay_server_client.silence import is_held
from replay_server_client.status import query

if TYPE_CHECKING:
    from replay_server_client.ray.lender import Lender

DELIVER_WAIT_S = 2.0
_AGREE_WAIT_S = 5.0
_STATUS_WAIT_S = 2.0


class HostService:
    """Deliveries come one at a time, draws one at a time; the two and reports beside one another."""

    def __init__(self, server: str | None, run_dir: str | None) -> None:
        self._endpoints = Endpoints.resolve(server, run_dir)
        self._intake = Intake(self._endpoints)
        self._intake_lock = threading.Lock()
        self._sampler = RowSampler(self._endpoints, f"host-{os.getpid()}")
        self._lender: Lender | None = None
        self._sampler_lock = threading.Lock()
        self._is_in_host_memory: bool | None = None  # the present ring, where known

    def agree(self, schema: dict[str, object]) -> dict[str, object]:
        """The sidecar's options; makes its ring if it has none yet. Raises SchemaMismatch where the ring has another schema."""
        report = query(self._endpoints, _AGREE_WAIT_S)
        Outlet(self._endpoints, Schema.from_wire(schema), Sender("host", 1, False), Deadline(_AGREE_WAIT_S)).close()
        options = report["options"]
        assert isinstance(options, dict)  # what a status report says
        return options

    def deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object]) -> Answer:
        """See Intake: waits for credits and commits two seconds at most; the answer says how far it came."""
        with self._intake_lock:
            return self._intake.deliver([_header(h) for h in headers], rows, schema, DELIVER_WAIT_S)

    def forget(self, origins: Sequence[str]) -> None:
        with self._intake_lock:
            self._intake.forget(origins)

    def draw(self, asked: Asked, timeout_s: float) -> Drawn:
        """Uniform rows of a ring in host memory by RowSampler, all else by Lender, which needs torch."""
        with self._sampler_lock:
            try:
                if not is_held(self._endpoints):  # else each learner that asks would wait for one
                    raise ServerGone(f"server {self._endpoints.name!r} has ended; its host looks for the next one")
                if asked.is_plain and self._is_ring_in_host_memory():
                    return self._sampler.draw(asked.draws, asked.key, timeout_s)
                return self._make_lender().draw(asked, timeout_s)
            except ServerGone:
                self._is_in_host_memory = None
                raise

    def write(self, told: Priorities) -> int:
        """How many came too late."""
        with self._sampler_lock:
            return self._make_lender().write(told)

    def leave(self, learner: str) -> None:
        with self._sampler_lock:
            if self._lender is not None:
                self._lender.leave(learner)

    def size(self) -> tuple[int, int]:
        """(generation, rows that can be sampled) of the sidecar now. Raises ServerGone while there is none."""
        report: Any = query(self._endpoints, _STATUS_WAIT_S)
        return report["generation"], report["ring"]["size_rows"] if report["ring"] else 0

    def close(self) -> None:
        """Says bye to the sidecar, which goes on."""
        with self._intake_lock, self._sampler_lock:
            self._intake.forget_all()
            self._sampler.close()
            if self._lender is not None:
                self._lender.close()

    def report(self) -> dict[str, object]:
        """For ``status --cluster``: the sidecar's report, or why there is none, and what this host did since it was started."""
        began = time.monotonic()
        if self._intake_lock.acquire(blocking=False):
            self._intake.close_idle()
            self._intake_lock.release()
        found: dict[str, object] = {"pid": os.getpid(), "server": self._endpoints.name, "run_dir": str(self._endpoints.run_dir)}
        found |= {"parts_taken": self._intake.parts_taken, "parts_repeated": self._intake.parts_repeated}
        try:
            return found | {"state": "up", "sidecar": query(self._endpoints, _STATUS_WAIT_S), "answered_s": time.monotonic() - began}
        except ServerGone as gone:
            return found | {"state": "down", "sidecar": None, "error": str(gone)}
        except ReplayError as error:
            return found | {"state": "unknown", "sidecar": None, "error": str(error)}

    def _is_ring_in_host_memory(self) -> bool:
        if self._is_in_host_memory is None:
            ring: Any = query(self._endpoints, _STATUS_WAIT_S)["ring"]
            if ring is None:
                return True  # it will be asked again
            self._is_in_host_memory = ring["storage"] != "cuda"
        return self._is_in_host_memory

    def _make_lender(self) -> Lender:
        if self._lender is None:
            from replay_server_client.ray.lender import Lender  # with torch, which a host for collectors alone never loads

            self._lender = Lender(self._endpoints)
        return self._lender


def _header(header: Header) -> Header:
    """Whatever way it came, the sender is one."""
    return header._replace(sender=Sender(*header.sender))
