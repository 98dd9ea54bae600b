"""Several nodes on Ray (extra ``ray``): remote collectors' rows into a sidecar's ring, and rows of remote rings into a learner's batches.

Only ``actors``, ``cluster`` and ``survey`` import Ray; what they run is plain code, and the sidecar knows nothing of either.
"""

from __future__ import annotations

from importlib import import_module

_LOADED_BY_NAME = {
    "ClusterLearner": "replay_server_client.ray.learner",
    "connect_learner": "replay_server_client.ray.cluster",
    "start_forwarder": "replay_server_client.ray.cluster",
    "start_host": "replay_server_client.ray.cluster",
    "status": "replay_server_client.ray.survey",
}

__all__ = ["ClusterLearner", "connect_learner", "start_forwarder", "start_host", "status"]


def __getattr__(name: str) -> object:
    if name not in _LOADED_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LOADED_BY_NAME[name]), name)
