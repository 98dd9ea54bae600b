"""Arrays from a learner to collectors: whole versions only, the newest wins, bits as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from replay_server_client import BudgetExceeded, Collector, InvalidRequest, Learner, Schema
from support.mail import wait_mail
from support.reports import report_of, wait_report
from support.servers import ServerProcess

SCHEMA = Schema.of(mark="int64")


def test_every_dtype_and_shape_arrives_bit_by_bit(server: ServerProcess) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, npt.NDArray[Any]] = {
        "weight": rng.normal(size=(17, 5)).astype(np.float32),
        "half": rng.normal(size=9).astype(np.float16),
        "count": np.array(7, np.int64),
        "flags": np.array([True, False, True]),
        "empty": np.zeros((0, 4), np.float64),
        "turned": rng.normal(size=(4, 6)).T,
    }
    brain = torch.randn(3, 3).to(torch.bfloat16)
    with (
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner,
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
    ):
        assert collector.latest("policy") is None
        assert learner.post("policy", {**arrays, "brain": brain}) == 1
        version, found = wait_mail(collector)
        assert version == 1
        assert set(found) == {*arrays, "brain"}
        for name, array in arrays.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tobytes() == array.tobytes()
        assert found["brain"].tobytes() == brain.view(torch.uint16).numpy().tobytes()
        assert collector.latest("policy", newer_than=1) is None


def test_versions_seen_while_they_are_posted_are_whole_and_rise(server: ServerProcess) -> None:
    posts = 60
    with (
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner,
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
    ):

        def post() -> None:
            for version in range(1, posts + 1):
                assert learner.post("policy", {"w": np.full(20_000, version), "b": np.full(3, version)}) == version

        poster = threading.Thread(target=post)
        poster.start()
        seen = 0
        while seen < posts:
            mail = collector.latest("policy", newer_than=seen)
            if mail is not None:
                assert mail[0] > seen
                seen = mail[0]
                assert (mail[1]["w"] == seen).all()
                assert (mail[1]["b"] == seen).all()
        poster.join()
    report = wait_report(server, lambda found: not found["learners"])
    assert report["mailboxes"]["versions"] == {"policy": posts}
    assert report["mailboxes"]["host_bytes"] < 200_000, "only the newest version is kept"


def test_every_reader_gets_the_newest_version_of_each_box(server: ServerProcess) -> None:
    with (
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner,
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as one,
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as two,
    ):
        for version in (1, 2, 3):
            learner.post("policy", {"w": np.array([version])})
        learner.post("scale", {"s": np.array([9])})
        for collector in (one, two):
            for name, expected in (("policy", (3, "w", 3)), ("scale", (1, "s", 9))):
                mail = collector.latest(name)
                assert mail is not None
                assert (mail[0], mail[1][expected[1]].tolist()) == (expected[0], [expected[2]])


def test_what_can_not_be_posted_is_refused_by_name_and_changes_nothing(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--mailbox-bytes", "64KiB")
    with Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner:
        with pytest.raises(InvalidRequest, match="words"):
            learner.post("policy", {"words": np.array(["a", "b"])})
        with pytest.raises(InvalidRequest, match="mailbox"):
            learner.post("policy", {})
        with pytest.raises(BudgetExceeded, match="policy"):
            learner.post("policy", {"w": np.zeros(100_000)})
        assert report_of(server)["mailboxes"] == {"host_bytes": 0, "versions": {}}
        assert learner.post("policy", {"w": np.zeros(10)}) == 1
