"""Promises of the bell: heard by whoever listens, once until hushed, silent for nobody."""

from __future__ import annotations

import os
import select

import pytest
from replay_server_client.wake import Wake


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
