"""Snapshots as files: their format, their folder, and reading them back. Knows no server."""
