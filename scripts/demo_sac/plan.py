"""What the demo trains and how its processes divide the work: every number of it in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """The defaults solve Pendulum in about a minute on two cores.

    Rows and updates are tied together by the server: it lets ``samples_per_insert`` rows be drawn for each row that comes in after
    ``learning_starts``, within ``tolerance_rows``, and makes the side that is ahead wait.
    """

    environment: str = "Pendulum-v1"
    steps: int = 20_000  # environment steps of all collectors together
    seed: int = 0
    device: str = "auto"
    collectors: int = 2
    lanes: int = 5  # environments of a collector
    learning_starts: int = 4_000  # rows of random actions first: two episodes in every lane
    capacity: int = 16_000  # less than the steps, so that the ring wraps
    batch_rows: int = 256
    updates_per_step: float = 0.5
    post_every: int = 10  # updates from one policy to the next
    patience_s: float = 60.0  # longest wait of any process for any other
    time_limit_s: float = 300.0

    @property
    def slot_rows(self) -> int:
        """Ten steps of the lanes: small slots keep the policy that collects close to the one that learns."""
        return 10 * self.lanes

    @property
    def steps_per_collector(self) -> int:
        return -(-self.steps // self.collectors)

    @property
    def updates(self) -> int:
        """As many as the rows after learning starts allow."""
        return int((self.steps_per_collector * self.collectors - self.learning_starts) * self.updates_per_step)

    @property
    def samples_per_insert(self) -> float:
        return self.batch_rows * self.updates_per_step

    @property
    def tolerance_rows(self) -> int:
        """A batch and a slot of every collector, so that neither side waits for less than the other can give."""
        return int(self.batch_rows + self.collectors * self.samples_per_insert * self.slot_rows)
