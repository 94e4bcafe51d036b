"""Ranks save and load together or not at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from autosplit import PipelineError
from autosplit.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from tests.all_true import assert_all
from tests.checkpoint import rank_workers
from tests.checkpoint.checkpoint_workers import dropping, named, train, trainer, whole
from tests.checkpoint.forms import state
from tests.checkpoint.test_resume import by_group
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def two(
    on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    wrong = {name: value for name, value in state().items() if name != "4.running_var"}
    torch.save({**wrong, "1.0.bias": torch.zeros(3), "more": torch.zeros(2)}, folder / "wrong.pt")
    return folder, on_ranks(rank_workers.two, 2, (str(folder),), timeout=100)


def test_training_goes_on_under_another_number_of_stages(two: Any) -> None:
    """2 stages, then 4, then 2 again, against 2 all along; and in one process."""
    for rank in two[1]:
        losses = rank["cut otherwise"].pop("after")
        assert_all(rank["cut otherwise"])
    with trainer(whole(9), 1, ranks=1) as engine:
        load_checkpoint(engine, two[0] / "4", optimizer=True)
        assert torch.equal(train(engine, 4, 6), losses)


def test_tied_parameters_are_written_under_all_names_by_one_rank(two: Any) -> None:
    tensors = read_checkpoint(two[0] / "2")
    assert {"0.weight", "5.weight"} <= tensors.keys()
    assert tensors.keys() == whole().state_dict().keys()
    written = dcp.FileSystemReader(two[0] / "2").read_metadata()
    entries = written.state_dict_metadata.values()
    assert all(len(getattr(entry, "chunks", [0])) == 1 for entry in entries)


def test_a_resumed_run_is_bit_for_bit_the_same_on_as_many_ranks(two: Any) -> None:
    for rank in two[1]:
        assert_all(rank["resumed"])


def test_it_goes_on_on_one_rank(two: Any) -> None:
    with trainer(dropping(5), 3, ranks=1) as engine:
        scheduler = by_group(engine.optimizer)
        loaded = load_checkpoint(engine, two[0] / "run", scheduler=scheduler)
        assert (loaded.step, loaded.generators) == (2, "seeded")
        assert scheduler.last_epoch == 2
        read = read_checkpoint(two[0] / "run")
        assert all(torch.equal(value, read[name]) for name, value in named(engine).items())


def test_what_fails_on_one_rank_is_told_on_all(two: Any) -> None:
    for rank in two[1]:
        found = rank["refusals"]
        assert found["full disk"].startswith("cannot write to")
        assert "rank 1: " in found["full disk"]
        assert found["other steps"] == "the ranks are at different steps: [0, 1]"
        assert "the ranks save to different folders" in found["other folders"]
        assert "rank 1 sees another checkpoint at" in found["two checkpoints"]
        assert found["damaged"].startswith("rank 1: ")
        assert "__1_0.distcp is damaged" in found["damaged"]
        assert "4.running_var: expected [8], is missing" in found["wrong"]
        assert "1.0.bias: expected [8], came [3]" in found["wrong"]
        assert "more: the model has no such tensor" in found["wrong"]


def test_a_failed_save_keeps_the_old_checkpoint(two: Any) -> None:
    assert all(rank["refusals"]["old one"] for rank in two[1])
    assert len([*(two[0] / "it").glob("save-*")]) == 1
    assert not [*two[0].glob(".*")]


def test_a_checkpoint_that_one_rank_finds_damaged_is_loaded_on_none(two: Any) -> None:
    assert all(rank["refusals"]["unchanged"] for rank in two[1])


def test_a_rank_that_is_killed_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, on_ranks: Ranks
) -> None:
    path = tmp_path / "it"
    started = time.monotonic()
    with pytest.raises(PipelineError, match="rank 1"):
        on_ranks(rank_workers.killed, 2, (str(path),), timeout=100)
    assert time.monotonic() - started < 60
    assert len([*path.glob("save-*")]) == 2  # the old one's files, and what the killed one left
    expected = dropping(0).state_dict()
    read = read_checkpoint(path)
    assert all(torch.equal(value, read[name]) for name, value in expected.items())
    with trainer(dropping(5), 2, ranks=1) as engine:
        assert load_checkpoint(engine, path).step == 1
        save_checkpoint(engine, path, step=3)
        assert load_checkpoint(engine, path).step == 3
    assert len([*path.glob("save-*")]) == 1
