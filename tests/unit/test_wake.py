"""Promises of the bell: heard by whoever listens, once until hushed, silent for nobody."""

from __future__ import annotations

import os
import select
import time

import pytest
from replay_server_client.wake import Wake

HOUR_NS = 3_600_000_000_000


def rings(wake: Wake) -> bool:
    return bool(select.select([wake.fd], [], [], 0)[0])


def test_a_bell_rung_after_listen_is_heard_until_it_is_hushed() -> None:
    wake = Wake()
    wake.listen()
    wake.ring()
    assert rings(wake)
    wake.hush()
    assert not rings(wake)
    wake.close()


def test_who_rings_often_writes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wake, written = Wake(), []
    monkeypatch.setattr(os, "write", lambda fd, content: written.append(content))
    wake.ring()
    assert not written  # nobody listens
    wake.listen()
    for _ in range(3):
        wake.ring()
    assert len(written) == 1
    wake.close()


def test_a_bell_for_later_is_heard_as_any_other() -> None:
    wake = Wake()
    wake.listen()
    wake.ring(time.monotonic_ns() + HOUR_NS)
    assert rings(wake)
    wake.close()


@pytest.mark.parametrize("sooner_ns", [0, HOUR_NS], ids=["now", "in an hour"])
def test_a_bell_for_sooner_ends_the_rest(sooner_ns: int) -> None:
    wake, now_ns = Wake(), time.monotonic_ns()
    wake.ring(now_ns + 2 * HOUR_NS)
    begin_ns = now_ns + sooner_ns if sooner_ns else 0
    wake.ring(begin_ns)
    assert rings(wake)
    assert wake.begin_ns == begin_ns
    wake.close()


def test_a_bell_for_later_than_the_rest_changes_nothing() -> None:
    wake, begin_ns = Wake(), time.monotonic_ns() + HOUR_NS
    wake.ring(begin_ns)
    wake.ring(begin_ns + HOUR_NS)
    assert not rings(wake)
    assert wake.begin_ns == begin_ns
    wake.close()


def test_a_rest_that_is_over_is_followed_by_the_next() -> None:
    wake = Wake()
    wake.ring(time.monotonic_ns())
    wake.hush()
    later_ns = time.monotonic_ns() + HOUR_NS
    wake.ring(later_ns)
    assert wake.begin_ns == later_ns
    wake.close()


def test_who_wakes_of_its_own_accord_needs_no_bell_for_then_or_later() -> None:
    wake, until_ns = Wake(), time.monotonic_ns() + HOUR_NS
    wake.listen(until_ns)
    wake.ring(until_ns, until_ns + HOUR_NS)
    assert not rings(wake)
    assert (wake.begin_ns, wake.next_ns) == (until_ns, until_ns + HOUR_NS)
    wake.ring(until_ns - 1)
    assert rings(wake)
    wake.close()


def test_a_bell_that_says_nothing_of_the_next_one_forgets_what_was_said() -> None:
    wake = Wake()
    wake.ring(1, 2)
    wake.ring()
    assert wake.next_ns == 0
    wake.close()


def test_a_bell_that_was_not_taken_is_not_put_off_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wake, now_ns = Wake(), 50
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    wake.listen(90)
    wake.ring(100, 200)
    now_ns = 101
    wake.ring(600, 900)
    assert wake.begin_ns == 100
    wake.hush()
    wake.ring(600, 900)
    assert wake.begin_ns == 600
    wake.close()
