"""What all slots of one session have in common, and the lanes' chains that outlive them."""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import SegmentLent
from replay_server_protocol.moments import RETURN
from replay_server_protocol.schema import PlacedField, Schema

from replay_server_client.episodes import LaneFields, LaneSums

Bools = npt.NDArray[np.bool_]

_FLOATS = ("float16", "float32", "float64", "bfloat16")


class LaneChains:
    """Which lanes' next row no link may lead into. Outlives slots and sessions."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.is_cut: Bools = np.zeros(lanes, np.bool_)
        self.has_cut = False

    def cut(self, lanes: npt.NDArray[np.integer] | Bools | slice) -> None:
        """These lanes' chains end here."""
        self.is_cut[lanes] = True
        self.has_cut = bool(self.is_cut.any())

    def cut_all(self) -> None:
        self.cut(slice(None))

    def take(self) -> Bools | None:
        """The lanes that are cut, None if none is; here they are whole again."""
        if not self.has_cut:
            return None
        cut, self.is_cut, self.has_cut = self.is_cut, np.zeros(self.lanes, np.bool_), False
        return cut

    def mark(self, lane_of: npt.NDArray[np.int32]) -> None:
        """Turns the first row of every cut lane in ``lane_of`` to ~lane; those lanes are whole again after it."""
        lanes, first = np.unique(lane_of, return_index=True)
        cut = self.is_cut[lanes]
        lane_of[first[cut]] = ~lanes[cut]
        self.is_cut[lanes] = False
        self.has_cut = bool(self.is_cut.any())


class SlotPlan:
    """What all slots of one session have in common."""

    def __init__(self, schema: Schema, chains: LaneChains, lent: SegmentLent, sums: LaneSums | None = None) -> None:
        """``sums`` of an earlier session go on here; without any they begin anew."""
        self.schema = schema
        self.chains = chains
        self.slot_rows = lent.slot_rows
        self.lanes = chains.lanes
        self.links = lent.links
        self.nonfinite = lent.nonfinite
        keeps_returns = RETURN in lent.moments and RETURN not in schema.names
        self.moments = tuple(None if keeps_returns and name == RETURN else schema[name] for name in lent.moments)
        """The fields whose moments are taken; None stands for the running return."""
        self.checked = () if lent.nonfinite == "allow" else checked_fields(schema, lent.finite)
        asked = {field for field in (*self.checked, *self.moments) if field is not None}
        self.scalars = tuple(field for field in asked if not field.shape and field.dtype != "bfloat16")
        self.sums = sums or lane_sums(schema, self.lanes, lent.return_gamma if keeps_returns else None)
        self.keeps_lanes = lent.links or self.sums is not None
        self.version = schema.role("policy_version") if "policy_version" in schema.roles else None
        self.lane_of = np.resize(np.arange(self.lanes, dtype=np.int32), self.slot_rows)

    def with_chains(self, chains: LaneChains) -> SlotPlan:
        """The same plan for slots whose cuts are kept in ``chains``."""
        other = copy.copy(self)
        other.chains = chains
        return other


def checked_fields(schema: Schema, names: list[str] | None) -> tuple[PlacedField, ...]:
    """The fields the non-finite policy looks at: those of ``names``, by default the reward, as far as they are floats."""
    if names is None:
        names = [name for role, name in schema.roles.items() if role == "reward"]
    return tuple(field for name in names if (field := schema[name]).dtype in _FLOATS)


def lane_sums(schema: Schema, lanes: int, gamma: float | None) -> LaneSums | None:
    """What adds up along the lanes of this schema: episodes where it says how they end, returns discounted by ``gamma`` where asked for."""
    fields = LaneFields.of(schema)
    if fields is None and gamma is not None:
        raise ProtocolViolation(f"the server asks for moments of {RETURN!r}, but no field with one number a row has the role reward")
    return None if fields is None or not (fields.ends or gamma is not None) else LaneSums(fields, lanes, gamma)
