"""A finding: what one check saw, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """``warning``: it works, slower or with a risk. ``failure``: something the server needs is missing. ``skipped``: could not be tried."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """``found`` states facts with their numbers; ``remedy`` says what to do, and is empty only where nothing is."""

    verdict: Verdict
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    return Finding(Verdict.OK, found)


def warning(found: str, remedy: str) -> Finding:
    return Finding(Verdict.WARNING, found, remedy)


def failure(found: str, remedy: str) -> Finding:
    return Finding(Verdict.FAILURE, found, remedy)


def skipped(why: str, remedy: str = "") -> Finding:
    return Finding(Verdict.SKIPPED, why, remedy)
