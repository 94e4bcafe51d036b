"""The option that has tests run on another device than the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests import conftest, devices
from tests.by_folder import by_folder
from tests.interpreters import printed_by

WHERE = "import tests, torch; print(torch.empty(1).device)"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tpu", "--device tpu: no such device; known: cpu, cuda, fake"),
        ("cuda", r"--device cuda: torch \S+ finds no CUDA device here; run it where nvidia-smi"),
    ],
)
def test_devices_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = devices.chosen()
    with pytest.raises(pytest.UsageError, match=said):
        conftest.pytest_configure(Mock(getoption=lambda option: name))
    assert devices.chosen() == before


def test_processes_that_tests_start_use_the_device() -> None:
    assert printed_by(WHERE, environment={devices.VARIABLE: "meta"}) == "meta\n"
    assert printed_by(WHERE, environment={devices.VARIABLE: "cpu"}) == "cpu\n"


def test_ranks_without_a_device_each_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.VARIABLE, "cpu")
    devices.need(99)
    monkeypatch.setenv(devices.VARIABLE, "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    devices.need(1)
    with pytest.raises(pytest.skip.Exception, match="needs 2 devices, there is 1 cuda"):
        devices.need(2)


def test_tests_about_cpus_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    named = [*devices.ABOUT_CPUS, *devices.NOT_HERE]
    assert [name for name in named if not (here / name).exists()] == []
    for device, there in (("cpu", None), ("cuda", None), ("fake", "Inductor has no code")):
        monkeypatch.setenv(devices.VARIABLE, device)
        why = devices.why_not(Path("backends/test_inductor.py"))
        assert why is None if there is None else why is not None and there in why
        assert (devices.why_not(Path("cli/test_cli.py")) is None) == (device == "cpu")


def test_the_table_counts_by_folder() -> None:
    names = ("tests/mesh/test_a.py::test_x[1]", "tests/mesh/deep/test_b.py::test_y")
    one, two = (SimpleNamespace(nodeid=name) for name in names)
    face = SimpleNamespace(nodeid="tests/test_stage.py::test_z")
    found = by_folder({"passed": [one, face], "failed": [two], "warnings": [one]})
    lines = [line.split() for line in found.splitlines()]
    assert lines[2:] == [
        ["mesh", "1", "1", "0", "0"],
        ["test_stage.py", "1", "0", "0", "0"],
        ["all", "2", "1", "0", "0"],
    ]
