"""Starts the actors of a cluster, and learners of them. Call ``ray.init`` first, with an address."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, cast

import ray
from ray.exceptions import ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from replay_server_protocol.endpoints import check_name
from replay_server_protocol.errors import InvalidRequest, shown

from replay_server_client.deadline import Deadline
from replay_server_client.ray.actors import Forwarder, RemoteHost, ReplayHost
from replay_server_client.ray.delivery import CHUNK_BYTES
from replay_server_client.ray.learner import ClusterLearner, LearnerOptions
from replay_server_client.ray.names import FORWARDER_PREFIX, HOST_PREFIX, NAMESPACE
from replay_server_client.ray.shard_host import LocalHost, ShardHost

_READY_WAIT_S = 60.0


def start_host(
    shard: str,
    *,
    server: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    node_id: str | None = None,
    resources: Mapping[str, float] | None = None,
) -> Any:
    """The ReplayHost of ``shard``, started beside its sidecar ``server``, or the one there is. It outlives this driver.

    ``node_id`` pins it to a node (Ray's hex id), by default this one; ``resources`` to what a node offers, as ``{"replay_host": 1}``.
    """
    check_name(shard, "shard name")
    return _start(ReplayHost, HOST_PREFIX + shard, (server, _text(run_dir)), node_id, resources, "report")


def start_forwarder(
    shards: str | Sequence[str],
    *,
    name: str,
    run_dir: str | os.PathLike[str] | None = None,
    depth: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    node_id: str | None = None,
    resources: Mapping[str, float] | None = None,
) -> Any:
    """A forwarder of this node (or ``node_id``) that collectors connect to as ``name``, whose rows go to ``shards``: those of each
    collector to one of them, which follows from its name.

    ``depth`` slots a collector: they are held until their rows are committed at the shard, a round trip later; by default as many as hold
    four chunks, 8 to 256. Publishes are gathered to ``chunk_bytes`` a call while others are on their way. Returns once collectors may
    connect. Where a forwarder of this name is on the node, that one is returned as it is.
    """
    names = [shards] if isinstance(shards, str) else list(shards)
    for shard in names:
        check_name(shard, "shard name")
    check_name(name)
    node = node_id or ray.get_runtime_context().get_node_id()
    actor_name = f"{FORWARDER_PREFIX}{node[:12]}:{name}"
    return _start(Forwarder, actor_name, (names, name, _text(run_dir), depth, chunk_bytes), node, resources, "report")


def connect_learner(
    shards: Sequence[str],
    *,
    local: Mapping[str, tuple[str | None, str | None]] | None = None,
    transport: str = "object store",
    **options: Unpack[LearnerOptions],
) -> ClusterLearner:
    """A learner of these shards through their hosts; those of ``local`` (shard: (server, run_dir)) from their sidecars directly.

    Raises InvalidRequest for any other ``transport``: Ray Direct Transport is alpha and not there yet.
    """
    if transport != "object store":
        raise InvalidRequest(f"transport={shown(transport)}: rows travel by Ray's 'object store'; Ray Direct Transport is not there yet")
    here = dict(local or {})
    hosts: dict[str, ShardHost] = {}
    for shard in shards:
        hosts[shard] = LocalHost(*here[shard]) if shard in here else cast("ShardHost", RemoteHost(shard))
    return ClusterLearner(hosts, **options)


def _start(
    kind: Any, name: str, arguments: tuple[object, ...], node_id: str | None, resources: Mapping[str, float] | None, ready: str
) -> Any:
    pinned = node_id or (None if resources else ray.get_runtime_context().get_node_id())
    options: dict[str, object] = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    if pinned is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(pinned, soft=False)
    if resources:
        options["resources"] = dict(resources)
    deadline = Deadline(_READY_WAIT_S)
    while True:
        actor = kind.options(**options).remote(*arguments)
        try:
            ray.get(getattr(actor, ready).remote(), timeout=deadline.remaining_s)
        except ActorUnavailableError:  # one of this name on a node that is lost, or being started again: it keeps nothing that matters
            if deadline.has_passed:
                raise
            ray.kill(actor)
        else:
            return actor


def _text(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)
