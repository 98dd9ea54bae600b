"""``replay-server top``: a live view of one server, in a process of its own that only reads the status socket."""
