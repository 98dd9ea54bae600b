"""Snapshots of a running server: what is captured, how it is written beside the data path, and a ring filled from one."""
