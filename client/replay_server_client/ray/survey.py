"""How all hosts and forwarders of a cluster are: each one's report, or why there is none."""

from __future__ import annotations

from typing import Any

import ray
from replay_server_protocol.errors import ServerGone

from replay_server_client.ray.names import FORWARDER_PREFIX, HOST_PREFIX, NAMESPACE


def status(timeout: float = 5.0) -> dict[str, object]:
    """Every host and forwarder of the cluster: its report, or why there is none."""
    asked = {}
    for each in ray.util.list_named_actors(all_namespaces=True):
        name = each["name"]
        if each["namespace"] == NAMESPACE and name.startswith((HOST_PREFIX, FORWARDER_PREFIX)):
            try:
                asked[name] = ray.get_actor(name, namespace=NAMESPACE).report.remote()
            except ValueError:  # it ended just now
                continue
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout) if asked else None
    hosts: dict[str, object] = {}
    forwarders: dict[str, object] = {}
    for name, ref in sorted(asked.items()):
        found = hosts if name.startswith(HOST_PREFIX) else forwarders
        found[name.partition(":")[2]] = _report_of(ref)
    nodes = [{"id": node["NodeID"], "alive": node["Alive"], "address": node["NodeManagerAddress"]} for node in ray.nodes()]
    return {"nodes": nodes, "hosts": hosts, "forwarders": forwarders}


def status_at(address: str, timeout: float = 5.0) -> dict[str, object]:
    """``status`` of the cluster at ``address``, for a process that belongs to none. Raises ServerGone when there is no cluster."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServerGone(
            f"no Ray cluster answers at {address!r}: {str(error).splitlines()[0]}; RAY_ADDRESS or --cluster names one"
        ) from error
    try:
        return status(timeout)
    finally:
        ray.shutdown()


def _report_of(ref: Any) -> object:
    try:
        return ray.get(ref, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return {"state": "silent", "error": "no answer in time"}
    except ray.exceptions.RayError as error:
        return {"state": "lost", "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
