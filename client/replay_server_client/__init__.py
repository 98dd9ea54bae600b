"""The client of replay-server: collectors write rows, learners sample them.

``Learner``, ``Batch``, ``MixedSampler`` and ``MultiLearner`` are loaded when they are first named: a collector's process
never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from replay_server_protocol.errors import (
    AlreadyServing,
    AttachRefused,
    BudgetExceeded,
    DeviceError,
    ForkedClient,
    InvalidRequest,
    ProtocolViolation,
    ReplayError,
    ReplayTimeout,
    RowsRejected,
    SchemaMismatch,
    ServerClosing,
    ServerGone,
    ShardLost,
)
from replay_server_protocol.schema import Field, Schema
from replay_server_protocol.trace import Trace

from replay_server_client.collector import Collector
from replay_server_client.collector_statistics import CollectorStatistics
from replay_server_client.observer import Observer
from replay_server_client.slot_writer import LentSlot

if TYPE_CHECKING:
    from replay_server_client.batch import Batch
    from replay_server_client.learner import Learner
    from replay_server_client.mixed import MixedSampler
    from replay_server_client.multi import MultiLearner

__all__ = [
    "AlreadyServing",
    "AttachRefused",
    "Batch",
    "BudgetExceeded",
    "Collector",
    "CollectorStatistics",
    "DeviceError",
    "Field",
    "ForkedClient",
    "InvalidRequest",
    "Learner",
    "LentSlot",
    "MixedSampler",
    "MultiLearner",
    "Observer",
    "ProtocolViolation",
    "ReplayError",
    "ReplayTimeout",
    "RowsRejected",
    "Schema",
    "SchemaMismatch",
    "ServerClosing",
    "ServerGone",
    "ShardLost",
    "Trace",
]

_LOADED_BY_NAME = {
    "Batch": "replay_server_client.batch",
    "Learner": "replay_server_client.learner",
    "MixedSampler": "replay_server_client.mixed",
    "MultiLearner": "replay_server_client.multi",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LOADED_BY_NAME[name]), name)
