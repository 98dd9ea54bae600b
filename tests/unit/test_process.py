from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from replay_server_protocol.process import ProcessIdentity, pid_namespace, read_start_ticks
from support.processes import Children

_NO_PID = 2**22 + 1  # above the largest pid that Linux gives


def test_this_process_is_alive_and_known_by_its_start() -> None:
    me = ProcessIdentity.current()
    assert me == ProcessIdentity.of(os.getpid())
    assert me.start_ticks > 0
    assert me.is_alive()


def test_another_start_time_is_another_process() -> None:
    me = ProcessIdentity.current()
    assert not ProcessIdentity(me.pid, me.start_ticks + 1).is_alive()


def test_no_process_has_no_start_and_is_not_alive() -> None:
    assert read_start_ticks(_NO_PID) == 0
    assert not ProcessIdentity(_NO_PID, 5).is_alive()


def test_unknown_start_falls_back_on_the_pid() -> None:
    assert ProcessIdentity(os.getpid(), 0).is_alive()
    assert not ProcessIdentity(_NO_PID, 0).is_alive()


def test_stopped_child_is_alive_and_zombie_is_dead() -> None:
    with Children() as children:
        child = children.script("print('up', flush=True); import signal; signal.pause()")
        child.wait_for("up")
        identity = ProcessIdentity.of(child.pid)
        child.send_signal(signal.SIGSTOP)
        assert identity.is_alive()
        os.kill(child.pid, signal.SIGKILL)
        pidfd = os.pidfd_open(child.pid)
        assert select.select([pidfd], [], [], 10)[0]
        os.close(pidfd)
        assert Path(f"/proc/{child.pid}/stat").exists()  # not reaped yet
        assert not identity.is_alive()
        child.wait()
        assert not identity.is_alive()


def test_start_is_read_right_when_the_name_holds_spaces_and_brackets() -> None:
    with Children() as children:
        child = children.script("open('/proc/self/comm', 'w').write('a) R 1 (b c'); print('up', flush=True); import signal; signal.pause()")
        before = read_start_ticks(child.pid)
        child.wait_for("up")
        assert Path(f"/proc/{child.pid}/comm").read_text() == "a) R 1 (b c\n"
        assert read_start_ticks(child.pid) == before > 0
        assert ProcessIdentity.of(child.pid).is_alive()
        child.kill()


def test_children_of_one_namespace_share_its_number() -> None:
    with Children() as children:
        child = children.script("from replay_server_protocol.process import pid_namespace; print(pid_namespace())")
        assert child.wait() == 0
        assert int(child.output) == pid_namespace() > 0
