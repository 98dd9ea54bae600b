"""What a learner asks for is checked where it is said: every wrong argument is refused by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from replay_server_client.request import Request, check_exponent
from replay_server_protocol.errors import InvalidRequest

NAN, INF = float("nan"), float("inf")
NO_COUNT: tuple[Any, ...] = (-1, 1.0, True, None, "2", np.float32(3), 2**63)
NO_NUMBER: tuple[Any, ...] = (NAN, INF, -INF, -0.1, True, "0.5", None)
WINDOW: dict[str, Any] = {"length": 8, "burn_in": 0, "stride": 1, "crosses_episodes": False}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", (0, *NO_COUNT)),
        ("n_step", (0, *NO_COUNT)),
        ("gamma", (1.1, *NO_NUMBER)),
        ("by", ("priorities", "", None, 1, ["priority"])),
        ("max_age_rows", (0, *(value for value in NO_COUNT if value is not None))),
        ("half_life_rows", (0, 0.0, *(value for value in NO_NUMBER if value is not None))),
        ("strict", (1, None, "yes")),
    ],
)
def test_every_wrong_argument_of_transitions_is_refused_by_name(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=f"^{name}="):
            Request.transitions(**{"n": 8, name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", (0, *NO_COUNT)),
        ("length", (0, *NO_COUNT)),
        ("burn_in", (8, 9, *NO_COUNT)),
        ("stride", (0, *NO_COUNT)),
        ("crosses_episodes", (1, None, "no")),
        ("by", ("recent",)),
        ("max_age_rows", (0,)),
        ("half_life_rows", (-1.0,)),
        ("strict", (0,)),
    ],
)
def test_every_wrong_argument_of_sequences_is_refused_by_name(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=f"^{name}="):
            Request.sequences(**{"n": 8, **WINDOW, name: value})


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_an_exponent_is_a_finite_number_of_at_least_0(name: str) -> None:
    for value in NO_NUMBER:
        with pytest.raises(InvalidRequest, match=f"^{name}="):
            check_exponent(name, value)
    assert check_exponent(name, 0) == 0.0
    assert check_exponent(name, 1) == 1.0


def test_alpha_is_at_most_2() -> None:
    """The square of the largest priority is the largest power that float32 holds for sure."""
    assert check_exponent("alpha", 2) == 2.0
    with pytest.raises(InvalidRequest, match=r"^alpha=2\.01"):
        check_exponent("alpha", 2.01)


def test_an_argument_that_no_request_has_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^n_steps: no argument"):
        Request.transitions(8, n_steps=3)  # type: ignore[call-arg]


def test_requests_that_ask_for_the_same_are_equal_whatever_way_it_was_said() -> None:
    assert Request.transitions(8) == Request.transitions(8, n_step=1, gamma=0.99, by="uniform", max_age_rows=None, strict=False)
    assert Request.transitions(8, gamma=1) == Request.transitions(8, gamma=1.0)
    assert Request.transitions(8, half_life_rows=5) == Request.transitions(8, half_life_rows=5.0)


def test_requests_that_differ_in_anything_have_samplers_of_their_own() -> None:
    options: list[dict[str, Any]] = [{"n_step": 3}, {"gamma": 0.9}, {"by": "priority"}]
    options += [{"max_age_rows": 4}, {"half_life_rows": 4.0}, {"strict": True}]
    transitions = [Request.transitions(8, **option) for option in options]
    changes: list[dict[str, Any]] = [{"length": 9}, {"burn_in": 1}, {"stride": 2}, {"crosses_episodes": True}, {}]
    sequences = [Request.sequences(8, **{**WINDOW, **change}) for change in changes]
    assert len({Request.transitions(8), Request.transitions(9), *transitions, *sequences}) == 2 + len(transitions) + len(sequences)


def test_rows_and_shape_are_those_of_the_fields() -> None:
    transitions, sequences = Request.transitions(8, n_step=3), Request.sequences(8, **{**WINDOW, "length": 1})
    assert (transitions.rows, transitions.shape, transitions.is_one_step, transitions.follows_links) == (8, (8,), False, True)
    assert (sequences.rows, sequences.shape, sequences.is_one_step, sequences.follows_links) == (8, (8, 1), False, True)
    assert Request.sequences(8, **WINDOW).rows == 64
    assert Request.transitions(8).is_one_step
    assert not Request.transitions(8).follows_links
