"""The collectors of the soak: one as fast as credits come, one with a row now and then, and ones with bursts, masks, cuts and flushes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
from replay_server_client import Collector, ReplayTimeout
from soaking.place import PATIENCE_S, Place
from soaking.rows import SCHEMA, Rows, make_rows
from soaking.telling import Teller

_IMPATIENCE_S = 0.003
_MAILBOX = "policy"


class Producer:
    """One session: knows the next step of each lane, and that only what was taken counts."""

    def __init__(self, place: Place, teller: Teller, number: int, lanes: int) -> None:
        self.collector = Collector.connect(
            place.name, schema=SCHEMA, lanes=lanes, name=f"{teller.who}-{number}", run_dir=place.run_dir, timeout=PATIENCE_S
        )
        self._teller = teller
        self._number = number
        self._next = np.zeros(lanes, np.int64)
        self._newest_letter = 0
        teller.count(sessions=1)

    def write(self, steps: int, kept: npt.NDArray[np.bool_] | None = None, timeout_s: float = PATIENCE_S) -> None:
        """``steps`` steps of all lanes; where not ``kept`` the row is masked out and holds nonsense. After a timeout the rest follows."""
        lanes = len(self._next)
        lane = np.tile(np.arange(lanes), steps)
        mask = np.ones(len(lane), np.bool_) if kept is None else kept
        taken = mask.reshape(steps, lanes).cumsum(0)
        rows = make_rows(self._number, lane, (self._next + taken - 1).ravel())
        if kept is not None:
            rows["check"][~mask] = -1
        self._next += taken[-1]
        begin_s = time.monotonic()
        self._write_all(rows, None if kept is None else mask, timeout_s)
        self._teller.done(begin_s, int(mask.sum()))

    def fill_slot(self) -> None:
        """Whole steps written into a lent slot, without a copy."""
        begin_s, lanes = time.monotonic(), len(self._next)
        with self.collector.slot(timeout=PATIENCE_S) as slot:
            steps = slot.max_rows // lanes
            rows = make_rows(self._number, np.tile(np.arange(lanes), steps), (self._next + np.arange(steps)[:, None]).ravel())
            for name, values in rows.items():
                slot[name][: len(values)] = values
            slot.rows = steps * lanes
        self._next += steps
        self._teller.done(begin_s, steps * lanes)

    def read_letter(self) -> None:
        """The newest policy, if there is a newer one, must be whole: every element of it is its number."""
        mail = self.collector.latest(_MAILBOX, newer_than=self._newest_letter)
        if mail is None:
            return
        version, arrays = mail
        if version <= self._newest_letter or any((array != arrays["number"][0]).any() for array in arrays.values()):
            self._teller.fault(f"mailbox version {version} after {self._newest_letter} is not whole")
        self._newest_letter = version
        self._teller.count(letters=1)

    def _write_all(self, rows: Rows, mask: npt.NDArray[np.bool_] | None, timeout_s: float) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.collector.write(rows, mask=mask, timeout=timeout_s)
            except ReplayTimeout as late:
                if time.monotonic() > end_s:
                    raise
                self._teller.count(timeouts=1)
                rows = {name: values[late.rows_written :] for name, values in rows.items()}
                mask = None if mask is None else mask[late.rows_written :]
            else:
                return


def collect_fast(place: Place, teller: Teller, first: int) -> None:
    """Eight lanes, as fast as credits come (or at the pace that was asked for), for the whole time."""
    producer = Producer(place, teller, first, 8)
    while not teller.is_over():
        producer.write(16)
        producer.read_letter()
        if place.pace_s and teller.rest(place.pace_s):
            break
    producer.collector.close()


def collect_slowly(place: Place, teller: Teller, first: int) -> None:
    """One lane, a row every 20 ms, for the whole time; a flush every few hundred rows."""
    producer, rows = Producer(place, teller, first, 1), 0
    while not teller.rest(0.02):
        producer.write(1)
        producer.read_letter()
        rows += 1
        if rows % 250 == 0:
            producer.collector.flush(PATIENCE_S)
    producer.collector.close()


def collect_in_bursts(place: Place, teller: Teller, first: int) -> None:
    """Bursts of everything a collector can do and pauses; says bye every few seconds and comes back as another producer."""
    dice = np.random.default_rng((place.seed, first))
    number = first
    while not teller.is_over():
        producer = Producer(place, teller, number, int(dice.integers(1, 7)))
        number += 1
        leaves_s = time.monotonic() + dice.uniform(1, 15)
        while not teller.is_over() and time.monotonic() < leaves_s:
            for _ in range(dice.integers(1, 30)):
                _do_something(producer, dice)
            producer.read_letter()
            if teller.rest(float(dice.choice((0.0, 0.05, 0.4, dice.uniform(0, 2))))):
                break
        producer.collector.close()


def _do_something(producer: Producer, dice: Any) -> None:
    collector = producer.collector
    lanes, what = collector.lanes, dice.random()
    if what < 0.5:
        producer.write(int(dice.integers(1, 40)), timeout_s=_IMPATIENCE_S if dice.random() < 0.3 else PATIENCE_S)
    elif what < 0.75:
        steps = int(dice.integers(1, 20))
        producer.write(steps, kept=dice.random(steps * lanes) < 0.7)
    elif what < 0.85:
        producer.fill_slot()
    elif what < 0.95:
        collector.cut(int(dice.integers(lanes)))
    else:
        collector.flush(PATIENCE_S)
