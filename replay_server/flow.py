"""Flow control: when rows may come in and when they may be drawn. Counters and questions, no clock, no waiting.

``samples_per_insert`` (r) keeps ``|sampled - r * inserted| <= tolerance``, in rows (the rate limiter of Reverb, Cassirer et al. 2021,
stated in rows). Rows before ``learning_starts`` are free. Rows count as inserted when their span is reserved and as sampled when their
lease is granted; a batch that was dropped, revoked or orphaned is refunded. A grant looks only at rows that are committed: a batch
never takes its turn before the rows that gave it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from replay_server.units import counted


class FlowState(StrEnum):
    """Who waits for what. A side waits only if it asks: a published slot that may not go on, a request that may not be granted."""

    FREE = "free"  # nobody waits
    COLLECTORS_WAIT_FOR_SAMPLES = "collectors_wait_for_samples"  # samples per insert
    COLLECTORS_WAIT_FOR_LEASE = "collectors_wait_for_lease"  # a learner holds the ring rows that come next
    COLLECTORS_WAIT_FOR_COPIES = "collectors_wait_for_copies"  # the device's bandwidth; ends by itself
    LEARNERS_WAIT_FOR_START = "learners_wait_for_start"  # learning starts, or the first row of all
    LEARNERS_WAIT_FOR_SEQ = "learners_wait_for_seq"  # freshness: min_committed
    LEARNERS_WAIT_FOR_INSERTS = "learners_wait_for_inserts"  # samples per insert
    LEARNERS_WAIT_FOR_RELEASE = "learners_wait_for_release"  # as many leases are open as a learner may have
    BOTH_WAIT = "both_wait"
    WAITING_FOR_SCHEMA = "waiting_for_schema"
    WAITING_FOR_MEMORY = "waiting_for_memory"
    RESTORING = "restoring"
    CLOSING = "closing"

    @property
    def blocked_side(self) -> str | None:
        """``collectors``, ``learners`` or ``both``; None when nobody waits or nothing is served."""
        side, waits, _ = self.value.partition("_wait")
        return side if waits and side in ("collectors", "learners", "both") else None


@dataclass(slots=True)
class Flow:
    """The limiter. ``samples_per_insert`` None leaves both sides free."""

    learning_starts: int = 0
    samples_per_insert: float | None = None
    tolerance: int = 0
    inserted: int = 0
    sampled: int = 0
    arriving: int = 0  # counted as inserted and not committed yet
    _free_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self._free_rows = self.learning_starts

    @property
    def ratio(self) -> float | None:
        """Rows sampled per row inserted so far; None before the first row that counts."""
        return self.sampled / self.inserted if self.inserted else None

    @property
    def free_rows(self) -> int:
        """Rows that may still come before learning starts without being counted."""
        return self._free_rows

    def restore(self, inserted: int, sampled: int, free_rows: int) -> None:
        """Goes on from these sums, so that neither side gets a burst."""
        self.inserted, self.sampled, self._free_rows = inserted, sampled, free_rows

    def set_ratio(self, samples_per_insert: float | None) -> None:
        """Changes samples per insert from now on: what was counted before is forgotten, so that neither side gets a burst.

        Raises ValueError unless it is above 0 (or None: no limit).
        """
        if samples_per_insert is not None and not 0 < samples_per_insert < 1e9:
            raise ValueError("samples per insert are above 0 and below 1e9, or none")
        self.samples_per_insert = samples_per_insert
        self.inserted = self.sampled = self.arriving = 0

    def set_tolerance(self, rows: int) -> None:
        """Raises ValueError for a negative number of rows."""
        if not 0 <= rows <= 2**48:
            raise ValueError("a tolerance is 0 or more rows")
        self.tolerance = rows

    def insert(self, rows: int) -> int:
        """Rows of a counted collector were reserved; returns how many of them count, for ``commit``."""
        if self._free_rows:
            free = min(rows, self._free_rows)
            self._free_rows -= free
            rows -= free
        self.inserted += rows
        self.arriving += rows
        return rows

    def commit(self, rows: int) -> None:
        """Rows that ``insert`` counted were committed."""
        self.arriving = max(0, self.arriving - rows)  # they may have been reserved before ``set_ratio``

    def sample(self, rows: int) -> None:
        self.sampled += rows

    def refund(self, rows: int) -> None:
        """A granted batch was never used."""
        self.sampled -= rows

    def may_insert(self, rows: int) -> bool:
        """Whether a span of ``rows`` may be reserved."""
        return self._rows_to_sample_first(rows) <= 0

    def why_not_insert(self, rows: int) -> str | None:
        """What a span of ``rows`` waits for, or None if it may be reserved."""
        missing = self._rows_to_sample_first(rows)
        if missing <= 0:
            return None
        return (
            f"samples per insert {self.samples_per_insert:g}: learners must sample {missing:,.0f} more rows "
            f"(sampled {self.sampled:,}, inserted {self.inserted:,}, tolerance {self.tolerance:,})"
        )

    def sample_waits_for(self, rows: int, committed: int, min_committed: int) -> FlowState | None:
        """What a request for ``rows`` rows waits for, or None if it may be granted."""
        if committed < max(1, self.learning_starts):
            return FlowState.LEARNERS_WAIT_FOR_START
        if committed < min_committed:
            return FlowState.LEARNERS_WAIT_FOR_SEQ
        return FlowState.LEARNERS_WAIT_FOR_INSERTS if self._rows_to_insert_first(rows) > 0 else None

    def why_not_sample(self, rows: int, committed: int, min_committed: int) -> str | None:
        """``sample_waits_for`` in words."""
        match self.sample_waits_for(rows, committed, min_committed):
            case FlowState.LEARNERS_WAIT_FOR_START:
                return f"need {max(1, self.learning_starts):,} rows before learning starts, have {committed:,}"
            case FlowState.LEARNERS_WAIT_FOR_SEQ:
                return f"need rows up to seq {min_committed:,}, committed is {committed:,}"
            case FlowState.LEARNERS_WAIT_FOR_INSERTS:
                missing = self._rows_to_insert_first(rows)
                return (
                    f"samples per insert {self.samples_per_insert:g}: collectors must add {missing:,.0f} more rows "
                    f"(sampled {self.sampled:,}, inserted {self.inserted:,}, tolerance {self.tolerance:,})"
                )
            case _:
                return None

    def why_impossible(self, rows: int, slot_rows: int) -> str | None:
        """Why both sides could come to wait for each other, or None: 2 * tolerance must cover a batch and a slot."""
        if self.samples_per_insert is None:
            return None
        needed = rows + self.samples_per_insert * slot_rows
        if 2 * self.tolerance >= needed:
            return None
        return (
            f"batches of {counted(rows, 'row')} with slots of {slot_rows:,} at {self.samples_per_insert:g} samples per insert "
            f"can dead-end: "
            f"2 x tolerance is {2 * self.tolerance:,}, at least {needed:,.0f} is needed; raise --tolerance to {-(-needed // 2):,.0f}"
        )

    def _rows_to_sample_first(self, rows: int) -> float:
        """Rows that must be sampled before a span of ``rows``; at or below 0 it may be reserved."""
        if self.samples_per_insert is None or rows <= self._free_rows:
            return 0.0
        return self.samples_per_insert * (self.inserted + rows - self._free_rows) - self.sampled - self.tolerance

    def _rows_to_insert_first(self, rows: int) -> float:
        """Rows that must be committed before a batch of ``rows``; at or below 0 it may be granted."""
        if self.samples_per_insert is None:
            return 0.0
        ahead = self.sampled + rows - self.samples_per_insert * (self.inserted - self.arriving) - self.tolerance
        return ahead / self.samples_per_insert
