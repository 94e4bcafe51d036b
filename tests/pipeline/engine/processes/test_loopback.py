"""Other hosts reach no socket of ranks that are all on one machine."""

from __future__ import annotations

import os

import pytest

from autosplit.pipeline.engine.default_group import on_loopback
from tests.pipeline.engine.processes import sockets


def test_a_socket_that_other_hosts_reach_is_seen() -> None:
    assert [*map(sockets.loopback, ["127.0.0.1:1", "0.0.0.0:1", "10.1.2.3:1"])] == [True] + [
        False
    ] * 2


def test_an_interface_that_the_user_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with on_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
        assert os.environ["NCCL_SOCKET_IFNAME"].startswith("=lo")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
