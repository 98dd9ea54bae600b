"""A client's turn: one thread has it, another is refused by name, and nothing that ends a call keeps it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from replay_server_client import InvalidRequest
from replay_server_client.turn import Turn


def in_another_thread(turn: Turn) -> str:
    """What another thread that tries to take it is told; empty if it has it."""

    def tried() -> str:
        try:
            with turn.taken():
                return ""
        except InvalidRequest as refusal:
            return str(refusal)

    with ThreadPoolExecutor(1, "the other") as pool:
        return pool.submit(tried).result()


def test_another_thread_is_refused_until_the_outermost_wait_ends() -> None:
    turn = Turn("observer olga")
    with turn.taken():
        with turn.taken():
            turn.check()
        told = in_another_thread(turn)
    assert told.startswith("thread 'the other_0' calls observer olga while thread 'MainThread' waits in it: a client is for one thread")
    assert not turn.is_taken
    assert in_another_thread(turn) == ""


def test_an_error_in_a_wait_ends_it() -> None:
    turn = Turn("admin")
    with pytest.raises(KeyboardInterrupt), turn.taken():
        raise KeyboardInterrupt
    assert in_another_thread(turn) == ""


def test_a_refused_thread_takes_nothing_from_who_has_it() -> None:
    turn = Turn("admin")
    with turn.taken():
        assert in_another_thread(turn) == in_another_thread(turn) != ""
        assert turn.is_taken


def test_of_two_threads_that_come_at_once_one_is_refused() -> None:
    class Overtaken(dict[str, int]):
        """Another thread takes the turn just after this one has seen that nobody has it."""

        def get(self, key: str, default: int | None = None) -> int | None:  # type: ignore[override]
            found = super().get(key, default)
            super().setdefault(key, -1)
            return found

    turn = Turn("admin")
    turn._taken = Overtaken()  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="while thread '-1' waits in it"), turn.taken():
        pass
    assert turn.is_taken
