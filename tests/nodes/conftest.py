"""A Ray cluster on this machine for each module, to which tests add nodes. Skipped, saying why, without Ray."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import Children
from support.servers import ServerProcess, spawn_server

from replay_server.run_directory import RunDirectory

_STORE_BYTES = 80 << 20
_MODULE_S = 900.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = importlib.util.find_spec("ray") is None
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.filterwarnings("default"))  # Ray's own
            if missing:
                item.add_marker(pytest.mark.skip(reason="several nodes need the extra: pip install 'replay-server[ray]'"))


def once_more(start: Callable[[], Any]) -> Any:
    """Ray gives a node thirty seconds to start, and says so by a bare Exception; a machine may be busier than that."""
    try:
        return start()
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        return start()


class RayNodes:
    """The head, which runs this driver, and nodes by name."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.nodes: dict[str, Any] = {}

    def add(self, name: str) -> str:
        """Ray's id of a new node."""
        node = once_more(lambda: self.cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES, resources={name: 4}))
        self.nodes[name] = node
        found: str = node.node_id
        return found

    def remove(self, name: str) -> None:
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayNodes]:
    home = tempfile.mkdtemp(prefix="rayhome-", dir="/tmp")
    kept = dict(os.environ)
    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0", HOME=home)
    import ray
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = once_more(lambda: Cluster(initialize_head=True, head_node_args=arguments))
    try:
        ray.init(address=cluster.address, namespace="replay", log_to_driver=False)
        yield RayNodes(cluster)
    finally:
        ray.shutdown()  # before the cluster, which raises otherwise
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(kept)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def sidecars() -> Iterator[Callable[..., ServerProcess]]:
    """``sidecars("--capacity", "1000")``: a server that is killed at the end of the module."""
    run_dir = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
    started: list[ServerProcess] = []
    with Children() as children:

        def start(*options: str, name: str | None = None) -> ServerProcess:
            started.append(spawn_server(children, run_dir, *options, name=name, deadline_s=_MODULE_S))
            return started[-1]

        yield start
        for server in started:
            if server.child.is_alive():
                server.stop()
            else:  # killed by its test: what it left is swept as its successor would
                RunDirectory.claim(server.endpoints).release()
    shutil.rmtree(run_dir, ignore_errors=True)
