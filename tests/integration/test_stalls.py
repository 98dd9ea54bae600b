"""Whoever waits is told who is late, since when, at which seq and what to try: in the error of the call, and in the server's log."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from replay_server_client import Collector, Learner, Observer, ReplayTimeout, Schema, ServerGone, silence
from replay_server_protocol.messages import Bye
from support.freeze import frozen
from support.markers import MARKERS, marker_steps
from support.processes import Child, Children
from support.reports import wait_report
from support.servers import ServerProcess

SCHEMA = Schema.of(mark="int64")
STALL_AFTER_S = 0.3


def hold_a_lease_and_stop(name: str, run_dir: str) -> None:
    """Has a lease granted, stops with it, and gives it back once it is continued."""
    import os
    import signal

    from replay_server_protocol.endpoints import Endpoints
    from support.raw_client import RawLearner

    with RawLearner(Endpoints.resolve(name, run_dir), name="sleeper") as learner:
        grant = learner.grant(1)
        print("stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        learner.release(grant)


def wait_stopped(child: Child) -> None:
    child.wait_for("stops")
    end = time.monotonic() + 5
    while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < end


def lines_of(server: ServerProcess, words: str) -> list[str]:
    return [line for line in server.child.output.splitlines() if words in line]


def test_a_stopped_learner_that_holds_a_lease_is_named(start_server: Callable[..., ServerProcess], children: Children) -> None:
    sizes = ("--capacity", "64", "--slot-rows", "16", "--headroom", "16")
    server = start_server(*sizes, "--lease", "60", "--stall-after", str(STALL_AFTER_S))
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir, name="walker") as collector:
        collector.write(marker_steps(0, 1, 0, 64))
        collector.flush()
        child = children.run(hold_a_lease_and_stop, server.name, str(server.run_dir))
        wait_stopped(child)
        collector.write(marker_steps(0, 1, 64, 16))
        with pytest.raises(ReplayTimeout) as late:
            collector.write(marker_steps(0, 1, 80, 80), timeout=0.5)
        named = rf"lease \d+ .* from seq 0: granted \d+\.\d s ago to learner 'sleeper' \(pid {child.pid}\), heard last \d+\.\d s ago, "
        stopped = r"its process is stopped: continue it \(kill -CONT\).*ends by itself in \d+\.\d s \(--lease\)"
        assert re.search(named + stopped, str(late.value)), late.value
        server.child.wait_for("has waited for")
        told = lines_of(server, "has waited for")
        assert len(told) == 1, told
        assert "collector 'walker'" in told[0]
        assert "for seq 80 on" in told[0]
        assert re.search(named, told[0]), told
        child.send_signal(signal.SIGCONT)
        server.child.wait_for("recovered after")
        assert child.wait() == 0
        assert len(lines_of(server, "recovered after")) == 1


def test_a_collector_without_learners_under_samples_per_insert_is_told_so(start_server: Callable[..., ServerProcess]) -> None:
    flow = ("--samples-per-insert", "2", "--tolerance", "64", "--stall-after", str(STALL_AFTER_S))
    server = start_server("--capacity", "1000", "--slot-rows", "16", *flow)
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, name="walker") as collector:
        with pytest.raises(ReplayTimeout) as late:
            collector.write({"mark": np.arange(200)}, timeout=0.5)
        for word in ("samples per insert 2", "sampled 0, inserted 32", "no learner in the", "start one", "set samples-per-insert none"):
            assert word in str(late.value)
        server.child.wait_for("has waited for")
        assert "no learner in the" in lines_of(server, "has waited for")[0]
        with Learner.connect(server.name, device="cpu", run_dir=server.run_dir, prefetch=0) as learner:
            learner.sample(32)
            server.child.wait_for("recovered after")
        with pytest.raises(ReplayTimeout, match=r"no learner for \d+ s \(the last was 'learner', pid \d+\)"):
            collector.write({"mark": np.arange(200)}, timeout=0.5)
        with Learner.connect(server.name, device="cpu", run_dir=server.run_dir, prefetch=0) as learner:
            for _ in range(4):
                learner.sample(32)
            collector.flush()


def test_a_learner_is_told_for_how_long_its_only_collector_is_gone(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "20000", "--learning-starts", "10000", "--stall-after", str(STALL_AFTER_S))
    with Learner.connect(server.name, device="cpu", run_dir=server.run_dir) as learner:
        with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, name="walker") as collector:
            collector.write({"mark": np.arange(812)})
            collector.flush()
            with pytest.raises(ReplayTimeout, match=r"have 812; its rows are to come from collector 'walker' .* heard last .* flush\(\)"):
                learner.sample(8, timeout=0.1)
        wait_report(server, lambda report: not report["collectors"])
        with pytest.raises(ReplayTimeout) as late:
            learner.sample(8, timeout=1.2)
        assert re.search(
            r"need 10,000 rows .*, have 812; no collector for 1 s \(the last was 'walker', pid \d+\); start one", str(late.value)
        )
        with pytest.raises(ReplayTimeout, match=r"need 10,000 rows .*, have 812; no collector for \d+ s"):
            learner.wait_ready(0.1)
        server.child.wait_for("has waited for")
        assert "request 1 of learner 'learner'" in lines_of(server, "has waited for")[0]


def attach_and_stop(name: str, run_dir: str) -> None:
    import os
    import signal

    from replay_server_client import Collector
    from support.markers import MARKERS, marker_steps

    with Collector.connect(name, schema=MARKERS, run_dir=run_dir, name="sleeper") as collector:
        collector.write(marker_steps(0, 1, 0, 16))
        collector.flush()
        print("stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        collector.write(marker_steps(0, 1, 16, 16))
        collector.flush()


def test_a_stopped_collector_is_named_to_the_learner_that_waits_for_its_rows_and_its_recovery_is_told(
    start_server: Callable[..., ServerProcess], children: Children
) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16", "--stall-after", str(STALL_AFTER_S))
    child = children.run(attach_and_stop, server.name, str(server.run_dir))
    wait_stopped(child)
    with Learner.connect(server.name, device="cpu", run_dir=server.run_dir) as learner:
        who = rf"collector 'sleeper' \(pid {child.pid}\), heard last \d+\.\d s ago, its process is stopped"
        stopped = f"need rows up to seq 32, committed is 16; .* {who}"
        with pytest.raises(ReplayTimeout, match=stopped):
            learner.sample(8, min_committed=32, timeout=0.1)
        server.child.wait_for("has waited for")
        (told,) = lines_of(server, "has waited for")
        assert re.search(stopped, told), told
        child.send_signal(signal.SIGCONT)
        server.child.wait_for("recovered after")
        assert len(lines_of(server, "recovered after")) == 1
        assert child.wait() == 0


def test_a_stopped_server_is_named_by_everybody_who_waits_for_it(server: ServerProcess) -> None:
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, device="cpu", run_dir=server.run_dir, prefetch=0) as learner,
    ):
        collector.write({"mark": np.arange(16)})
        collector.flush()
        learner.sample(8)
        named = rf"\(pid {server.pid}\) does not answer, its process is stopped: continue it with kill -CONT {server.pid}"
        with frozen(server.child):
            collector.write({"mark": np.arange(16)})
            with pytest.raises(ReplayTimeout, match=rf"last credit was for rows up to seq 16\); .*{named}"):
                collector.flush(0.1)
            for call in (
                lambda: learner.sample(8, timeout=0.1),
                lambda: learner.wait_ready(0.1),
                lambda: learner.post("p", {"w": np.ones(1)}, 0.1),
            ):
                with pytest.raises(ReplayTimeout, match=named):
                    call()
            with pytest.raises(ServerGone, match=named):
                Learner.connect(server.name, device="cpu", run_dir=server.run_dir, timeout=0.1)


def test_a_stopped_server_is_told_in_the_log_of_whoever_waits_for_it_and_so_is_its_recovery(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(silence, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr("replay_server_client.ingress.REPEAT_S", 0.05)
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, name="walker") as collector,
        Learner.connect(server.name, device="cpu", run_dir=server.run_dir, prefetch=0, name="reader") as learner,
    ):
        collector.write({"mark": np.arange(16)})
        collector.flush()
        learner.sample(8)
        named = rf"server .* \(pid {server.pid}\) does not answer, its process is stopped: continue it with kill -CONT {server.pid}"
        silent = r"has had no answer for \d\.\d s, in a wait of \d\.\d s"
        wanted = (
            rf"collector walker {silent}: published rows .* \(the last credit was for rows up to seq 16\); {named}",
            rf"learner reader {silent}: {named}",
        )
        with frozen(server.child):
            collector.write({"mark": np.arange(16)})
            waiting = [threading.Thread(target=call, args=(20,)) for call in (collector.flush, lambda s: learner.sample(8, timeout=s))]
            for thread in waiting:
                thread.start()
            end = time.monotonic() + 10
            while not all(re.search(line, "\n".join(caplog.messages)) for line in wanted):
                assert time.monotonic() < end, caplog.messages
                time.sleep(0.02)
        for thread in waiting:
            thread.join()
        assert sorted(line.partition(" after")[0] for line in caplog.messages if "recovered" in line) == [
            "collector walker recovered",
            "learner reader recovered",
        ]
        assert len(caplog.messages) == 4, "one line a period"


def test_a_stopped_server_is_told_in_the_log_of_an_observer(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(silence, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr("replay_server_client.observer._ASK_AGAIN_S", 0.05)
    with Observer.connect(server.name, run_dir=server.run_dir, name="eyes") as observer:
        with frozen(server.child), pytest.raises(ReplayTimeout):
            observer.window(0.5)
        told = r"observer eyes has had no answer for 0\.\d s, in a wait of 0\.\d s: server .* its process is stopped"
        for look in (observer.window, observer.capture):
            with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
                collector.write({"mark": np.arange(8)})
                collector.flush()
            look()
            with frozen(server.child), pytest.raises(ReplayTimeout):
                look(0.5)
    assert len(re.findall(told, "\n".join(caplog.messages))) == 3, caplog.messages
    assert sum("observer eyes recovered" in line for line in caplog.messages) == 2


def test_revoked_leases_are_told_at_once_and_then_once_a_minute(start_server: Callable[..., ServerProcess]) -> None:
    from support.raw_client import RawLearner

    server = start_server("--capacity", "64", "--slot-rows", "16", "--headroom", "16", "--lease", "0.02")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        collector.write({"mark": np.arange(64)})
        collector.flush()
    with RawLearner(server.endpoints) as learner:
        for number in range(1, 6):
            learner.grant(number)
        wait_report(server, lambda report: report["counters"]["leases_revoked"] == 5)
        told = lines_of(server, "revoked lease")
        assert len(told) == 1, told
        assert "it held seq 0 to 64 for" in told[0]


def test_a_lease_that_outlives_its_learners_bye_is_revoked_without_a_word(start_server: Callable[..., ServerProcess]) -> None:
    from support.raw_client import RawLearner

    server = start_server("--capacity", "64", "--slot-rows", "16", "--lease", "0.1")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        collector.write({"mark": np.arange(64)})
        collector.flush()
    with RawLearner(server.endpoints) as learner:
        learner.grant(1)
        learner.send(Bye)
    wait_report(server, lambda report: report["counters"]["leases_revoked"] == 1)
    assert lines_of(server, "revoked lease") == []
