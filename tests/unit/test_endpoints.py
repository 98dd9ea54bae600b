from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server_protocol.endpoints import NAME_VARIABLE, RUN_DIR_VARIABLE, Endpoints, check_name
from replay_server_protocol.errors import InvalidRequest


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (NAME_VARIABLE, RUN_DIR_VARIABLE, "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)


def test_without_anything_given_the_run_directory_is_the_users_own_in_the_temporary_folder() -> None:
    endpoints = Endpoints.resolve()
    assert endpoints.name == "default"
    assert endpoints.run_dir == Path(tempfile.gettempdir()) / f"replay-server-{os.getuid()}"


def test_argument_wins_over_variable_and_variable_over_runtime_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Endpoints.resolve().run_dir == Path("/run/user/7/replay-server")
    monkeypatch.setenv(RUN_DIR_VARIABLE, "/run/variable")
    monkeypatch.setenv(NAME_VARIABLE, "from-variable")
    assert Endpoints.resolve() == Endpoints(Path("/run/variable"), "from-variable")
    assert Endpoints.resolve("mine", "/run/argument") == Endpoints(Path("/run/argument"), "mine")


def test_relative_and_home_paths_become_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Endpoints.resolve(run_dir="runs").run_dir == Path.cwd() / "runs"
    assert Endpoints.resolve(run_dir="~/runs").run_dir == Path("/home/somebody/runs")


def test_all_paths_carry_the_name_and_differ() -> None:
    endpoints = Endpoints.resolve("a", "/run/x")
    paths = [endpoints.control_path, endpoints.status_path, endpoints.lock_path, endpoints.learners_path]
    assert [str(path) for path in paths] == ["/run/x/a.control", "/run/x/a.status", "/run/x/a.lock", "/run/x/a.learners"]
    assert (endpoints.control, endpoints.status) == ("ipc:///run/x/a.control", "ipc:///run/x/a.status")


def test_longest_socket_path_is_accepted_and_one_byte_more_refused_with_both_numbers() -> None:
    folder = "/" + "d" * (103 - len("/") - len("/n.control"))
    assert len(str(Endpoints.resolve("n", folder).control_path)) == 103
    with pytest.raises(InvalidRequest, match=r"103 bytes, this one has 104.*--run-dir") as refusal:
        Endpoints.resolve("n", folder + "d")
    assert refusal.value.details == {"bytes": 104, "limit_bytes": 103}


def test_path_length_is_counted_in_bytes() -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        Endpoints.resolve("n", "/" + "ü" * 60)


@pytest.mark.parametrize("name", ["a", "A9", "rank0", "a.b-c_d", "9", "x" * 32])
def test_name_that_can_stand_in_a_path_is_returned(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "_a", "a/b", "a b", "a\n", "ä", "x" * 33, "a\0", 3])
def test_other_names_are_refused_by_what_they_are(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"collector name .*: letters, digits"):
        check_name(name, "collector name")


@given(st.text(max_size=40))
def test_accepted_name_never_leaves_its_folder(name: str) -> None:
    try:
        endpoints = Endpoints.resolve(name or "default", "/run/x")
    except InvalidRequest:
        return
    assert endpoints.control_path.parent == endpoints.control_path.resolve().parent == Path("/run/x").resolve()
