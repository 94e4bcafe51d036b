"""The file that takes what a rank offloads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from autosplit.errors import OutputError, PipelineError
from autosplit.pipeline.engine.offload_target import (
    OffloadFile,
    measure_offload,
    open_offload_target,
)


def _bytes(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def _taken(store: OffloadFile, ticket: Any) -> torch.Tensor:
    data = torch.empty(ticket.size, dtype=torch.uint8)
    store.take(ticket, data)
    return data


def test_bytes_come_back(tmp_path: Path) -> None:
    store = OffloadFile(tmp_path)
    tickets = [store.put(_bytes(size, size % 251)) for size in (1, 7, 4096, 100_003)]
    for ticket, size in reversed([*zip(tickets, (1, 7, 4096, 100_003), strict=True)]):
        data = _taken(store, ticket)
        assert torch.equal(data, _bytes(size, size % 251))
        assert data.untyped_storage().resizable()  # so that it can be moved again


def test_the_file_has_no_name_and_does_not_grow_from_step_to_step(tmp_path: Path) -> None:
    store = OffloadFile(tmp_path)
    for step in range(5):
        first = store.put(_bytes(1000 + step, 1))
        second = store.put(_bytes(3000, 2))
        _taken(store, second)
        third = store.put(_bytes(3000, 3))
        assert torch.equal(_taken(store, first), _bytes(1000 + step, 1))
        assert torch.equal(_taken(store, third), _bytes(3000, 3))
        assert os.fstat(store._file).st_size <= 2**10 + 2**12
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_a_truncated_file_are_lost(tmp_path: Path) -> None:
    store = OffloadFile(tmp_path)
    ticket = store.put(_bytes(1000, 1))
    os.ftruncate(store._file, 400)
    with pytest.raises(PipelineError, match="are lost: only 400 of 1,000 bytes are left"):
        _taken(store, ticket)


def test_no_file_where_none_can_be(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "missing", tmp_path / "taken"):
        with pytest.raises(
            OutputError, match=r"no file for offloaded tensors can be created in .*name"
        ):
            OffloadFile(folder)
    with pytest.raises(
        PipelineError, match=r"store=.x. is for stages on the CPU; stages on cuda:0"
    ):
        open_offload_target(torch.device("cuda", 0), "x")


def test_a_store_is_measured(tmp_path: Path) -> None:
    store = OffloadFile(tmp_path)
    assert measure_offload(store).bandwidth > 0
    assert os.fstat(store._file).st_size < 2**25
