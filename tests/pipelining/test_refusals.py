"""Steps that cannot be: an error on every rank, before the first microbatch."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleZBVZeroBubble,
    _utils,
)

import autosplit
from autosplit.errors import PipelineError
from autosplit.pipeline import build
from autosplit.pipelining import SplitPipelineStage, dw_builder, torch_schedule
from autosplit.torch_internals.pipelining_stage import StageShapeError
from tests.kept_ranks import Ranks

from .programs import CPU, Program, around, block, mean_square, trained

Refusals = list[dict[str, tuple[str, str]]]


class Case(NamedTuple):
    """A refused call, and the text of its error, on one rank or on both."""

    run: Callable[[], Any]
    said: str
    rank: int | None = None


def breaking() -> nn.Module:
    return around(lambda inner, x: (inner(x), torch._dynamo.graph_break())[0] * 2)


def alone(batch: Tensor, loss: Callable[..., Tensor] = mean_square) -> None:
    """A step of each rank on its own."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    stage = SplitPipelineStage(block(), 0, 1, CPU, group=groups[dist.get_rank()])
    Schedule1F1B(stage, 4, loss_fn=loss).step(batch, target=torch.randn(8, 4))


def stages(count: int, **more: Any) -> Program:
    return trained(*(block() for _ in range(count)), **more)


def connected(*parts: nn.Module, **more: Any) -> Program:
    """With connections of its own, which are closed when a step fails."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    return trained(*parts, options={"group": group}, **more)


def first_of_four(part: nn.Module, at: int, count: int, device: torch.device) -> Any:
    return SplitPipelineStage(part, at, 4, device)


def a_loop_for_a_v() -> None:
    program = stages(4, kind="ScheduleInterleaved1F1B")
    program.schedule = ScheduleZBVZeroBubble(program.stages, 4, loss_fn=mean_square)
    program.step()


def four_features(inner: nn.Module, x: Tensor) -> Tensor:
    raise ValueError(f"four features, got {x.shape[1]}")


def in_training_only(inner: nn.Module, x: Tensor) -> Tensor:
    if not inner.training:
        raise ValueError("it is told to")
    built: Tensor = inner(x)
    return built


def no_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no loss")


def of_first(program: Program) -> tuple[Any, ...]:
    """The arguments of ``step`` on this rank."""
    return tuple(program.args) if 0 in program.mine else ()


def without_a_target() -> None:
    program = stages(2)
    program.schedule.step(*of_first(program))


def an_evaluation() -> None:
    program = trained(block(), around(four_features))
    program.schedule.eval(*of_first(program))


def another_size() -> None:
    program = connected(block(), block())
    program.step()
    program.args, program.target = [torch.randn(12, 4)], torch.randn(12, 4)
    program.step()


ENDED: list[Program] = []


def a_loss_that_raises_later() -> None:
    losses = iter(range(3))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if next(losses) == 2:
            raise ValueError("loss 2")
        return mean_square(output, target)

    ENDED.append(connected(block(), block(), loss=loss))
    ENDED[-1].step()


def detached(output: Tensor, target: Tensor) -> Tensor:
    return mean_square(output.detach(), target)


def a_forward_that_raises_later() -> None:
    program = connected(block(), around(in_training_only))
    program.step()
    for part in program.parts[1:]:
        part.eval()
    program.step()


def beside_torchs(torchs: int, count: int, **more: Any) -> None:
    """A step in which some stages are of torch's own."""

    def make(part: nn.Module, at: int, count: int, device: torch.device, **options: Any) -> Any:
        kind = PipelineStage if at >= torchs else SplitPipelineStage
        return kind(part, at, count, device, **options)

    connected(*(block() for _ in range(count)), stage=make, **more).step()


def with_graph_breaks() -> list[str]:
    """The advice of the error about graph breaks."""

    def make(part: nn.Module, at: int, count: int, device: torch.device) -> PipelineStage:
        module = autosplit.split(part)
        return PipelineStage(module, at, count, device, dw_builder=dw_builder(module))

    kind = "ScheduleInterleavedZeroBubble"
    program = trained(breaking(), *(nn.Linear(4, 4) for _ in range(3)), kind=kind, stage=make)
    program.step()
    program.plain_step()
    return program.differences()


def with_pairs() -> list[str]:
    """The advice of the error about complex numbers."""
    program = trained(
        around(lambda inner, x: torch.view_as_real(torch.fft.rfft(inner(x)))),
        around(lambda inner, x: inner(torch.fft.irfft(torch.view_as_complex(x)))),
    )
    program.step()
    program.plain_step()
    return program.differences()


_FOUR = r"CaptureError: stage 1 .*four features, got"
BEFORE = {
    "too few stages": Case(
        lambda: SplitPipelineStage(block(), 0, 1, CPU),
        "RuntimeError: Pipeline group size 2 cannot be larger than",
    ),
    "no such stage": Case(
        lambda: SplitPipelineStage(block(), 2, 2, CPU),
        "ValueError: Stage index 2 is out of range of 2",
    ),
    "more stages than ranks": Case(
        lambda: stages(4, stage=first_of_four).step(),
        "PipelineError: Schedule1F1B runs one stage a rank: 4 stages need a",
    ),
    "a loop for a v": Case(
        a_loop_for_a_v, "PipelineError: ScheduleZBVZeroBubble has stages .* but got"
    ),
    "losses of samples": Case(
        lambda: alone(torch.randn(8, 4), lambda output, _: output.square().mean(1)),
        "RuntimeError: grad can be implicitly created only for scalar outputs",
    ),
    "stages of another rank": Case(
        lambda: torch_schedule(
            build("zb-v", 4, 4), stages(4, kind="ScheduleInterleaved1F1B").stages, mean_square
        ),
        "ScheduleError: 'zb-v' has stages .* on rank .*, but got",
    ),
    "an unknown argument": Case(
        lambda: SplitPipelineStage(block(), 0, 2, CPU, chunks=4),
        r"TypeError: PipelineStage.__init__\(\) got an unexpected keyword",
    ),
    "a stage without a schedule": Case(
        lambda: SplitPipelineStage(block(), 0, 2, CPU).forward_one_chunk(0, (torch.randn(2, 4),)),
        "PipelineError: stage 0 has no microbatch 0: it has agreed with its",
    ),
    "a context of forwards": Case(
        lambda: SplitPipelineStage(block(), 0, 2, CPU).register_forward_context(lambda _: None),
        "PipelineError: stage 0 does not support a forward context: the stage runs",
    ),
    "integers for a linear layer": Case(
        lambda: alone(torch.ones(8, 4, dtype=torch.int32)),
        "PipelineError: stage 0 .Sequential. cannot be called with int32.*of one dtype",
    ),
    "outputs that do not fit": Case(
        lambda: trained(block(), block(5)).step(),
        "PipelineError: stage 1 .Sequential. cannot be called with float32.2, 4.: .*a and b "
        "must have same reduction dim, but got .2, 4. X .5, 5.",
        1,
    ),
    "graph breaks": Case(
        lambda: trained(breaking(), block()).step(),
        r"CaptureError: stage 0 .Made. must be one graph: .*test_refusals.py:\d+"
        r".*dw_builder=autosplit.pipelining.dw_builder\(module\)",
        0,
    ),
    "a number for the next stage": Case(
        lambda: trained(around(lambda inner, x: (inner(x), 3)), block()).step(),
        r"CaptureError: stage 0 .Made. returns output.1., which is not a tensor",
        0,
    ),
    "complex numbers for the next stage": Case(
        lambda: trained(around(lambda inner, x: torch.fft.rfft(inner(x))), block()).step(),
        r"CaptureError: stage 0 .Made. returns output, a complex tensor that needs a grad",
        0,
    ),
    "a step without inputs": Case(
        lambda: stages(2, args=[]).step(),
        r"PipelineError: step\(\) got no inputs on the rank of stage 0 .Sequential., "
        r"whose forward takes \(input\): missing .*\. On this rank call schedule.step\(batch, ...",
        0,
    ),
    "a step without a target": Case(
        without_a_target,
        r"PipelineError: step\(\) got no target on the rank of stage 1, the last one",
        1,
    ),
    "inputs that an operator refuses": Case(
        lambda: stages(2, args=[torch.randn(8, 5)]).step(),
        "PipelineError: stage 0 .Sequential. cannot be called with float32.2, 5. without grad",
        0,
    ),
    "a forward that raises": Case(
        lambda: trained(block(), around(four_features)).step(),
        _FOUR,
        1,
    ),
    "an evaluation": Case(an_evaluation, _FOUR, 1),
}
IN_A_STEP = {
    "another size": Case(
        another_size,
        "StageShapeError: stage 0 .Sequential.: microbatch 0 has the outputs float32.3, 4., but",
        0,
    ),
    "a loss that is detached": Case(
        lambda: connected(block(), block(), loss=detached).step(),
        "PipelineError: the loss does not require grad, so nothing would be trained: loss_fn must",
        1,
    ),
    "a loss that raises later": Case(a_loss_that_raises_later, "ValueError: loss 2$", 1),
    "a forward that raises later": Case(
        a_forward_that_raises_later, r"(?s)CaptureError: stage 1 .*it is told to", 1
    ),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "a step after that": lambda: ENDED.pop().step(),
    "a list of actions": lambda: connected(
        *(block() for _ in range(4)), kind="ScheduleInterleaved1F1B", loss=no_loss
    ).step(),
    "torch's own": lambda: beside_torchs(1, 2),
    "torch's own on a rank": lambda: beside_torchs(2, 4, kind="ScheduleInterleaved1F1B"),
    "advice about graph breaks": with_graph_breaks,
    "advice about complex numbers": with_pairs,
}


def all_refusals() -> dict[str, tuple[str, str]]:
    """For each case the error's class and text, or what was returned."""
    results = {}
    cases = {name: case.run for name, case in [*BEFORE.items(), *IN_A_STEP.items()]}
    for name, run in [*cases.items(), *OTHERS.items()]:
        torch.manual_seed(0)
        try:
            results[name] = ("nothing", str(run()))
        except Exception as error:
            results[name] = (type(error).__name__, str(error))
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def ranks(on_ranks: Ranks) -> Refusals:
    return on_ranks(all_refusals, 2, timeout=120)


@pytest.mark.parametrize("name", BEFORE)
def test_both_find_it_or_one_does_and_the_other_is_told(ranks: Refusals, name: str) -> None:
    case = BEFORE[name]
    for rank, result in enumerate(rank[name] for rank in ranks):
        if case.rank in (None, rank):
            assert re.match(case.said, ": ".join(result), re.DOTALL)
        else:
            text = f"stage {case.rank} failed: {': '.join(ranks[1 - rank][name])}"
            assert result == ("NeighbourError", text)


@pytest.mark.parametrize("name", IN_A_STEP)
def test_a_rank_that_fails_in_a_step_ends_it_on_every_rank(ranks: Refusals, name: str) -> None:
    """Its neighbours are waiting for it then; torch's own stage leaves them there."""
    _, text, rank = IN_A_STEP[name]
    assert rank is not None
    mine, other = ranks[rank][name], ranks[1 - rank][name]
    assert re.match(text, ": ".join(mine))
    assert other[0] == "RankError"
    assert other[1].startswith(f"rank {rank} failed in a step of Schedule1F1B: {': '.join(mine)}\n")
    assert "Traceback (most recent call last)" in other[1]


def test_a_rank_that_fails_ends_what_others_wait_for(ranks: Refusals) -> None:
    """Torch's runtime (2.15) waits for its sends before the error comes out of it."""
    other, mine = (result["a list of actions"] for result in ranks)
    assert mine == ("ValueError", "no loss")
    assert other[0] == "RankError"


@pytest.mark.parametrize("name", ["torch's own", "torch's own on a rank"])
def test_stages_of_torchs_own_are_refused_beside_ours(ranks: Refusals, name: str) -> None:
    kind, text = ranks[0][name]
    assert kind in ("PipelineError", "RankError")
    assert "has stages of torch's own beside SplitPipelineStage, on this rank or a neighb" in text
    assert ranks[1][name][0] != "nothing"


def test_a_schedule_that_has_ended_says_why(ranks: Refusals) -> None:
    for result in ranks:
        kind, text = result["a step after that"]
        assert kind == "PipelineError"
        assert text.startswith(
            "Schedule1F1B has ended, because rank 1 failed in a step of Schedule1F1B"
        )


@pytest.mark.parametrize("about", ["graph breaks", "complex numbers"])
def test_the_advice_works(ranks: Refusals, about: str) -> None:
    assert [result[f"advice about {about}"] for result in ranks] == [("nothing", "[]")] * 2


def test_no_process_group() -> None:
    with pytest.raises(PipelineError, match=r"needs a process group: call torch.distributed.init"):
        SplitPipelineStage(None, 0, 1, "cpu")  # type: ignore[arg-type]


def test_other_shapes_are_torchs_error_too() -> None:
    """For those who catch what torch's own stage raises."""
    assert issubclass(StageShapeError, getattr(_utils, "PipeliningMetadataError", RuntimeError))
