"""How messages show a value: short, at once, and without raising, whatever the value is."""

from __future__ import annotations

import time

import pytest
from replay_server_protocol.errors import shown
from support.oddities import oddities


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a", "'a'"),
        ((1, "x"), "(1, 'x')"),
        (10**5000, "an integer of 16,610 bits"),
        (b"x" * 100, "b'xxxxxxxxxxxxxxxxxxxx'… (100 bytes)"),
        (dict.fromkeys(range(100_000)), "a dict of 100,000 keys"),
    ],
    ids=["number", "text", "tuple", "huge number", "bytes", "dict"],
)
def test_a_value_is_shown_as_it_is_or_cut_short(value: object, text: str) -> None:
    assert shown(value) == text


def test_every_oddity_is_shown_in_a_line() -> None:
    for value in oddities():
        assert 0 < len(shown(value)) <= 200


def test_a_deep_and_a_long_value_cost_no_time() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    before_s = time.monotonic()
    assert shown(deep) == "[[[[...]]]]"
    assert len(shown([[]] * 5_000_000)) < 200
    assert time.monotonic() - before_s < 1
