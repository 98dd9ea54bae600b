"""What a collector has done and what it holds, for whoever asks."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from replay_server_client.ingress import Ingress


@dataclass(frozen=True, slots=True)
class CollectorStatistics:
    """What a collector has done over all its sessions, and what it holds now.

    rows_written = rows_committed + rows_rejected + rows_in_flight + rows_lost. ``committed`` is the seq of the newest credit. Rows kept for
    the next server that passes rows on are in flight; ``publishes_resumed`` of them were made again to one. After ``close`` those are in
    flight whose credits it did not wait for: its server counts them as what becomes of them. Rows that it never published are lost.
    """

    name: str
    generation: int | None
    slot_rows: int
    depth: int
    free_slots: int
    committed: int
    rows_written: int
    rows_committed: int
    rows_in_flight: int
    rows_masked: int
    rows_rejected: int
    rows_nonfinite: int
    rows_lost: int
    publishes: int
    publishes_resumed: int
    repeats: int
    waited_s: float

    @classmethod
    def of(cls, name: str, ingress: Ingress) -> CollectorStatistics:
        slots, welcome, counts = ingress.slots, ingress.connection.welcome, ingress.counts
        in_flight = slots.rows_in_flight if slots else ingress.rows_kept + ingress.rows_given_up
        return cls(
            name=name,
            generation=welcome.generation if welcome else None,
            slot_rows=slots.slot_rows if slots else 0,
            depth=slots.depth if slots else 0,
            free_slots=slots.free_slots if slots else 0,
            committed=slots.committed if slots else 0,
            rows_in_flight=in_flight,
            rows_written=in_flight + counts.rows_committed + counts.rows_rejected + counts.rows_lost,
            **asdict(counts),
        )
