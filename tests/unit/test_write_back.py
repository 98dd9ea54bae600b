"""What is written about a lent batch waits in its buffer as records: all of it checked first, field by field, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.draw import Parameters
from replay_server_client.lap_column import LapColumn
from replay_server_client.recipe import Recipe, take_by_numpy
from replay_server_client.request import Request
from replay_server_client.ring_tensors import RingTensors
from replay_server_client.write_back import WriteBack
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import DTYPES, Field, Schema
from torch import Tensor

CPU = torch.device("cpu")
SCHEMA = Schema.of(
    {
        **{f"{dtype}_one": Field(dtype, mutable=place % 2 == 0) for place, dtype in enumerate(DTYPES)},
        **{f"{dtype}_three": Field(dtype, 3, mutable=place % 2 == 1) for place, dtype in enumerate(DTYPES)},
    }
)
MUTABLE = [field.name for field in SCHEMA if field.mutable]
RING_ROWS = 12


def make(request: Request, schema: Schema = SCHEMA) -> tuple[BatchBuffer, Recipe, RingTensors]:
    """A batch buffer over a ring of random bytes whose rows are in a window; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, 256, (RING_ROWS, schema.stride), dtype=torch.uint8, generator=generator)
    for field in schema:
        if field.dtype == "bool":
            rows[:, field.offset : field.end] %= 2
    words = schema.overlay.stride // 4 if schema.overlay else 0
    overlay = LapColumn.of(torch.zeros(RING_ROWS + 1, words, dtype=torch.int32)) if words else None
    priority = LapColumn.of(torch.zeros(RING_ROWS + 1, 2, dtype=torch.int32))
    link = torch.arange(1, RING_ROWS + 1)
    ring = RingTensors(rows, link, priority, overlay)
    memory = BatchBuffer(0, schema, request, CPU)
    return memory, Recipe(memory, ring, take_by_numpy), ring


def draw(memory: BatchBuffer, recipe: Recipe, key: int, *, tail: int = 0, size: int = RING_ROWS) -> None:
    """As a sampler does: what was written is taken along, and forgotten."""
    written = memory.write_back
    Parameters(key, tail, size, int(written.has_priorities), int(written.has_values), 1.0, 1.0).write_to(memory.drawn.parameters.numpy())
    written.forget()
    recipe()


def random_like(values: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*values.shape, values.element_size()), dtype=torch.uint8, generator=generator)
    return raw[..., 0] % 2 == 0 if values.dtype == torch.bool else raw.view(values.dtype).view(values.shape)


def by_bits(values: Tensor) -> list[Any]:
    found: list[Any] = values.contiguous().view(len(values), -1).view(torch.uint8).tolist()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_dtype_come_back_bit_exact_and_leave_their_neighbours_alone(dtype: str) -> None:
    """Both a field of one element and one of three, between fields of other sizes."""
    mutable = {"scalar": Field(dtype, mutable=True), "between": Field("uint8", mutable=True), "array": Field(dtype, 3, mutable=True)}
    schema = Schema.of({"before": "uint8", **mutable, "after": "float64", "seq": "int16"})
    memory, recipe, ring = make(Request.transitions(64), schema)
    draw(memory, recipe, 1)
    assert len(set(memory.seqs.tolist())) == RING_ROWS
    new = {name: random_like(memory.fields[name][:RING_ROWS], seed) for seed, name in enumerate(mutable)}
    memory.write_back.write_values(memory.fields, {name: values[memory.seqs] for name, values in new.items()}, None)
    draw(memory, recipe, 2)
    for name, values in new.items():
        assert by_bits(memory.fields[name]) == by_bits(values[memory.seqs]), name
    for name in ("before", "after", "seq"):
        field = schema[name]
        assert torch.equal(memory.rows[:, field.offset : field.end], ring.rows[memory.indices, field.offset : field.end])


def test_fields_not_named_keep_what_the_batch_saw_and_what_the_last_call_gave() -> None:
    memory, recipe, ring = make(Request.transitions(64))
    draw(memory, recipe, 1)
    assert len(set(memory.seqs.tolist())) == RING_ROWS
    first, second = MUTABLE[0], MUTABLE[1]
    ones = {name: torch.ones_like(memory.fields[name]) for name in (first, second)}
    memory.write_back.write_values(memory.fields, {first: ones[first]}, None)
    memory.write_back.write_values(memory.fields, {second: ones[second]}, None)
    draw(memory, recipe, 2)
    for field in SCHEMA:
        if field.name not in ones:
            assert torch.equal(memory.rows[:, field.offset : field.end], ring.rows[memory.indices, field.offset : field.end])
        else:
            assert torch.equal(memory.fields[field.name], ones[field.name])


def test_a_refused_update_writes_none_of_its_fields() -> None:
    memory, recipe, _ = make(Request.transitions(8))
    draw(memory, recipe, 1)
    good = torch.ones_like(memory.fields[MUTABLE[0]])
    fixed = next(field.name for field in SCHEMA if not field.mutable)
    wrong: list[tuple[str, Any, str]] = [
        ("nothing", good, "'nothing' is not mutable"),
        (fixed, memory.fields[fixed], f"'{fixed}' is not mutable"),
        (MUTABLE[1], memory.fields[MUTABLE[1]][:3], f"'{MUTABLE[1]}'.*is right"),
        (MUTABLE[1], memory.fields[MUTABLE[1]].to(torch.complex64), f"'{MUTABLE[1]}'.*complex64"),
        (MUTABLE[1], [1.0] * 8, f"'{MUTABLE[1]}'.*is no tensor"),
    ]
    for name, value, named in wrong:
        with pytest.raises(InvalidRequest, match=named):
            memory.write_back.write_values(memory.fields, {MUTABLE[0]: good, name: value}, None)
    assert not memory.write_back.has_values
    assert not memory.write_back.values.payload.any()  # type: ignore[union-attr]


def test_a_schema_without_mutable_fields_says_how_to_declare_one() -> None:
    memory, *_ = make(Request.transitions(4), Schema.of(x="float32"))
    with pytest.raises(InvalidRequest, match=r"no field is; declare it with Field\(\.\.\., mutable=True\)"):
        memory.write_back.write_values(memory.fields, {"x": torch.zeros(4)}, None)


def test_priorities_of_a_uniform_batch_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="by='priority'"):
        WriteBack(SCHEMA, Request.transitions(4), CPU).write_priorities(torch.ones(4))


def test_fewer_priorities_than_draws_reach_the_first_rows_alone() -> None:
    """A mixed batch takes only part of what its samplers drew."""
    memory, recipe, ring = make(Request.transitions(8, by="priority"))
    draw(memory, recipe, 1)
    first, rest = set(memory.seqs[:3].tolist()), set(memory.seqs[3:].tolist())
    memory.write_back.write_priorities(torch.full((8,), 4.0))
    memory.write_back.write_priorities(torch.full((3,), 2.0))
    draw(memory, recipe, 2)
    assert {seq: ring.priorities().priorities[seq].item() for seq in first} == dict.fromkeys(first, 2.0)
    assert not ring.priorities().laps[list(rest - first)].any()


def test_writes_are_applied_once_and_those_that_were_forgotten_never() -> None:
    memory, recipe, ring = make(Request.transitions(8, by="priority"))
    draw(memory, recipe, 1)
    memory.write_back.write_priorities(torch.full((8,), 2.0))
    memory.write_back.write_values(memory.fields, {MUTABLE[0]: torch.ones_like(memory.fields[MUTABLE[0]])}, None)
    memory.write_back.forget()
    draw(memory, recipe, 2)
    assert not ring.priorities().laps.any()
    memory.write_back.write_priorities(torch.full((8,), 2.0))
    draw(memory, recipe, 3)
    written = ring.priorities().records.clone()
    draw(memory, recipe, 4)
    assert torch.equal(ring.priorities().laps, written[:-1, 0])


def test_writes_of_rows_before_the_new_window_are_counted_and_left_out() -> None:
    memory, recipe, ring = make(Request.transitions(32, by="priority"))
    draw(memory, recipe, 1)
    stale = int((memory.seqs < 5).sum())
    memory.write_back.write_priorities(torch.full((32,), 2.0))
    memory.write_back.write_values(memory.fields, {MUTABLE[0]: memory.fields[MUTABLE[0]]}, None)
    draw(memory, recipe, 2, tail=5, size=RING_ROWS - 5)
    assert memory.write_back.seen_counts() == (2 * stale, 0, 0)
    assert not ring.priorities().laps[:5].any()


class TwoLearners:
    """One that has written about lap 1 and is about to write about lap 2 of the same ring rows, and one that reads lap 2."""

    def __init__(self) -> None:
        schema = Schema.of(mark="int64", state=Field("float32", 5, mutable=True))
        self._writer, self._write, ring = make(Request.transitions(64), schema)
        self._reader = BatchBuffer(1, schema, Request.transitions(64), CPU)
        self._read = Recipe(self._reader, ring, take_by_numpy)
        state = ring.rows[:, schema["state"].offset : schema["state"].end].view(torch.float32)
        for tail in (0, RING_ROWS):
            state.copy_(torch.arange(tail, tail + RING_ROWS)[:, None].expand(RING_ROWS, 5))
            draw(self._writer, self._write, 1 + tail, tail=tail)
            assert torch.equal(self.newer_by(self._writer), torch.zeros(64, 5))
            self._writer.write_back.write_values(self._writer.fields, {"state": self._writer.fields["state"] + 0.5}, None)
            if not tail:
                self.write()

    def write(self) -> None:
        draw(self._writer, self._write, 2, tail=int(self._writer.seqs.min()) // RING_ROWS * RING_ROWS)

    def read(self) -> Tensor:
        """How much newer each element is than it was written."""
        draw(self._reader, self._read, 5, tail=RING_ROWS)
        return self.newer_by(self._reader)

    @staticmethod
    def newer_by(memory: BatchBuffer) -> Tensor:
        return memory.fields["state"] - memory.seqs[:, None]


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, other: Callable[[], object], by: Callable[[], object]) -> None:
    """Does ``by`` with ``other`` after every call of ``owner.name`` in it."""
    plain = getattr(owner, name)
    with monkeypatch.context() as patched:

        def step(*given: Any, **more: Any) -> Any:
            found = plain(*given, **more)
            patched.setattr(owner, name, plain)
            other()
            patched.setattr(owner, name, step)
            return found

        patched.setattr(owner, name, step)
        by()


def test_who_reads_in_the_middle_of_a_write_finds_nothing_of_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    two, seen = TwoLearners(), list[Tensor]()
    interrupt(monkeypatch, torch.Tensor, "index_copy_", lambda: seen.append(two.read()), two.write)
    assert [state.unique().tolist() for state in seen] == [[0.0], [0.5]]


def test_who_is_written_to_in_the_middle_of_a_read_finds_nothing_of_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    two, seen = TwoLearners(), list[Tensor]()
    interrupt(monkeypatch, torch.Tensor, "index_select", two.write, lambda: seen.append(two.read()))
    assert seen[0].unique().tolist() in ([0.0], [0.5])
    assert two.read().unique().tolist() == [0.5]


def test_values_of_an_n_step_row_are_those_of_its_first_row() -> None:
    obs = Field("float32", 2, mutable=True)
    schema = Schema.of(state=obs, obs="float32", next_obs="float32", reward="float32", terminated="bool", truncated="bool")
    memory, recipe, ring = make(Request.transitions(64, n_step=3), schema)
    ring.rows[:, schema["terminated"].offset : schema["truncated"].end] = 0
    draw(memory, recipe, 1)
    values = memory.seqs[:, None].float().expand(64, 2) * 10
    memory.write_back.write_values(memory.fields, {"state": values}, None)
    draw(memory, recipe, 2)
    assert torch.equal(memory.fields["state"], memory.seqs[:, None].float().expand(64, 2) * 10)


@pytest.mark.parametrize("role", ["reward", "terminated", "truncated", "first", "next_obs"])
def test_what_n_step_reads_of_later_rows_may_not_be_mutable(role: str) -> None:
    fields = {"obs": "float32", "next_obs": "float32", "reward": "float32", "terminated": "bool", "truncated": "bool", "first": "bool"}
    schema = Schema.of({**fields, role: Field(fields[role], mutable=True)})
    with pytest.raises(InvalidRequest, match=f"n_step=3 reads {role} of later rows"):
        make(Request.transitions(4, n_step=3), schema)
    sequences = Request.sequences(4, length=3, burn_in=0, stride=1, crosses_episodes=True)
    if role in ("terminated", "truncated", "first"):
        with pytest.raises(InvalidRequest, match=rf"sequences\(\) reads {role} of later rows"):
            make(sequences, schema)
    else:
        make(sequences, schema)
    make(Request.transitions(4), schema)
