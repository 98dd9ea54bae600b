"""The exporter's life: listen, watch, answer, until a signal."""

from __future__ import annotations

import select

from replay_server_protocol.endpoints import Endpoints

from replay_server.export.record import Record
from replay_server.export.watch import Watch
from replay_server.export.web import WebServer
from replay_server.stop_signals import StopSignals

MOST_NAMES = 64


class Exporter:
    """Watches one server and serves what it sees; the server need not be there. ``port`` 0 takes a free one."""

    def __init__(self, endpoints: Endpoints, host: str, port: int, *, interval_s: float, timeout_s: float) -> None:
        self.record = Record(interval_s, MOST_NAMES)
        self._web = WebServer(host, port, self.record)
        self._watch = Watch(endpoints, self.record, interval_s, timeout_s)

    @property
    def url(self) -> str:
        host = str(self._web.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self._web.port}/"

    def start(self) -> None:
        self._watch.start()
        self._web.start()

    def close(self) -> None:
        """Stops answering, then watching; waits for the question that is out."""
        self._web.close()
        self._watch.stop()


def run_until_stopped(exporter: Exporter, signals: StopSignals) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    exporter.start()
    try:
        select.select([signals], [], [])
    finally:
        exporter.close()
        signals.ignore()
