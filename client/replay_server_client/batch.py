"""A batch: the rows drawn for one request, in one of its sampler's batch buffers, seen as tensors that are views of it."""

from __future__ import annotations

from collections.abc import Mapping

from replay_server_protocol.errors import InvalidRequest
from torch import Tensor

from replay_server_client.batch_buffer import BatchBuffer


class Batch:
    """``n`` transitions, or ``n`` sequences of ``length`` rows, drawn from one window.

    ``batch["obs"]`` and ``batch.fields`` are views of the rows, ``dtype[n, *shape]`` or ``dtype[n, length, *shape]``; they hold until the
    next ``sample()`` of the same request, after which every use of the batch's tensors raises InvalidRequest.

    ``window`` is the (tail, committed) it was drawn from, ``number`` the request's number, ``buffer`` its place among the prefetch + 1
    batch buffers of the request.
    """

    __slots__ = ("_memory", "buffer", "number", "window")

    def __init__(self, memory: BatchBuffer, number: int, window: tuple[int, int]) -> None:
        self._memory: BatchBuffer | None = memory
        self.buffer = memory.number
        self.number = number
        self.window = window

    def __getitem__(self, name: str) -> Tensor:
        """The field's values as a view of the rows."""
        return self.memory().field(name)

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """All fields by name, in the schema's order."""
        return self.memory().fields

    def span(self, *names: str) -> Tensor:
        """Adjacent fields of one dtype as one view ``dtype[n, elements]``. Raises InvalidRequest where the row has a gap between them."""
        return self.memory().span(*names)

    def compact(self, name: str) -> Tensor:
        """The field copied to contiguous memory, on the current stream; its address is the batch buffer's, like that of the views."""
        return self.memory().compact(name)

    @property
    def seqs(self) -> Tensor:
        """Absolute numbers of the rows, ``int64[n]`` or ``int64[n, length]``."""
        return self.memory().seqs

    @property
    def indices(self) -> Tensor:
        """Where the rows lay in the ring, shaped as ``seqs``."""
        return self.memory().indices

    @property
    def weights(self) -> Tensor:
        """Importance weights of the n draws, ``float32[n]``; 1 for uniform ones."""
        return self.memory().results["weights"]

    @property
    def discount(self) -> Tensor:
        """gamma ** n_steps, ``float32[n]``. Of transitions only."""
        memory = self.memory()
        return memory.discount() if memory.request.is_one_step else memory.result("discount")

    @property
    def n_steps(self) -> Tensor:
        """How many steps each transition spans, ``int64[n]``, from 1 to the request's n_step. Of transitions only."""
        memory = self.memory()
        return memory.n_steps() if memory.request.is_one_step else memory.result("n_steps")

    @property
    def bootstrap(self) -> Tensor:
        """The factor of what comes after, ``float32[n]``: discount, 0 where terminated. Of transitions only.

        ``target = reward + bootstrap * q(next_obs)`` is right for every n_step.
        """
        memory = self.memory()
        return memory.one_step_bootstrap() if memory.request.is_one_step else memory.result("bootstrap")

    @property
    def mask(self) -> Tensor:
        """Where a sequence has a row, ``bool[n, length]``: True up to its end, after which the last row is repeated."""
        return self.memory().result("mask")

    @property
    def loss_mask(self) -> Tensor:
        """``mask`` without the first ``burn_in`` rows."""
        return self.memory().loss_mask()

    @property
    def is_first(self) -> Tensor:
        """Where a recurrent state starts anew, ``bool[n, length]``: at the first row of a sequence and of an episode."""
        return self.memory().result("is_first")

    def expire(self) -> None:
        """The batch buffer goes back to its sampler."""
        self._memory = None

    def memory(self) -> BatchBuffer:
        """The batch buffer. Raises InvalidRequest once it went back."""
        if self._memory is None:
            raise InvalidRequest(
                f"batch {self.number} ended with the next sample() of its request: its batch buffer {self.buffer} holds other rows by now; "
                "clone what must live longer"
            )
        return self._memory

    def __len__(self) -> int:
        return self.memory().request.n

    def __repr__(self) -> str:
        over = ", expired" if self._memory is None else ""
        return f"{type(self).__name__}(number={self.number}, window={self.window}, buffer={self.buffer}{over})"
