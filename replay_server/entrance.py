"""Whether clients find the server and may come in: its files stay where clients look, and newcomers wait while descriptors run out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from replay_server_protocol.errors import AlreadyServing, InvalidRequest

from replay_server.control import Door
from replay_server.counters import Counters
from replay_server.descriptors import Room
from replay_server.run_directory import RunDirectory

log = logging.getLogger("replay_server")

_LOOK_FOR_FILES_EVERY_S = 1.0
_TELL_EVERY_S = 60.0
_AN_ACCEPT_S = 20e-6
"""libzmq accepts faster than that in no trial; looks at the descriptors come before it could have used up what is kept free."""


class Entrance:
    """Both doors of a server. Told the time."""

    def __init__(self, directory: RunDirectory, doors: Sequence[Door], counters: Counters) -> None:
        self._directory = directory
        self._doors = doors
        self._counters = counters
        self._room = Room.of_this_process()
        self._look_every_s = self._room.shut_below * _AN_ACCEPT_S
        self._look_at_s = self._files_at_s = self._tell_at_s = self._tell_taken_at_s = 0.0

    def mind(self, now_s: float) -> None:
        """Shuts both doors while too few descriptors are free, and turns away who knocks meanwhile; opens them when silent connections
        have gone."""
        is_shut = self._doors[0].way.is_shut
        if is_shut:
            self._counters.connections_refused += sum(door.way.turn_away() for door in self._doors)
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + self._look_every_s
        free = self._room.free()
        if not is_shut and free < self._room.shut_below:
            for door in self._doors:
                door.way.shut()
            self._tell_shut(free, now_s)
        elif is_shut and free >= self._room.open_from:
            for door in self._doors:
                door.way.open()

    def find_files(self, now_s: float) -> bool:
        """Once a second: makes again what somebody has removed of the run directory. True if it did."""
        if now_s < self._files_at_s:
            return False
        self._files_at_s = now_s + _LOOK_FOR_FILES_EVERY_S
        try:
            missing = [] if self._directory.is_held() else [self._directory.endpoints.lock_path]
            if missing:
                self._directory.claim_again()
            for door in self._doors:
                if not door.way.is_there():
                    missing.append(door.way.path)
                    door.way.renew(door.socket)
        except (AlreadyServing, InvalidRequest) as error:
            self._tell_taken(error, now_s)
            return False
        if missing:
            log.warning("somebody removed %s while the server runs; made again", ", ".join(map(str, missing)))
        return bool(missing)

    def _tell_shut(self, free: int, now_s: float) -> None:
        if now_s < self._tell_at_s:
            return
        self._tell_at_s = now_s + _TELL_EVERY_S
        log.warning(
            "%d of %d files that the server may open are left: nobody new is let in until connections have gone (one that says nothing is "
            "closed after 5 s), those attached go on; see who connects, or start the server with a higher limit (ulimit -n)",
            free,
            self._room.limit,
        )

    def _tell_taken(self, error: AlreadyServing | InvalidRequest, now_s: float) -> None:
        if now_s < self._tell_taken_at_s:
            return
        self._tell_taken_at_s = now_s + _TELL_EVERY_S
        log.error("who is attached goes on, but new clients don't find this server, whose files were removed: %s", error)
