"""The checker must see each kind of leak; a check that can't fail proves nothing."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time

import pytest
import zmq
from replay_server_protocol.segment import Segment, segment_name
from support.leaks import Holdings, LeftBehind, nothing_left


def test_work_that_cleans_up_after_itself_passes() -> None:
    with nothing_left():
        os.close(os.open("/dev/null", os.O_RDONLY))
        segment = Segment.create(segment_name(secrets.token_hex(4), "passing"), 4096)
        segment.close()
        segment.unlink()
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        subprocess.run([sys.executable, "-c", ""], check=True)
        with zmq.Context() as context, context.socket(zmq.DEALER):
            pass


def test_open_descriptor_is_reported_with_its_target() -> None:
    fd = -1
    with pytest.raises(LeftBehind, match=r"descriptor .* -> /dev/null"), nothing_left():
        fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_linked_segment_is_reported_by_name(is_mapped: bool) -> None:
    name = segment_name(secrets.token_hex(4), "left")
    segment = Segment.create(name, 4096)
    segment.unlink()
    with pytest.raises(LeftBehind, match=f"segment {name}"), nothing_left():
        segment = Segment.create(name, 4096)
        if not is_mapped:
            segment.close()
    segment.close()
    segment.unlink()


def test_segment_mapped_only_by_a_strangers_process_is_not_ours() -> None:
    name = segment_name(secrets.token_hex(4), "strangers")
    source = f"""
import os, sys
from replay_server_protocol.segment import Segment
segment = Segment.create({name!r}, 4096)
print(os.getpid(), flush=True)
sys.stdin.read(1)
segment.unlink()
"""
    read_end, write_end = os.pipe()
    before = Holdings.now()
    # The shell ends at once, so that the process that maps the segment is no longer a descendant of this one.
    shell = ["sh", "-c", 'exec 3<&0; "$0" -c "$1" <&3 &', sys.executable, source]
    orphan = subprocess.Popen(shell, stdin=read_end, stdout=subprocess.PIPE)
    assert orphan.stdout is not None
    try:
        assert int(orphan.stdout.readline()) > 0
        orphan.wait()
        after = Holdings.now()
        assert name in after.segments
        assert not [entry for entry in after.since(before) if entry.startswith("segment")]
    finally:
        os.write(write_end, b".")
        orphan.stdout.read()
        orphan.stdout.close()
        os.close(read_end)
        os.close(write_end)


def test_running_thread_is_reported_by_name() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    with pytest.raises(LeftBehind, match="thread forgotten"), nothing_left():
        thread.start()
    done.set()
    thread.join()


def test_open_zmq_context_is_reported() -> None:
    context = zmq.Context()
    with pytest.raises(LeftBehind, match="thread ZMQ"), nothing_left():
        socket = context.socket(zmq.DEALER)
    socket.close(linger=0)
    context.term()


def test_living_child_is_reported_with_its_command() -> None:
    with pytest.raises(LeftBehind, match=r"child \d+: .*stdin"), nothing_left():
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    child.communicate()


def test_what_was_there_before_is_not_a_leak() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    with nothing_left():
        pass
    os.close(fd)


def test_child_from_before_that_ends_unwaited_is_not_a_leak() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with nothing_left():
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie, without a command, until somebody waits for it
    child.wait()


def test_what_ends_a_moment_later_is_not_a_leak() -> None:
    with nothing_left():
        thread = threading.Thread(target=time.sleep, args=(0.05,))
        thread.start()
    thread.join()


def test_what_only_a_cycle_of_the_block_holds_is_not_a_leak() -> None:
    class Holder:
        def __init__(self) -> None:
            self.fd = os.open("/dev/null", os.O_RDONLY)
            self.cycle = self

        def __del__(self) -> None:
            os.close(self.fd)

    with nothing_left():
        Holder()


def test_error_of_the_block_is_not_hidden_by_its_leak() -> None:
    fd = -1
    with pytest.raises(KeyError, match="own error"), nothing_left():
        fd = os.open("/dev/null", os.O_RDONLY)
        raise KeyError("own error")
    os.close(fd)
