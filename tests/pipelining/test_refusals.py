"""Steps that cannot be: an error on every rank, before the first microbatch."""

from __future__ import annotations

import re

import pytest
from torch.distributed.pipelining import PipelineStage

from autosplit.errors import PipelineError
from autosplit.pipelining import SplitPipelineStage
from autosplit.torch_internals import version
from autosplit.torch_internals.pipelining import versions
from tests.pipelining.refusal_workers import all_refusals
from tests.ranks import Ranks

Refusals = list[dict[str, tuple[str, str]]]

ON_BOTH = {
    "too_few_stages": "PipelineError: the process group has 2 ranks for 1 stages: a rank would",
    "no_such_stage": "PipelineError: expected a stage_index from 0 to 1 of num_stages=2, got 2",
    "an_argument_in_the_place_of_the_group": "PipelineError: group must be a ProcessGroup or None",
    "more_stages_than_ranks": "PipelineError: Schedule1F1B runs one stage a rank: 4 stages need a",
    "a_loop_for_a_v": "PipelineError: ScheduleZBVZeroBubble has stages .* which was given",
    "a_compiled_module": "PipelineError: stage .: the module is compiled by torch.compile, which",
    "losses_of_samples": "PipelineError: stage 0 is the last one: .* a tensor of shape .2.; take",
    "two_copies_of_the_stages": "ScheduleError: 'dualpipe' runs two copies of its stages, and",
    "stages_of_another_rank": "ScheduleError: 'zb-v' has stages .* on rank .*, which was given",
}
ON_ONE = {
    "outputs_that_do_not_fit": (
        1, "PipelineError: stage 1 .Sequential. cannot be called with what stage 0 hands on, "
        "float32.2, 4., keyword arguments last",
    ),
    "outputs_unlike_the_examples": (
        1, "PipelineError: stage 1 .Sequential.: output_args says float32.2, 5., but the module "
        "returns float32.2, 4.",
    ),
    "inputs_unlike_the_examples": (
        0, "PipelineError: stage 0 .Sequential.: input_args says float32.3, 4., but what comes in",
    ),
    "graph_breaks": (
        0, r"CaptureError: stage 0 .Broken. must be one graph: .*refusal_workers.py:\d+"
        r".*dw_builder=autosplit.pipelining.dw_builder\(module\)",
    ),
    "a_number_for_the_next_stage": (
        0, r"CaptureError: stage 0 .Number. returns output.1., which is not a tensor",
    ),
    "a_step_without_inputs": (
        0, r"PipelineError: stage 0 .Sequential. takes \(input\): missing a required argument: "
        r"'input'; step\(\) was given 0 positional",
    ),
    "complex_numbers_for_the_next_stage": (
        0, r"CaptureError: stage 0 .Spectrum. returns output, a complex tensor that needs a grad",
    ),
}  # fmt: skip


pytestmark = pytest.mark.skipif(
    version.TORCH not in versions.SUPPORTED, reason="another torch.distributed.pipelining"
)


@pytest.fixture(scope="module")
def ranks(on_ranks: Ranks) -> Refusals:
    return on_ranks(all_refusals, 2, timeout=120)


@pytest.mark.parametrize("case", ON_BOTH)
def test_every_rank_finds_it(ranks: Refusals, case: str) -> None:
    for found in ranks:
        assert re.match(ON_BOTH[case], ": ".join(found[case]))


@pytest.mark.parametrize("case", ON_ONE)
def test_one_rank_finds_it_and_the_other_is_told(ranks: Refusals, case: str) -> None:
    rank, text = ON_ONE[case]
    mine, other = ranks[rank][case], ranks[1 - rank][case]
    assert re.match(text, ": ".join(mine), re.DOTALL)
    assert other == ("NeighbourError", f"stage {rank} failed: {': '.join(mine)}")


def test_a_batch_of_another_size(ranks: Refusals) -> None:
    kind, text = ranks[0]["a_batch_of_another_size"]
    assert kind == "PipelineError"
    assert "microbatch 0 has the outputs float32[3, 4], but the next stage was told to" in text


def test_the_advice_about_graph_breaks_works(ranks: Refusals) -> None:
    assert [found["advice"][1] for found in ranks] == ["", ""]


def test_the_advice_about_complex_numbers_works(ranks: Refusals) -> None:
    assert [found["pairs"][1] for found in ranks] == ["", ""]


def test_no_process_group() -> None:
    with pytest.raises(PipelineError, match=r"needs a process group: call torch.distributed.init"):
        SplitPipelineStage(None, 0, 1, "cpu")  # type: ignore[arg-type]


def test_a_torch_whose_private_names_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moved(PipelineStage):
        def forward_one_chunk(self, chunk: int) -> None:  # type: ignore[override]
            pass

    with pytest.raises(PipelineError, match=r"here, torch 2.13 and 2.14: expected PipelineStage.f"):
        versions.check_names(Moved)
    monkeypatch.setattr(version, "TORCH", (2, 16))
    with pytest.raises(PipelineError, match=r"expected one of these versions. Install one of them"):
        versions.check_names()
