"""Steps that cannot be: an error on every rank, before the first microbatch."""

from __future__ import annotations

import re

import pytest
from torch.distributed.pipelining import _utils

from autosplit.errors import PipelineError
from autosplit.pipelining import SplitPipelineStage
from autosplit.torch_internals.pipelining_stage import StageShapeError
from tests.pipelining.refusal_workers import all_refusals
from tests.ranks import Ranks

Refusals = list[dict[str, tuple[str, str]]]

ON_BOTH = {
    "too_few_stages": "RuntimeError: Pipeline group size 2 cannot be larger than",
    "no_such_stage": "ValueError: Stage index 2 is out of range of 2",
    "an_argument_in_the_place_of_the_group": "PipelineError: group must be a ProcessGroup of",
    "more_stages_than_ranks": "PipelineError: Schedule1F1B runs one stage a rank: 4 stages need a",
    "a_loop_for_a_v": "PipelineError: ScheduleZBVZeroBubble has stages .* which was given",
    "a_compiled_module": "PipelineError: stage .: the module is compiled by torch.compile, which",
    "losses_of_samples": "RuntimeError: grad can be implicitly created only for scalar outputs",
    "stages_of_another_rank": "ScheduleError: 'zb-v' has stages .* on rank .*, which was given",
    "a_builder_of_runners": "PipelineError: SplitPipelineStage takes no dw_builder: it runs W",
    "an_unknown_argument": r"TypeError: SplitPipelineStage.__init__\(\) got an unexpected keyword",
    "a_stage_without_a_schedule": "PipelineError: stage 0 knows no microbatch 0: it has agreed on",
    "a_context_of_forwards": "PipelineError: stage 0 takes no forward context: it runs graphs",
    "integers_for_a_linear_layer": "PipelineError: F of microbatch 0 of stage 0 .Seq.* failed:",
}
ON_ONE = {
    "outputs_that_do_not_fit": (
        1, "PipelineError: stage 1 .Sequential. cannot be called with float32.2, 4.: .*a and b "
        "must have same reduction dim, but got .2, 4. X .5, 5.",
    ),
    "graph_breaks": (
        0, r"CaptureError: stage 0 .Broken. must be one graph: .*refusal_workers.py:\d+"
        r".*dw_builder=autosplit.pipelining.dw_builder\(module\)",
    ),
    "a_number_for_the_next_stage": (
        0, r"CaptureError: stage 0 .Number. returns output.1., which is not a tensor",
    ),
    "a_step_without_inputs": (
        0, r"PipelineError: step\(\) was given no inputs on the rank of stage 0 .Sequential., "
        r"whose forward takes \(input\): on this rank call schedule.step\(batch, ...\)",
    ),
    "a_step_without_a_target": (
        1, r"PipelineError: step\(\) was given no target on the rank of stage 1, the last one",
    ),
    "inputs_that_an_operator_refuses": (
        0, "PipelineError: stage 0 .Sequential. cannot be called with float32.2, 5. without grad",
    ),
    "a_forward_that_raises": (1, "ValueError: four features, got 4$"),
    "an_evaluation_whose_last_stage_raises": (1, "ValueError: four features, got 4$"),
    "complex_numbers_for_the_next_stage": (
        0, r"CaptureError: stage 0 .Spectrum. returns output, a complex tensor that needs a grad",
    ),
}  # fmt: skip

FAILURES = {
    "a_batch_of_another_size": (
        0, "StageShapeError: stage 0 .Sequential.: microbatch 0 has the outputs float32.3, 4., but",
    ),
    "a_loss_that_raises_later": (1, "ValueError: loss 2$"),
    "a_forward_that_raises_later": (1, "ValueError: it is told to$"),
}  # fmt: skip


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


@pytest.mark.parametrize("case", FAILURES)
def test_a_rank_that_fails_in_a_step_ends_it_on_every_rank(ranks: Refusals, case: str) -> None:
    """Its neighbours are waiting for it then; torch's own stage leaves them there."""
    rank, text = FAILURES[case]
    mine, other = ranks[rank][case], ranks[1 - rank][case]
    assert re.match(text, ": ".join(mine))
    assert other[0] == "RankError"
    assert other[1].startswith(f"rank {rank} failed in a step of Schedule1F1B: {': '.join(mine)}\n")
    assert "Traceback (most recent call last)" in other[1]


def test_a_rank_that_fails_ends_what_others_wait_for(ranks: Refusals) -> None:
    """Torch's runtime (2.15) waits for its sends before the error comes out of it."""
    mine, other = (ranks[at]["a_loss_that_raises_under_a_list_of_actions"] for at in (1, 0))
    assert mine == ("ValueError", "no loss")
    assert other[0] == "RankError"


def test_stages_of_torchs_own_are_refused_beside_ours(ranks: Refusals) -> None:
    for case in ("a_stage_of_torchs_own", "stages_of_both_kinds_on_a_rank"):
        kind, text = ranks[0][case]
        assert kind in ("PipelineError", "RankError")
        assert "has stages of torch's own beside SplitPipelineStage, on this rank or on" in text
        assert ranks[1][case][0] != "nothing"


def test_a_schedule_that_has_ended_says_why(ranks: Refusals) -> None:
    for found in ranks:
        kind, text = found["a_step_after_that"]
        assert kind == "PipelineError"
        assert text.startswith("Schedule1F1B has ended, as rank 1 failed in a step of Schedule1F1B")


def test_the_advice_about_graph_breaks_works(ranks: Refusals) -> None:
    assert [found["advice"][1] for found in ranks] == ["", ""]


def test_the_advice_about_complex_numbers_works(ranks: Refusals) -> None:
    assert [found["pairs"][1] for found in ranks] == ["", ""]


def test_no_process_group() -> None:
    with pytest.raises(PipelineError, match=r"needs a process group: call torch.distributed.init"):
        SplitPipelineStage(None, 0, 1, "cpu")  # type: ignore[arg-type]


def test_other_shapes_are_torchs_error_too() -> None:
    """For those who catch what torch's own stage raises."""
    assert issubclass(StageShapeError, getattr(_utils, "PipeliningMetadataError", RuntimeError))
