"""replay-server: a sidecar daemon that owns the replay ring of off-policy RL, on the GPU or in host memory."""

from replay_server.spawn import ReplayServer

__all__ = ["ReplayServer", "__version__"]
__version__ = "0.1.0"
