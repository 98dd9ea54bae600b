"""Makes the store once the schema is known: plan, budget, allocation, in this order."""

from __future__ import annotations

import logging
from typing import Literal

from replay_server_protocol.errors import DeviceError, SchemaMismatch
from replay_server_protocol.moments import RETURN
from replay_server_protocol.schema import PlacedField, Schema

from replay_server.budget import MemoryPlan, free_host_bytes
from replay_server.config import ServerConfig
from replay_server.counters import Tally
from replay_server.cpu_ring import CpuRing
from replay_server.ingress import Ingress
from replay_server.metadata import Metadata, Notes
from replay_server.replay import DeviceChoice, Replay, Store
from replay_server.ring import Ring
from replay_server.storage import RingMemory

log = logging.getLogger("replay_server")


def choose_device(config: ServerConfig) -> DeviceChoice:
    """The device of ``--device``; auto takes the first GPU if there is one. Raises DeviceError that says what is missing."""
    if config.device in ("cpu", "mps"):
        return DeviceChoice(config.device)
    from replay_server.cuda_runtime import has_nvidia_driver, probe_devices  # the CUDA bindings load only where a GPU is asked for

    ordinal = int(config.device.partition(":")[2] or 0)
    try:
        (device,) = probe_devices(ordinal)
    except DeviceError as error:
        if config.device != "auto":
            raise
        why = str(error) if has_nvidia_driver() else "this machine has no NVIDIA driver"
        log.info("no CUDA device: %s; the ring lies in host memory", why)
        return DeviceChoice("cpu")
    return DeviceChoice("cuda", device.ordinal, device.uuid, device.name)


def plan_memory(config: ServerConfig, schema: Schema, lanes: int, device: DeviceChoice) -> MemoryPlan:
    """Counts the memory; allocates nothing."""
    return MemoryPlan.of(config, schema, lanes, is_on_device=device.kind == "cuda" and config.storage == "device")


def make_store(replay: Replay, schema: Schema, lanes: int) -> Store:
    """Allocates the ring. Raises BudgetExceeded, SchemaMismatch, InvalidRequest or DeviceError and leaves nothing behind."""
    config = replay.config
    tallies = [Tally(field) for field in moment_fields(config, schema)]
    finite_fields(config, schema)  # refused before anything is allocated
    metadata = Metadata(tallies, Notes.of(schema), replay.mailboxes.newest_version)
    plan = plan_memory(config, schema, lanes, replay.device)
    plan.check(free_device_bytes(replay.device) if plan.is_on_device else None, free_host_bytes())
    memory = _allocate(replay, plan)
    ring = Ring(plan.capacity, plan.headroom)
    ingress = Ingress(ring, memory, plan.layout, replay.flow, replay.leases, metadata, replay.counters, replay.tracing)
    rows = f"{ring.ring_rows:,} rows ({ring.capacity:,} and {ring.headroom:,} of headroom)"
    log.info("ring of %s of %s bytes on %s", rows, schema.stride, memory.place.storage)
    return Store(schema, plan, ring, memory, ingress, tallies)


def moment_fields(config: ServerConfig, schema: Schema) -> list[PlacedField]:
    """The fields whose moments are kept: those of ``--moments``, else the reward if there is one and it is a number.

    ``return``, where no field has that name, stands for the running discounted return.
    """
    if config.moments is None:
        reward = schema.roles.get("reward")
        return [schema[reward]] if reward is not None and _has_moments(schema, reward) else []
    return [_moment_field(schema, name) for name in config.moments]


def _moment_field(schema: Schema, name: str) -> PlacedField:
    if name == RETURN and name not in schema.names:
        reward = schema.roles.get("reward")
        if reward is None or schema[reward].elements != 1 or schema[reward].dtype == "bool":
            raise SchemaMismatch(
                f"--moments {name}: needs one number a row with the role reward: Schema.of(..., roles={{'reward': FIELD}})"
            )
        return PlacedField(RETURN, "float64", (), False, 0, 8)
    if not _has_moments(schema, name):
        raise SchemaMismatch(f"--moments {name}: bool and bfloat16 fields have no moments", field=name)
    return schema[name]


def finite_fields(config: ServerConfig, schema: Schema) -> list[str] | None:
    """The fields of ``--finite``, None for the default. Raises SchemaMismatch for one that can't be anything but finite."""
    for name in config.finite or ():
        if "float" not in schema[name].dtype:
            raise SchemaMismatch(f"--finite {name}: a field of {schema[name].dtype} is always finite", field=name)
    return None if config.finite is None else list(config.finite)


def _has_moments(schema: Schema, name: str) -> bool:
    return schema[name].dtype not in ("bool", "bfloat16")


def free_device_bytes(device: DeviceChoice) -> int:
    from replay_server.cuda_runtime import probe_devices

    (found,) = probe_devices(device.ordinal)
    return found.free_bytes


def _allocate(replay: Replay, plan: MemoryPlan) -> RingMemory:
    delay_s = replay.config.debug_copy_delay
    if plan.is_on_device:
        from replay_server.cuda_ring import CudaRing

        return CudaRing.create(replay.device.ordinal, plan.layout, copy_delay_s=delay_s)
    storage: Literal["host", "cpu"] = "host" if replay.config.storage == "host" else "cpu"
    return CpuRing.create(replay.directory.run_id, plan.layout, storage=storage, copy_delay_s=delay_s)
