"""A place and its grants: which of them it has had."""

from __future__ import annotations

from typing import Any, cast

from replay_server_client.place import Place
from replay_server_protocol.messages import Grant


def make_place() -> Place:
    return Place(cast(Any, None), cast(Any, None), 1)


def grant_of(lease: int, generation: int = 1, session: int = 7) -> Grant:
    return Grant(session, generation, 0, 1, lease, 0, 10, 0)


def test_a_repeated_grant_is_known() -> None:
    place = make_place()
    assert not place.has_had(grant_of(1))
    assert place.has_had(grant_of(1))
    assert not place.has_had(grant_of(2))


def test_a_grant_that_was_given_back_is_known_when_it_is_repeated() -> None:
    """tests/model found it: lease 2 came while the gather under lease 1 ran, was given back, and came once more."""
    place = make_place()
    place.has_had(grant_of(1))
    place.grant = grant_of(1)
    assert not place.has_had(grant_of(2))  # not waited for: released
    assert place.has_had(grant_of(2))


def test_another_generations_leases_are_new_whatever_their_numbers() -> None:
    place = make_place()
    place.has_had(grant_of(5))
    assert not place.has_had(grant_of(1, generation=2))
    assert not place.has_had(grant_of(1, generation=2, session=8))
    assert place.has_had(grant_of(1, generation=2, session=8))
