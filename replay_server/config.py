"""Every option of the server, its default and its check, in one place; the command line and the TOML file read them here."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from replay_server_protocol.endpoints import check_name
from replay_server_protocol.errors import InvalidRequest, SchemaMismatch, shown
from replay_server_protocol.schema import Schema

from replay_server.saved.manifest import Manifest, newest

COLUMNS = ("link", "priority")
KEPT_OPTIONS = (
    "capacity",
    "headroom",
    "slot_rows",
    "depth",
    "learning_starts",
    "samples_per_insert",
    "tolerance",
    "columns",
    "moments",
    "return_gamma",
    "finite",
    "nonfinite",
    "lease",
    "seed",
)
"""What a snapshot keeps of the options; where the ring lies is up to each server."""
MAX_HEADROOM_ROWS = 131_072
MIN_AUTO_SLOT_ROWS = 512

_SIZE = re.compile(r"(?i)([0-9][0-9_]*)\s*([KMGT]i?B)")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|d|)")
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86_400}
_MOST_SCHEMA_BYTES = 1 << 20
_MOST_CONFIG_BYTES = 1 << 16
_MOST_DOTS = 100  # of a line before it is parsed: tomllib takes minutes over a key of many parts
_UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Size:
    """A capacity given in bytes of the ring, e.g. ``40GiB``; rows follow once the schema is known."""

    n_bytes: int


def _option(default: Any, help: str, metavar: str | None = None, choices: tuple[str, ...] | None = None, hidden: bool = False) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar, "choices": choices, "hidden": hidden})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What ``replay-server serve`` was asked to do. Raises InvalidRequest naming the option."""

    name: str | None = _option(None, "name clients connect to (default: $REPLAY_SERVER_NAME, else default)")
    run_dir: str | None = _option(None, "run directory of sockets and lock (default: see README)", "DIR")
    device: str = _option("auto", "where the ring lives: auto, cpu, cuda[:N] or mps")
    storage: Literal["device", "host"] = _option(
        "device", "device: ring on the device; host: ring in host memory, for rings larger than the GPU", choices=("device", "host")
    )
    capacity: int | Size = _option(1_000_000, "rows that can be sampled, or the ring's size in bytes (40GiB)", "ROWS|SIZE")
    headroom: int | None = _option(None, "ring rows beyond the capacity (default: max(2 x slot rows, min(capacity / 8, 131072)))", "ROWS")
    slot_rows: int | None = _option(None, "rows of a slot (default: auto, at least 512 and one whole step of the lanes)", "ROWS|auto")
    depth: int = _option(2, "slots of a collector", "N")
    max_collectors: int = _option(64, "collectors attached at a time", "N")
    max_learners: int = _option(64, "learners attached at a time", "N")
    schema: str | None = _option(None, "schema file (JSON); without it the first collector's schema makes the ring", "FILE")
    learning_starts: int = _option(0, "rows committed before the first batch", "ROWS")
    samples_per_insert: float | None = _option(None, "rows sampled per row inserted, kept within the tolerance", "R")
    tolerance: int | None = _option(None, "rows by which samples per insert may be off, either side (required with it)", "ROWS")
    columns: tuple[str, ...] = _option((), "side columns kept beside the rows: link, priority", "NAME,…")
    moments: tuple[str, ...] | None = _option(
        None, "fields whose running moments are kept, `return` for the lanes' discounted return (default: the reward)", "FIELD,…"
    )
    return_gamma: float = _option(0.99, "discount of the running return", "GAMMA")
    finite: tuple[str, ...] | None = _option(None, "fields that are looked at for NaN and infinity (default: the reward)", "FIELD,…")
    nonfinite: Literal["reject", "count", "allow"] = _option(
        "reject", "what happens to rows with NaN or infinity in a field of --finite", choices=("reject", "count", "allow")
    )
    lease: float = _option(0.5, "seconds a learner may hold a window for a gather", "SECONDS")
    mailbox_bytes: int = _option(256 << 20, "memory of all mailboxes together", "SIZE")
    seed: int = _option(0, "seed of all draws, with the learner's own", "N")
    stall_after: float = _option(4.0, "a wait of so many seconds is told in the log, and again every six times that", "SECONDS")
    trace: str | None = _option(None, "write what the server did and when there at its end, for ui.perfetto.dev", "FILE")
    restore: str | None = _option(None, "fill the ring from a snapshot before serving; its options hold where none is given here", "DIR")
    snapshot_every: float | None = _option(None, "take a snapshot so often (90s, 10min, 2h) into --snapshot-dir", "TIME")
    snapshot_dir: str | None = _option(None, "folder of those snapshots", "DIR")
    snapshot_keep: int = _option(3, "how many of them are kept", "N")
    run_id: str | None = _option(None, "name of the run; clients that give another one are refused", "ID")
    log_level: str = _option("info", "debug, info, warning or error", choices=("debug", "info", "warning", "error"))
    parent_pid: int | None = _option(None, "stop when this process ends", "PID", hidden=True)
    debug_copy_delay: float = _option(0.0, "tests: seconds every copy into the ring takes longer", hidden=True)
    debug_profile: str | None = _option(None, "tests: write what CUDA did as a Chrome trace there (needs torch)", "FILE", hidden=True)

    def __post_init__(self) -> None:
        self._check_counts()
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", self.device):
            raise InvalidRequest(f"--device {self.device!r}: auto, cpu, cuda, cuda:N or mps")
        unknown = set(self.columns) - set(COLUMNS)
        if unknown:
            raise InvalidRequest(f"--columns {','.join(sorted(unknown))}: only {', '.join(COLUMNS)} exist")
        if self.samples_per_insert is not None and (not 0 < self.samples_per_insert < 1e9 or self.tolerance is None):
            raise InvalidRequest("--samples-per-insert must be above 0 and needs --tolerance ROWS")
        if self.run_id is not None:
            check_name(self.run_id, "--run-id")
        if not 0 <= self.return_gamma <= 1:
            raise InvalidRequest(f"--return-gamma {self.return_gamma:g}: 0 to 1")
        if not 0.001 <= self.lease <= 3600:
            raise InvalidRequest(f"--lease {self.lease:g}: 0.001 to 3600 seconds")
        if not 0.01 <= self.stall_after <= 86_400:
            raise InvalidRequest(f"--stall-after {self.stall_after:g}: 0.01 to 86,400 seconds")
        if (self.snapshot_every is None) != (self.snapshot_dir is None):
            raise InvalidRequest("--snapshot-every TIME and --snapshot-dir DIR need each other")
        if self.snapshot_every is not None and not 1 <= self.snapshot_every <= 30 * 86_400:
            raise InvalidRequest(f"--snapshot-every {self.snapshot_every:g}: 1 second to 30 days")
        if not -(2**63) <= self.seed < 2**63:
            raise InvalidRequest(f"--seed {shown(self.seed)}: a 64-bit integer")

    def _check_counts(self) -> None:
        rows = self.capacity if isinstance(self.capacity, int) else None
        for option, value, low, high in (
            ("capacity", rows, 1, 2**48),
            ("headroom", self.headroom, 1, 2**40),
            ("slot-rows", self.slot_rows, 1, 2**24),
            ("depth", self.depth, 1, 1024),
            ("max-collectors", self.max_collectors, 1, 4096),
            ("max-learners", self.max_learners, 1, 4096),
            ("learning-starts", self.learning_starts, 0, 2**48),
            ("tolerance", self.tolerance, 0, 2**48),
            ("snapshot-keep", self.snapshot_keep, 1, 100_000),
            ("mailbox-bytes", self.mailbox_bytes, 0, 2**48),
        ):
            if value is not None and not low <= value <= high:
                raise InvalidRequest(f"--{option} {shown(value)}: {low} to {high} is right")
        if rows is not None and self.learning_starts > rows:
            raise InvalidRequest(f"--learning-starts {self.learning_starts:,} is above --capacity {rows:,}: learning would never start")
        if self.headroom is not None and self.slot_rows is not None and self.headroom < self.slot_rows:
            raise InvalidRequest(f"--headroom {self.headroom:,} is below --slot-rows {self.slot_rows:,}: no slot would ever fit")

    @property
    def lease_ns(self) -> int:
        return round(self.lease * 1e9)

    def report(self) -> dict[str, object]:
        """Every option a user may set, as JSON has it."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata["hidden"]}
        return {name: f"{value.n_bytes}B" if isinstance(value, Size) else _listed(value) for name, value in values.items()}

    def load_schema(self) -> Schema | None:
        """The schema of ``--schema FILE``, else that of the snapshot to restore.

        Raises SchemaMismatch naming the file, or the fields in which it is not the snapshot's.
        """
        saved = Manifest.load(Path(self.restore)).schema if self.restore is not None else None
        if self.schema is None:
            return saved
        try:
            schema = Schema.from_wire(json.loads(_read(self.schema, _MOST_SCHEMA_BYTES)))
        except (OSError, ValueError, RecursionError) as error:
            raise SchemaMismatch(f"--schema {self.schema}: {_why(error)}") from error
        different = saved.differences(schema) if saved is not None else ""
        if different:
            raise SchemaMismatch(f"--restore {self.restore} holds rows of another schema than --schema {self.schema}: {different}")
        return schema

    @classmethod
    def from_options(cls, options: dict[str, object], file: str | None = None) -> Self:
        """Defaults, then those of the snapshot to restore, then the TOML file's values, then ``options`` (texts as on the command line).

        ``restore`` becomes the path of the very snapshot, so that a newer one doesn't come between.
        """
        values = {**(_read_toml(file) if file else {}), **options}
        known = {f.name for f in fields(cls)}
        parsed: dict[str, Any] = {}
        for name, value in values.items():
            key = name.replace("-", "_") if isinstance(name, str) else ""
            if key not in known:
                raise InvalidRequest(f"there is no option {shown(name)}" + (f" (in {file})" if file and name not in options else ""))
            parsed[key] = _parse(key, value)
        defaults = cls()
        if parsed.get("restore") is not None:
            saved = newest(Path(parsed["restore"]))
            parsed["restore"] = str(saved.path)
            defaults = cls(**saved_options(saved))
        return replace(defaults, **parsed)

    def differences(self, saved: Manifest) -> list[str]:
        """What the snapshot was taken with and this server is not, one line each."""
        before = saved_options(saved)
        changed = [(name, value, getattr(self, name)) for name, value in before.items() if value != getattr(self, name)]
        return [f"{name.replace('_', '-')} is {_told(now)}, the snapshot's was {_told(value)}" for name, value, now in changed]


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def saved_options(saved: Manifest) -> dict[str, Any]:
    """A snapshot's options, as this server knows them. Raises InvalidRequest naming one that can't be."""
    found = {name: saved.options[name] for name in KEPT_OPTIONS if name in saved.options}
    return {name: value if value is None else _parse(name, value) for name, value in found.items()}


def _told(value: object) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else "none" if value is None else str(value)


def slot_rows_for(config: ServerConfig, lanes: int) -> int:
    """Rows of a collector's slots: whole steps of its lanes. Raises InvalidRequest when one step doesn't fit a fixed slot."""
    if config.slot_rows is None:
        return max(MIN_AUTO_SLOT_ROWS, lanes) // lanes * lanes
    if lanes > config.slot_rows:
        raise InvalidRequest(f"{lanes:,} lanes don't fit a slot (it holds whole steps): start the server with --slot-rows {lanes} or more")
    return config.slot_rows // lanes * lanes


def default_headroom(capacity: int, slot_rows: int) -> int:
    """Two slots, or an eighth of the capacity up to 131,072 rows if that is more: what commits while a lease is held."""
    return max(2 * slot_rows, min(capacity // 8, MAX_HEADROOM_ROWS))


def parse_size(text: str) -> int:
    """Bytes of ``512MiB``, ``40GB`` (powers of 1024 with i, of 1000 without) or a plain number."""
    if text.replace("_", "").isdigit():
        return int(text)
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is neither a plain number like 100_000 nor a size like 512MiB or 40GB")
    unit = match[2].lower()
    step: int = (1024 if "i" in unit else 1000) ** _UNITS[unit[0]]
    return int(match[1]) * step


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``10min``, ``2h``, ``1d`` or a plain number."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a time like 90s, 10min or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def number(text: str, kind: type[int] | type[float]) -> int | float:
    """Raises ValueError in the words of options, not of Python."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError("a whole number is right" if kind is int else "a number is right") from None


def _parse(key: str, value: object) -> object:
    try:
        return _parse_text(key, value) if isinstance(value, str) else _check_type(key, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"--{key.replace('_', '-')} {shown(value)}: {error}") from error


_INTS = {
    "snapshot_keep",
    "headroom",
    "slot_rows",
    "depth",
    "max_collectors",
    "max_learners",
    "learning_starts",
    "tolerance",
    "seed",
    "parent_pid",
}
_FLOATS = {"snapshot_every", "samples_per_insert", "lease", "return_gamma", "stall_after", "debug_copy_delay"}
_LISTS = {"columns", "moments", "finite"}


def _parse_text(key: str, text: str) -> object:
    if key == "capacity":
        return int(text) if text.replace("_", "").isdigit() else Size(parse_size(text))
    if key == "mailbox_bytes":
        return parse_size(text)
    if key == "snapshot_every":
        return parse_duration(text)
    if key == "slot_rows" and text == "auto":
        return None
    if key in _INTS or key in _FLOATS:
        return number(text, int if key in _INTS else float)
    if key in _LISTS:
        return tuple(part for part in text.split(",") if part)
    choices = next(f.metadata["choices"] for f in fields(ServerConfig) if f.name == key)
    if choices and text not in choices:
        raise ValueError(f"one of {', '.join(choices)}")
    return text


def _check_type(key: str, value: object) -> object:
    if key in _LISTS and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in _FLOATS and is_number:
        return float(value)  # type: ignore[arg-type]
    if key in _INTS | {"capacity", "mailbox_bytes"} and is_number and isinstance(value, int):
        return value
    raise TypeError(f"a {'number' if key in _FLOATS | _INTS else 'text'} is right, not {type(value).__name__}")


def _read_toml(file: str) -> dict[str, object]:
    try:
        text = _read(file, _MOST_CONFIG_BYTES)
        if any(line.count(".") > _MOST_DOTS for line in text.splitlines() if not line.lstrip().startswith("#")):
            raise ValueError("a key of too many parts")
        return tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no TOML, no UTF-8, or a number of too many digits
        raise InvalidRequest(f"--config {file}: {_why(error)}") from error


def _why(error: Exception) -> str:
    """Without the error's number and the file's name, which stands before it."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _read(file: str, most_bytes: int) -> str:
    """A text file of at most ``most_bytes``; raises OSError or ValueError."""
    with open(file, "rb") as opened:
        content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"longer than {most_bytes:,} bytes")
    return content.decode("utf-8")
