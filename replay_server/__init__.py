"""replay-server: a sidecar daemon that owns the replay ring of off-policy RL, on the GPU or in host memory."""

__version__ = "0.1.0"
