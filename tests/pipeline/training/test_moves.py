"""Schedules that move what microbatches hold come to the same as those that do not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.host_store import HostFileStore
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.training import moving_workers
from tests.pipeline.training.moving import evicting, offloading, recomputing
from tests.pipeline.workers import WIDTH, data, trainer
from tests.ranks import Ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(on_ranks: Ranks) -> Results:
    return on_ranks(moving_workers.two_ranks, 2, timeout=120)


CASES = (
    "offload",
    "offload awaited",
    "evict awaited",
    "evict both ways",
    "evict in part",
    "recompute and offload",
    "whole backward",
    "chunks evicted",
    "tied",
    "frozen",
)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bit_for_bit(two: Results, case: str) -> None:
    assert [found[case] for found in two] == ["the same"] * 2


def test_four_ranks(on_ranks: Ranks) -> None:
    for found in on_ranks(moving_workers.four_ranks, 4, timeout=90):
        assert set(found.values()) == {"the same"}, found


def test_moves_are_on_the_timeline(two: Results) -> None:
    moves, same = two[0]["recorded"]
    kinds = [("0", "EVICT"), ("0", "LOAD"), ("1", "ACCEPT"), ("1", "RETURN")]
    schedule = evicting(build("gpipe", 2, 3))
    rows = [(rank, action) for rank, row in enumerate(schedule.ranks) for action in row]
    expected = sorted(f"{rank} {a}" for rank, a in rows if (str(rank), a.kind.value) in kinds)
    assert [name for name, _ in moves] == expected
    assert all(ordered for _, ordered in moves)
    assert same


def test_a_storage_travels_once_and_no_parameter_does(two: Results) -> None:
    """Nor does the batch, of which the microbatches are parts: all that its rows make travels."""
    sent, returned = (found["travelled"] for found in two)
    assert [*sent.values()] == [*returned.values()]
    assert [name.split()[0] for name in sent] == ["0EVICT0", "0EVICT1", "0EVICT2"]
    wide, narrow = 4 * 4 * 18, 4 * 18  # of float32: a layer of 4 rows, a statistic
    for storages, distinct, size in sent.values():
        assert storages == distinct
        assert size % narrow == 0
        assert 4 * wide <= size < 5 * wide


def test_what_moves_cost_is_measured_in_steps(two: Results) -> None:
    """The same on both ranks, as both search with it."""
    (link, moves), refused = two[0]["costs"]
    assert two[1]["costs"] == two[0]["costs"]
    assert link.bandwidth > 0
    assert 0 < moves.leave < 1
    assert 0 < moves.come < 1
    assert moves.slowing >= 0
    assert refused == "no rank has a store that could be measured: nothing is offloaded"


def test_all_in_one_process() -> None:
    for schedule in (build("gpipe", 2, 4, ranks=1), build("zb-v", 4, 4, ranks=1)):
        assert moving_workers.same(schedule, offloading, ranks=1) == "the same"


def test_a_limit_of_memory_changes_no_result_and_one_of_no_use_is_refused(on_ranks: Ranks) -> None:
    one, other = on_ranks(moving_workers.limited, 2, timeout=120)
    assert one == other
    found = one["layers"]
    assert found["same"]
    assert found["plain"] > found["limit"] >= max(found["predicted"]), found
    # What transfers bring within an action counts beside the most of its own: a storage at most.
    assert max(found["held"]) <= found["limit"] + 32 * 3 * WIDTH * 4, found
    assert "memory_limit: nothing was found that keeps 1,024 bytes; the least" in one["below"][1]
    assert "expected memory_limit such as 80GiB" in one["unit"][1]
    assert "memory_limit searches a schedule with one copy of the stages" in one["whole"][1]


@pytest.fixture(scope="module")
def faults(
    on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, tuple[str, str]]]:
    folder = tmp_path_factory.mktemp("store")
    return on_ranks(moving_workers.faults, 2, (folder,), timeout=90)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "full",
            r"rank 0 failed in 0OFFLOAD\d: PipelineError: .* offloaded to a file in .*No space",
        ),
        (
            "lost",
            r"rank 0 failed in 0RELOAD\d: PipelineError: what was offloaded .* is lost: Input",
        ),
        ("cut short", r"rank \d failed in \dRELOAD\d: .* is lost: only 0 of [\d,]+ bytes are left"),
        ("no folder", r"no file for offloaded tensors can be made in .*missing"),
        ("no effect", r"store='.*' has no effect: schedule 'gpipe' offloads nothing"),
    ],
)
def test_every_rank_hears_what_became_of_a_store(
    faults: list[dict[str, tuple[str, str]]], case: str, said: str
) -> None:
    for found in faults:
        kind, text = found[case]
        assert kind in ("RankError", "OutputError", "PipelineError")
        with pytest.raises(PipelineError, match=said):
            raise PipelineError(text)


def test_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    put = HostFileStore.put

    def put_late(store: HostFileStore, data: Tensor) -> Any:
        time.sleep(0.3)
        return put(store, data)

    monkeypatch.setattr(HostFileStore, "put", put_late)
    schedule = offloading(build("gpipe", 2, 4, ranks=1))
    with trainer(
        moving_workers.layers, 2, schedule=schedule, ranks=1, stage_factory=None, timeout=0.1
    ) as engine:
        with pytest.raises(PipelineError, match="rank 0 failed in 0OFFLOAD0") as caught:
            engine.step(data(16))
        said = "the store on this host has had 0.1 s for 0OFFLOAD0: it hangs, or needs a longer"
        assert said in str(caught.value)


def test_a_partner_that_dies_with_what_it_holds(tmp_path: Path, on_ranks: Ranks) -> None:
    how = "rank 1 (was killed by SIGKILL|ended without a word)"  # the latter once it is reaped
    with pytest.raises(PipelineError, match=how):
        on_ranks(moving_workers.partner_dies, 2, (tmp_path,), timeout=60)
    with pytest.raises(PipelineError, match=f"^RankError {how}"):
        raise PipelineError((tmp_path / "heard").read_text())
    assert on_ranks(moving_workers.resumed, 2, (tmp_path,), timeout=60) == [True, True]


def test_a_store_that_fails_within_a_limit_loses_nothing(tmp_path: Path, on_ranks: Ranks) -> None:
    """Every rank ends with the cause, and a run from the last checkpoint goes on, bit for bit."""
    causes = {
        "full": r"rank 0 failed in 0OFFLOAD\d: .* cannot be offloaded .* No space left on",
        "slow": "nothing",
    }
    for found in on_ranks(moving_workers.restarted, 2, (tmp_path,), timeout=120):
        assert list(found) == list(causes)
        for name, (heard, same) in found.items():
            with pytest.raises(PipelineError, match=causes[name]):
                raise PipelineError(heard)
            assert same, name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (offloading, "0OFFLOAD0 is scheduled, but what stage 0 holds cannot be moved"),
        (recomputing, "0F0 is to run with a RECOMPUTE, but stage 0 cannot run its forward again"),
    ],
)
def test_stages_of_others_that_cannot(change: Any, said: str) -> None:
    schedule = change(build("gpipe", 2, 4, ranks=1))
    with (
        trainer(stages=2, schedule=schedule, ranks=1, stage_factory=ReferenceStage) as engine,
        pytest.raises(PipelineError, match=said),
    ):
        engine.step(data(8))
