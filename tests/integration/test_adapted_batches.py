"""Batches of a real server as TensorDicts and by DLPack: the same memory under other names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay_server_client import Batch, Collector, InvalidRequest, Learner, Schema, adapters
from replay_server_client.adapters import dlpack_fields, wait_for_stream
from support.servers import ServerProcess

LANES = 4
SCHEMA = Schema.of(
    {"obs": {"camera": ("uint8", (2, 2)), "joints": ("float32", 3)}, "next_obs": {"camera": ("uint8", (2, 2)), "joints": ("float32", 3)}},
    action="int64",
    reward="float32",
    terminated="bool",
    truncated="bool",
)


@pytest.fixture
def learner(start_server: Callable[..., ServerProcess]) -> Iterator[Learner]:
    """Of a server with 80 rows of four lanes; its batches wait for all of them."""
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--columns", "link")
    n = 80
    at = np.arange(n)
    camera, joints = np.broadcast_to(at[:, None, None], (n, 2, 2)).astype(np.uint8), np.tile(at[:, None], 3).astype(np.float32)
    obs, next_obs = {"camera": camera, "joints": joints}, {"camera": camera + np.uint8(1), "joints": joints + np.float32(1)}
    ends = {"terminated": at % 10 == 0, "truncated": at % 7 == 0}
    with Collector.connect(server.name, schema=SCHEMA, lanes=LANES, run_dir=server.run_dir) as collector:
        collector.write({"obs": obs, "action": at, "reward": at.astype(np.float32), "next_obs": next_obs, **ends})
        collector.flush()
        with Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0) as connected:
            yield connected


def test_a_tensordict_has_the_batchs_own_tensors_under_nested_names(learner: Learner) -> None:
    pytest.importorskip("tensordict", reason="needs the real TensorDict: pip install 'replay-server[tensordict]'")
    batch = learner.sample(16)
    view = adapters.to_tensordict(batch)
    assert view.batch_size == torch.Size([16])
    assert view["obs", "camera"].data_ptr() == batch["obs.camera"].data_ptr()
    assert set(view.keys()) == {"obs", "next_obs", "action", "reward", "terminated", "truncated"}
    assert torch.equal(view["obs", "joints"], batch["obs.joints"])
    assert view[3]["reward"] == batch["reward"][3]
    sequences = adapters.to_tensordict(learner.sequences(4, length=5))
    assert sequences.batch_size == torch.Size([4, 5])
    assert sequences["obs", "camera"].shape == (4, 5, 2, 2)


def test_a_tensordict_for_torchrl_has_its_places_and_shapes(learner: Learner) -> None:
    pytest.importorskip("tensordict", reason="needs the real TensorDict: pip install 'replay-server[tensordict]'")
    batch = learner.sample(64)
    view = adapters.to_tensordict(batch, torchrl=True)
    after = view["next"]
    assert set(view.keys()) == {"obs", "action", "next"}
    assert set(after.keys()) == {"obs", "reward", "terminated", "truncated", "done"}
    assert after["obs", "joints"].data_ptr() == batch["next_obs.joints"].data_ptr()
    assert after["reward"].data_ptr() == batch["reward"].data_ptr()
    assert after["reward"].shape == after["done"].shape == (64, 1)
    assert torch.equal(after["done"].squeeze(-1), batch["terminated"] | batch["truncated"])


@pytest.mark.parametrize("library", ["tensordict", "jax"])
def test_an_example_of_the_page_runs_as_it_stands(learner: Learner, library: str) -> None:
    pytest.importorskip(library, reason=f"the example of {library} needs it")
    page = (Path(__file__).parents[2] / "docs/adapters.md").read_text("utf-8")
    (example,) = (code for code in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) if library in code)
    made: dict[str, Any] = {"learner": learner}
    exec(example, made)  # noqa: S102 - the page's own lines
    if library == "jax":
        assert made["action"].shape == made["reward"].shape == (256,)
    else:
        assert made["data"]["next", "done"].shape == made["data"]["next", "reward"].shape == (256, 1)


def test_a_batch_that_has_ended_becomes_no_tensordict(learner: Learner) -> None:
    pytest.importorskip("tensordict", reason="needs the real TensorDict: pip install 'replay-server[tensordict]'")
    batch = learner.sample(16)
    learner.sample(16)
    with pytest.raises(InvalidRequest, match="ended"):
        adapters.to_tensordict(batch)


def test_numpy_takes_compact_fields_by_dlpack_without_a_copy(learner: Learner) -> None:
    batch = learner.sample(16)
    fields = dlpack_fields(batch, "obs.joints", "action", "terminated")
    assert list(fields) == ["obs.joints", "action", "terminated"]
    for name, tensor in fields.items():
        array = np.from_dlpack(tensor)
        assert array.flags.c_contiguous
        assert array.__array_interface__["data"][0] == tensor.data_ptr()
        assert np.array_equal(array, batch[name].numpy())
    assert set(dlpack_fields(batch)) == set(SCHEMA.names)


def test_the_memory_of_compact_fields_is_the_batch_buffers(learner: Learner) -> None:
    first = dlpack_fields(learner.sample(16), "reward")["reward"].data_ptr()
    assert dlpack_fields(learner.sample(16), "reward")["reward"].data_ptr() == first  # prefetch=0: one buffer


def test_jax_takes_compact_fields_by_dlpack(learner: Learner) -> None:
    jax = pytest.importorskip("jax", reason="needs the real JAX: pip install jax")
    batch: Batch = learner.sample(16)
    for name, tensor in dlpack_fields(batch, "obs.joints", "obs.camera", "reward", "terminated").items():
        array = jax.dlpack.from_dlpack(tensor)
        assert np.array_equal(np.asarray(array), batch[name].numpy())
    actions = jax.dlpack.from_dlpack(dlpack_fields(batch, "action")["action"])
    assert str(actions.dtype) == "int32", "JAX has 64 bits by default now; docs/adapters.md says it has not"
    assert np.asarray(actions).tolist() == batch["action"].tolist()
    total = jax.jit(lambda x: x.sum())(jax.dlpack.from_dlpack(dlpack_fields(batch, "reward")["reward"]))
    assert float(jax.block_until_ready(total)) == float(batch["reward"].sum())


def test_unknown_fields_ended_batches_and_streams_that_are_none_are_refused(learner: Learner) -> None:
    batch = learner.sample(16)
    with pytest.raises(InvalidRequest, match="no field 'height'"):
        dlpack_fields(batch, "height")
    learner.sample(16)
    with pytest.raises(InvalidRequest, match="ended"):
        dlpack_fields(batch, "reward")
    for stream in (-1, True, "default"):
        with pytest.raises(InvalidRequest, match="stream"):
            wait_for_stream(stream)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "library", "extra"), [("to_tensordict", "tensordict", "tensordict"), ("ServerReplayBuffer", "stable_baselines3", "sb3")]
)
def test_a_missing_library_is_named_with_its_extra_and_the_package_itself_imports_none(name: str, library: str, extra: str) -> None:
    source = f"""
import sys
sys.modules[{library!r}] = None
from replay_server_client import adapters
assert not {{"torch", "gymnasium", "tensordict", "jax"}} & set(sys.modules) - {{{library!r}}}
try:
    adapters.{name}
except ImportError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=True).stdout
    assert library in told
    assert f"replay-server[{extra}]" in told


def test_an_unknown_adapter_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="to_keras"):
        adapters.to_keras  # noqa: B018
