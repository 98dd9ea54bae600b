"""Flow control: when rows may come in and when they may be drawn. Counters and questions, no clock, no waiting.

``samples_per_insert`` (r) keeps ``|sampled - r * inserted| <= tolerance``, in rows (the rate limiter of Reverb, Cassirer et al. 2021,
stated in rows). Rows before ``learning_starts`` are free. Rows count as inserted when their span is reserved and as sampled when their
lease is granted; a batch that was dropped, revoked or orphaned is refunded.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Flow:
    """The limiter. ``samples_per_insert`` None leaves both sides free."""

    learning_starts: int = 0
    samples_per_insert: float | None = None
    tolerance: int = 0
    inserted: int = 0
    sampled: int = 0
    _free_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self._free_rows = self.learning_starts

    @property
    def ratio(self) -> float | None:
        """Rows sampled per row inserted so far; None before the first row that counts."""
        return self.sampled / self.inserted if self.inserted else None

    def set_ratio(self, samples_per_insert: float | None) -> None:
        """Changes samples per insert from now on: what was counted before is forgotten, so that neither side gets a burst.

        Raises ValueError unless it is above 0 (or None: no limit).
        """
        if samples_per_insert is not None and not 0 < samples_per_insert < 1e9:
            raise ValueError("samples per insert are above 0 and below 1e9, or none")
        self.samples_per_insert = samples_per_insert
        self.inserted = self.sampled = 0

    def set_tolerance(self, rows: int) -> None:
        """Raises ValueError for a negative number of rows."""
        if not 0 <= rows <= 2**48:
            raise ValueError("a tolerance is 0 or more rows")
        self.tolerance = rows

    def insert(self, rows: int) -> None:
        """Rows of a counted collector were reserved."""
        if self._free_rows:
            free = min(rows, self._free_rows)
            self._free_rows -= free
            rows -= free
        self.inserted += rows

    def sample(self, rows: int) -> None:
        self.sampled += rows

    def refund(self, rows: int) -> None:
        """A granted batch was never used."""
        self.sampled = max(0, self.sampled - rows)  # it may have been granted before ``set_ratio``

    def why_not_insert(self, rows: int) -> str | None:
        """What a span of ``rows`` waits for, or None if it may be reserved."""
        if self.samples_per_insert is None or rows <= self._free_rows:
            return None
        ahead = self.samples_per_insert * (self.inserted + rows - self._free_rows) - self.sampled
        if ahead <= self.tolerance:
            return None
        return (
            f"samples per insert {self.samples_per_insert:g}: learners must sample {ahead - self.tolerance:,.0f} more rows "
            f"(sampled {self.sampled:,}, inserted {self.inserted:,}, tolerance {self.tolerance:,})"
        )

    def why_not_sample(self, rows: int, committed: int, min_committed: int) -> str | None:
        """What a request for ``rows`` rows waits for, or None if it may be granted."""
        if committed < max(1, self.learning_starts):
            return f"need {max(1, self.learning_starts):,} rows before learning starts, have {committed:,}"
        if committed < min_committed:
            return f"need rows up to seq {min_committed:,}, committed is {committed:,}"
        if self.samples_per_insert is None:
            return None
        ahead = self.sampled + rows - self.samples_per_insert * self.inserted
        if ahead <= self.tolerance:
            return None
        return (
            f"samples per insert {self.samples_per_insert:g}: collectors must add "
            f"{(ahead - self.tolerance) / self.samples_per_insert:,.0f} more rows "
            f"(sampled {self.sampled:,}, inserted {self.inserted:,}, tolerance {self.tolerance:,})"
        )

    def why_impossible(self, rows: int, slot_rows: int) -> str | None:
        """Why both sides could come to wait for each other, or None: 2 * tolerance must cover a batch and a slot."""
        if self.samples_per_insert is None:
            return None
        needed = rows + self.samples_per_insert * slot_rows
        if 2 * self.tolerance >= needed:
            return None
        return (
            f"batches of {rows:,} rows with slots of {slot_rows:,} at {self.samples_per_insert:g} samples per insert can dead-end: "
            f"2 x tolerance is {2 * self.tolerance:,}, at least {needed:,.0f} is needed; raise --tolerance to {-(-needed // 2):,.0f}"
        )
