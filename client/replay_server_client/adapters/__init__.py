"""Other libraries, in a line each. Nothing of them is imported before it is named here, and what is missing is refused by name.

| name | library | extra |
|---|---|---|
| ``GymnasiumWriter`` | Gymnasium's vector environments | ``gymnasium`` |
| ``to_tensordict`` | TensorDict, TorchRL | ``tensordict`` |
| ``ServerReplayBuffer`` | Stable-Baselines3 | ``sb3`` |
| ``dlpack_fields``, ``wait_for_stream`` | JAX, CuPy, numpy: whatever has ``from_dlpack`` | none |
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay_server_client.adapters.dlpack import dlpack_fields, wait_for_stream
    from replay_server_client.adapters.gymnasium_writer import GymnasiumWriter
    from replay_server_client.adapters.sb3_replay import ServerReplayBuffer
    from replay_server_client.adapters.tensordict_view import to_tensordict

__all__ = ["GymnasiumWriter", "ServerReplayBuffer", "dlpack_fields", "to_tensordict", "wait_for_stream"]

_LOADED_BY_NAME = {
    "GymnasiumWriter": ("gymnasium_writer", "gymnasium"),
    "ServerReplayBuffer": ("sb3_replay", "sb3"),
    "dlpack_fields": ("dlpack", ""),
    "to_tensordict": ("tensordict_view", "tensordict"),
    "wait_for_stream": ("dlpack", ""),
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _LOADED_BY_NAME[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'replay-server[{extra}]'", name=error.name) from error
