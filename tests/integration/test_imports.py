"""The daemon and a collector run without torch; nothing works at import."""

from __future__ import annotations

from pathlib import Path

from support.processes import Children
from support.servers import ServerProcess


def collect(name: str, run_dir: str) -> list[str]:
    import sys

    import numpy as np
    from replay_server_client import Collector, Schema

    with Collector.connect(name, schema=Schema.of(reward="float32"), run_dir=run_dir) as collector:
        collector.write({"reward": np.zeros(100, np.float32)}, mask=np.arange(100) % 2 == 0)
        collector.flush()
        collector.latest("policy")
    return [module for module in ("torch", "cuda", "gymnasium") if module in sys.modules]


def serve(run_dir: str) -> list[str]:
    """A whole life of the daemon in this process, with a collector in a thread."""
    import sys
    import threading

    import numpy as np
    from replay_server_client import Collector, Schema

    from replay_server.config import ServerConfig
    from replay_server.server import Server

    server = Server(ServerConfig(name="inside", run_dir=run_dir, device="cpu", capacity=100, columns=("link",)))

    def use() -> None:
        try:
            with Collector.connect("inside", schema=Schema.of(reward="float32"), run_dir=run_dir) as collector:
                collector.write({"reward": np.zeros(100, np.float32)})
                collector.flush()
        finally:
            server.stop()

    user = threading.Thread(target=use)
    user.start()
    server.run()
    user.join()
    server.close()
    assert server.replay.counters.rows_committed == 100
    return [module for module in ("torch", "cuda", "gymnasium") if module in sys.modules]


def test_a_collector_never_loads_torch(server: ServerProcess, children: Children) -> None:
    assert children.run(collect, server.name, str(server.run_dir)).result() == []


def test_the_daemon_never_loads_torch(run_dir: Path, children: Children) -> None:
    assert children.run(serve, str(run_dir)).result() == []


def test_the_serving_daemon_has_not_mapped_torch(server: ServerProcess) -> None:
    assert "torch" not in Path(f"/proc/{server.pid}/maps").read_text()
