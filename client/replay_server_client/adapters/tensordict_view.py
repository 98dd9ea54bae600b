"""A batch as a TensorDict whose tensors are the batch's own: no copy."""

from __future__ import annotations

from collections.abc import Mapping

from replay_server_protocol.errors import InvalidRequest
from tensordict import TensorDict
from torch import Tensor

from replay_server_client.batch import Batch

_NEXT = "next"
_ENDS = ("terminated", "truncated")


def to_tensordict(batch: Batch, *, torchrl: bool = False) -> TensorDict:
    """The fields under their names, dotted ones nested; batch size ``[n]``, or ``[n, length]`` of sequences.

    With ``torchrl`` in the places TorchRL's losses look: ``next_X`` at ``("next", "X")``, the fields of the roles reward, terminated and
    truncated at ``("next", ROLE)`` with a last dimension of 1, and ``("next", "done")`` made of both ends, the one copy there is. Tensors
    hold as long as the batch's: until the next ``sample()`` of its request; ``.clone()`` what must live longer. Raises InvalidRequest for
    a batch that has ended.
    """
    memory = batch.memory()
    fields = memory.fields
    placed = _torchrl(fields, memory.schema.roles, memory.schema.pairs) if torchrl else {_path(name): fields[name] for name in fields}
    view = TensorDict({}, batch_size=memory.request.shape, device=memory.rows.device)
    for path, tensor in placed.items():
        view[path] = tensor
    return view


def _torchrl(fields: Mapping[str, Tensor], roles: Mapping[str, str], pairs: Mapping[str, str]) -> dict[tuple[str, ...], Tensor]:
    place_of = {after: (_NEXT, *_path(before)) for before, after in pairs.items()}
    role_of = {name: role for role, name in roles.items() if role in (*_ENDS, "reward")}
    placed: dict[tuple[str, ...], Tensor] = {}
    for name, tensor in fields.items():
        if name in role_of:
            placed[_NEXT, role_of[name]] = tensor.unsqueeze(-1)
        else:
            placed[place_of.get(name, _path(name))] = tensor
    ends = [placed[_NEXT, role] for role in _ENDS if (_NEXT, role) in placed]
    if not ends:
        raise InvalidRequest("TorchRL's losses need done: name the roles terminated or truncated in Schema.of(..., roles=...)")
    placed[_NEXT, "done"] = ends[0] | ends[-1]
    return placed


def _path(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))
