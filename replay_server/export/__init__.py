"""``replay-server export``: a process of its own that asks the status socket and serves metrics, health, the report and a page by HTTP."""
