"""The harness must end every child, and say what it wrote."""

from __future__ import annotations

import os
import select
import signal

import pytest
from replay_server_protocol.process import ProcessIdentity
from support.leaks import nothing_left
from support.processes import ChildFailed, Children


def add(a: int, b: int) -> dict[str, int]:
    import os

    return {"sum": a + b, "pid": os.getpid()}


def raise_in_child() -> None:
    raise RuntimeError("broken on purpose")


SLEEPER = "import time; print('up'); time.sleep(600)"


def test_function_runs_in_a_process_of_its_own_and_returns_its_result() -> None:
    with nothing_left(), Children() as children:
        child = children.run(add, 2, 3)
        assert child.result() == {"sum": 5, "pid": child.pid}
        assert child.pid != os.getpid()


def test_function_that_raises_fails_with_its_traceback() -> None:
    with Children() as children, pytest.raises(ChildFailed, match="broken on purpose"):
        children.run(raise_in_child).result()


def test_child_past_its_deadline_is_killed_before_the_failure_is_raised() -> None:
    with Children() as children:
        child = children.script(SLEEPER, deadline_s=0.5)
        with pytest.raises(ChildFailed, match=r"did not end within 0\.5 s"):
            child.wait()
        assert not child.is_alive()


def test_waiting_for_words_ends_when_they_come_and_when_the_child_ends_without_them() -> None:
    with Children() as children:
        child = children.script("print('one'); print('two')")
        child.wait_for("two")
        with pytest.raises(ChildFailed, match=r"ended with 0 before it wrote 'three'[\s\S]*one"):
            child.wait_for("three")


def test_child_that_closes_its_output_is_still_waited_for() -> None:
    with Children() as children:
        assert children.script("import os, time; os.close(1); os.close(2); time.sleep(0.2); os._exit(7)").wait() == 7


def test_output_beyond_a_pipe_is_kept_whole() -> None:
    with Children() as children:
        child = children.script("print('x' * 300_000); print('end')")
        assert child.wait() == 0
        assert child.output == "x" * 300_000 + "\nend\n"


def test_survivor_is_killed_and_named_at_the_end() -> None:
    children = Children()
    with pytest.raises(ChildFailed, match="still alive at the end of the test: script"), nothing_left(), children:
        child = children.script(SLEEPER)
        child.wait_for("up")
    assert not ProcessIdentity.of(child.pid).is_alive()


def test_survivor_is_killed_but_does_not_hide_the_tests_own_error() -> None:
    with pytest.raises(KeyError), nothing_left(), Children() as children:
        child = children.script(SLEEPER)
        child.wait_for("up")
        raise KeyError
    assert not ProcessIdentity.of(child.pid).is_alive()


def test_grandchildren_are_killed_with_their_parent() -> None:
    with Children() as children:
        child = children.script(f"import subprocess, sys; print('pid', subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]).pid)")
        assert child.wait() == 0
        grandchild = ProcessIdentity.of(int(child.output.split()[1]))
        assert grandchild.is_alive()
        pidfd = os.pidfd_open(grandchild.pid)
        child.kill()
        assert select.select([pidfd], [], [], 5.0)[0]
        os.close(pidfd)


def test_signal_reaches_the_child_and_its_status_tells() -> None:
    with Children() as children:
        child = children.script(SLEEPER)
        child.wait_for("up")
        child.send_signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
