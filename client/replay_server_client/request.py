"""What a learner asks for: the arguments of a sampler, and where its draws start from."""

from __future__ import annotations

from dataclasses import dataclass

from replay_server_protocol.errors import InvalidRequest

from replay_server_client.draw import DRAWS, request_key


@dataclass(frozen=True, slots=True)
class Request:
    """What distinguishes samplers: rows a batch, how they are drawn, and whether only the newest so many may be."""

    rows: int
    by: str
    max_age_rows: int | None

    @classmethod
    def of(cls, rows: int, by: str, max_age_rows: int | None) -> Request:
        """Raises InvalidRequest naming the argument that is wrong."""
        if not is_count(rows, 1):
            raise InvalidRequest(f"n={rows!r}: rows of a batch, at least 1")
        if by not in DRAWS:
            raise InvalidRequest(f"by={by!r}: one of {', '.join(map(repr, DRAWS))}")
        if max_age_rows is not None and not is_count(max_age_rows, 1):
            raise InvalidRequest(f"max_age_rows={max_age_rows!r}: rows, at least 1, or None")
        return cls(rows, by, max_age_rows)


@dataclass(frozen=True, slots=True)
class Seeds:
    """What the draws of one learner start from, besides the server's seed."""

    learner_seed: int
    learner_name: str

    def key(self, server_seed: int, sampler_ordinal: int, number: int) -> int:
        return request_key(server_seed, self.learner_seed, self.learner_name, sampler_ordinal, number)


def is_count(value: object, low: int) -> bool:
    return type(value) is int and low <= value < 2**63
