"""Numbered rows of a collector, and what a ring's server makes of the publishes that any number of its sessions bring."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from replay_server_protocol.episodes import EndedEpisodes, unpack_episodes
from replay_server_protocol.messages import Publish
from replay_server_protocol.moments import Moments
from replay_server_protocol.origins import Origins, Turn
from replay_server_protocol.schema import Schema
from support.fake_server import FakeServer, Taken

SCHEMA = Schema.of(reward="float32", terminated="bool", truncated="bool")
LANES = 2


def rows(first: int, n: int) -> dict[str, object]:
    """Every tenth row ends an episode."""
    reward = np.arange(first, first + n, dtype=np.float32)
    return {"reward": reward, "terminated": reward % 10 == 9, "truncated": np.zeros(n, np.bool_)}


@dataclass
class Ring:
    """What a ring's server makes of publishes that any number of sessions bring: each once, none before its turn."""

    taken: list[Taken] = field(default_factory=list)
    repeated: int = 0

    @classmethod
    def of(cls, server: FakeServer) -> Ring:
        server.settle()
        ring, origins = cls(), Origins()
        for taken in server.taken:
            message = taken.message
            turn = origins.judge(message.origin, message.origin_number, message.origin_first)
            assert turn is not Turn.EARLY, message
            ring.repeated += turn is Turn.REPEAT
            if turn is Turn.NEXT:
                origins.take(message.origin, message.origin_number)
                ring.taken.append(taken)
        return ring

    @property
    def rewards(self) -> list[float]:
        found: list[float] = np.concatenate([SCHEMA["reward"].view(taken.rows) for taken in self.taken]).tolist()
        return found

    @property
    def lanes(self) -> list[int]:
        def marked(message: Publish) -> bytes:
            return message.lanes or np.resize(np.arange(LANES, dtype=np.int32), message.rows).tobytes()

        found: list[int] = np.frombuffer(b"".join(marked(taken.message) for taken in self.taken), np.int32).tolist()
        return found

    @property
    def episodes(self) -> list[EndedEpisodes]:
        return [unpack_episodes(taken.message.episodes) for taken in self.taken if taken.message.episodes]

    @property
    def returns(self) -> Moments:
        total = Moments.empty(1)
        for taken in self.taken:
            if taken.message.rows:
                total.merge(Moments.unpack(taken.message.moments[0], 1))
        return total
