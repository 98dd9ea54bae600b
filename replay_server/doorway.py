"""Where clients knock: the listening socket behind a bound ZeroMQ socket, made here so that it can be closed to newcomers and made again.

libzmq ends the process when it lacks a descriptor for the next connection (ipc_listener.cpp knows no EMFILE). It accepts at a number of
its own, ``_number``, which leads to one of two sockets:

```
open   _number ─► the listening socket         libzmq accepts who knocks
shut   _number ─► one that nobody knows of     libzmq finds nobody; who knocks is turned away here, and knocks again: libzmq's clients do
```

Connections that stand notice neither.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import zmq
from replay_server_protocol.errors import InvalidRequest

_BACKLOG = 512
_TURNED_AWAY_AT_ONCE = 512


class Doorway:
    """A listening socket at ``path``, mode 0600, in place of whatever a dead server left there."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest if there can be none."""
        self.path = path
        self.is_shut = False
        unseen = path.with_suffix(".shut")
        self._blind, _ = _listen_at(unseen)
        unseen.unlink(missing_ok=True)
        try:
            self._listening, self._inode = _listen_at(path)
        except BaseException:
            self._blind.close()
            raise
        self._number = -1

    def fileno(self) -> int:
        """Readable while somebody knocks; the same number for ever."""
        return self._listening.fileno()

    def lead_to(self, bound: zmq.Socket[bytes]) -> None:
        """Lets ``bound`` accept here; it closes the number it was given."""
        self._number = os.dup(self._listening.fileno())
        bound.setsockopt(zmq.USE_FD, self._number)
        bound.bind(f"ipc://{self.path}")

    def shut(self) -> None:
        """From here on nobody is accepted."""
        os.dup2(self._blind.fileno(), self._number, inheritable=False)
        self.is_shut = True

    def open(self) -> None:
        """As before ``shut``. Needed before ``bound`` is closed: it takes the listening socket out of its epoll set by the number."""
        if self.is_shut:
            os.dup2(self._listening.fileno(), self._number, inheritable=False)
            self.is_shut = False

    def turn_away(self) -> int:
        """How many knocked just now and were turned away, at most _TURNED_AWAY_AT_ONCE."""
        for n in range(_TURNED_AWAY_AT_ONCE):
            try:
                self._listening.accept()[0].close()
            except OSError:
                return n
        return _TURNED_AWAY_AT_ONCE

    def is_there(self) -> bool:
        """Whether ``path`` still leads here."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    def renew(self, bound: zmq.Socket[bytes]) -> None:
        """Makes the socket at ``path`` again, where somebody has removed it, for one more descriptor; connections stand.

        Raises InvalidRequest if there can be none.
        """
        self.open()
        listening, self._inode = _listen_at(self.path)
        with listening:
            os.dup2(listening.fileno(), self._listening.fileno(), inheritable=False)
        self.lead_to(bound)

    def close(self) -> None:
        """Before ``bound`` is closed. Removes ``path`` unless it is another server's by now."""
        self.open()
        if self.is_there():
            with contextlib.suppress(OSError):  # whoever may not write there any more leaves it to the next server
                self.path.unlink()
        self._listening.close()
        self._blind.close()


def _listen_at(path: Path) -> tuple[socket.socket, int]:
    """The socket and the inode of ``path``: looked at here, since whoever removes it may do so at any moment."""
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        inode = os.stat(path).st_ino
    except OSError as error:
        listening.close()
        raise InvalidRequest(f"{path} can't be bound: {error.strerror}; free space there, or choose another --run-dir") from error
    finally:
        os.umask(before)
    return listening, inode
