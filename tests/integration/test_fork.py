"""A client made before a fork is refused in the child by name, and the child's end disturbs nothing."""

from __future__ import annotations

from support.processes import Children
from support.servers import ServerProcess


def fork_with_collector(name: str, run_dir: str) -> int:
    import os

    import numpy as np
    from replay_server_client import Collector, ForkedClient, Schema

    rows = {"mark": np.arange(8)}
    with Collector.connect(name, schema=Schema.of(mark="int64"), run_dir=run_dir) as collector:
        collector.write(rows)
        pid = os.fork()
        if pid == 0:
            refused = 0
            for use in (lambda: collector.write(rows), collector.flush, collector.statistics, lambda: collector.latest("policy")):
                try:
                    use()
                except ForkedClient as error:
                    refused += str(os.getpid()) in str(error)
            try:
                with collector.slot():
                    pass
            except ForkedClient:
                refused += 1
            collector.close()
            with Collector.connect(name, schema=Schema.of(mark="int64"), run_dir=run_dir, name="child") as own:
                own.write(rows)
                own.flush()
            os._exit(0 if refused == 5 else 1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        collector.write(rows)
        return collector.flush()


def test_a_forked_collector_is_refused_and_the_parents_goes_on(server: ServerProcess, children: Children) -> None:
    assert children.run(fork_with_collector, server.name, str(server.run_dir)).result() == 24


def fork_with_observer_and_admin(name: str, run_dir: str) -> int:
    import os

    import numpy as np
    from replay_server_client import Collector, ForkedClient, Observer, Schema
    from replay_server_client.admin import Admin

    with (
        Collector.connect(name, schema=Schema.of(mark="int64"), run_dir=run_dir) as collector,
        Observer.connect(name, run_dir=run_dir) as observer,
        Admin.connect(name, run_dir=run_dir) as admin,
    ):
        collector.write({"mark": np.arange(8)})
        collector.flush()
        observer.window()
        pid = os.fork()
        if pid == 0:
            refused = 0
            for use in (
                observer.window,
                lambda: observer.read(newest=1),
                observer.capture,
                lambda: admin.set("tolerance", "8"),
                admin.stop,
            ):
                try:
                    use()
                except ForkedClient as error:
                    refused += str(os.getpid()) in str(error)
            observer.close()
            admin.close()
            os._exit(0 if refused == 5 and observer._observed.ring is not None else 1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        admin.set("tolerance", "64")
        return int(observer.read(newest=1)["mark"][0])


def test_a_forked_observer_and_admin_are_refused_and_the_parents_go_on(server: ServerProcess, children: Children) -> None:
    assert children.run(fork_with_observer_and_admin, server.name, str(server.run_dir)).result() == 7
