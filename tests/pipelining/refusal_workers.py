"""What two ranks do in test_refusals.py: steps that cannot be, on every rank at once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

import autosplit
from autosplit.pipeline import build
from autosplit.pipelining import SplitPipelineStage, dw_builder, torch_schedule

from .programs import CPU, Program, block, mean_square


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        torch._dynamo.graph_break()
        return made * 2


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x), 3


class Spectrum(nn.Module):
    """Hands on complex numbers, or pairs of real ones."""

    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        self.inner, self.pairs = block(), pairs

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.inner(x))
        return torch.view_as_real(found) if self.pairs else found


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(
            torch.fft.irfft(x if x.is_complex() else torch.view_as_complex(x))
        )
        return made


def _program(*parts: nn.Module, **more: Any) -> Program:
    given: dict[str, Any] = {"args": [torch.randn(8, 4)], "target": torch.randn(8, 4), **more}
    return Program(parts, **given)


def too_few_stages() -> None:
    SplitPipelineStage(block(), 0, 1, CPU)


def no_such_stage() -> None:
    SplitPipelineStage(block(), 2, 2, CPU)


def an_argument_in_the_place_of_the_group() -> None:
    example: Any = torch.zeros(1)
    SplitPipelineStage(block(), 0, 2, CPU, None, None, example)


def more_stages_than_ranks() -> None:
    program = _program(block(), block(), block(), block(), stage=_first_of_four)
    program.step()


def _first_of_four(part: nn.Module, at: int, count: int, device: torch.device) -> Any:
    return SplitPipelineStage(part, at, 4, device)


def a_loop_for_a_v() -> None:
    program = _program(*(block() for _ in range(4)), kind="ScheduleInterleaved1F1B")
    program.schedule = ScheduleZBVZeroBubble(program.stages, 4, loss_fn=mean_square)
    program.step()


def outputs_that_do_not_fit() -> None:
    _program(block(), block(5)).step()


def graph_breaks() -> None:
    _program(Broken(), block()).step()


def a_number_for_the_next_stage() -> None:
    _program(Number(), block()).step()


def a_step_without_inputs() -> None:
    program = _program(block(), block())
    program.args = []
    program.step()


def complex_numbers_for_the_next_stage() -> None:
    _program(Spectrum(pairs=False), Inverse()).step()


def a_compiled_module() -> None:
    _program(torch.compile(block()), torch.compile(block()))  # type: ignore[arg-type]


def _alone() -> SplitPipelineStage:
    groups = [dist.new_group([rank]) for rank in range(2)]
    return SplitPipelineStage(block(), 0, 1, CPU, group=groups[dist.get_rank()])


def losses_of_samples() -> None:
    def loss(output: Tensor, _: Tensor) -> Tensor:
        return output.square().mean(1)

    Schedule1F1B(_alone(), 4, loss_fn=loss).step(torch.randn(8, 4), target=torch.randn(8, 4))


def stages_of_another_rank() -> None:
    program = _program(block(), block(), block(), block(), kind="ScheduleInterleaved1F1B")
    torch_schedule(build("zb-v", 4, 4), program.stages, mean_square)


def a_step_without_a_target() -> None:
    program = _program(block(), block())
    program.schedule.step(*(program.args if 0 in program.mine else ()))


def inputs_that_an_operator_refuses() -> None:
    _program(block(), block(), args=[torch.randn(8, 5)]).step()


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.told = block(), False

    def forward(self, x: Tensor) -> Tensor:
        if self.told:
            raise ValueError("it is told to")
        made: Tensor = self.inner(x)
        return made


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 4:
            raise ValueError(f"four features, got {x.shape[1]}")
        return x


def a_forward_that_raises() -> None:
    _program(block(), nn.Sequential(block(), Picky())).step()


def a_builder_of_runners() -> None:
    SplitPipelineStage(block(), 0, 2, CPU, dw_builder=lambda: None)


def an_unknown_argument() -> None:
    SplitPipelineStage(block(), 0, 2, CPU, chunks=4)


def a_stage_without_a_schedule() -> None:
    SplitPipelineStage(block(), 0, 2, CPU).forward_one_chunk(0, (torch.randn(2, 4),))


def integers_for_a_linear_layer() -> None:
    batch = torch.ones(8, 4, dtype=torch.int32)
    Schedule1F1B(_alone(), 4, loss_fn=mean_square).step(batch, target=torch.randn(8, 4))


def _connected(*parts: nn.Module, **more: Any) -> Program:
    """With connections of its own, which are closed when a step fails."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    return _program(*parts, options={"group": group}, **more)


def a_batch_of_another_size() -> None:
    program = _connected(block(), block())
    program.step()
    program.args, program.target = [torch.randn(12, 4)], torch.randn(12, 4)
    program.step()


def a_loss_that_raises_later() -> None:
    losses = iter(range(3))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if next(losses) == 2:
            raise ValueError("loss 2")
        return mean_square(output, target)

    ENDED.append(_connected(block(), block(), loss=loss))
    ENDED[-1].step()


def a_step_after_that() -> None:
    ENDED.pop().step()


def a_forward_that_raises_later() -> None:
    program = _connected(block(), Choosy())
    program.step()
    for part in program.parts[1:]:
        part.told = True  # type: ignore[assignment]
    program.step()


def an_evaluation_whose_last_stage_raises() -> None:
    program = _program(block(), nn.Sequential(block(), Picky()))
    program.schedule.eval(*(program.args if 0 in program.mine else ()))


def a_loss_that_raises_under_a_list_of_actions() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no loss")

    parts = [block() for _ in range(4)]
    _connected(*parts, kind="ScheduleInterleaved1F1B", loss=loss).step()


def a_stage_of_torchs_own() -> None:
    def make(part: nn.Module, at: int, count: int, device: torch.device, **options: Any) -> Any:
        kind = PipelineStage if at % 2 else SplitPipelineStage
        return kind(part, at, count, device, **options)

    _connected(block(), block(), stage=make).step()


def stages_of_both_kinds_on_a_rank() -> None:
    def make(part: nn.Module, at: int, count: int, device: torch.device, **options: Any) -> Any:
        kind = PipelineStage if at > 1 else SplitPipelineStage
        return kind(part, at, count, device, **options)

    parts = [block() for _ in range(4)]
    _connected(*parts, kind="ScheduleInterleaved1F1B", stage=make).step()


def a_context_of_forwards() -> None:
    SplitPipelineStage(block(), 0, 2, CPU).register_forward_context(lambda _: None)


ENDED: list[Program] = []
CASES: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        too_few_stages, no_such_stage, an_argument_in_the_place_of_the_group,
        more_stages_than_ranks, a_loop_for_a_v, outputs_that_do_not_fit,
        graph_breaks,
        a_number_for_the_next_stage, complex_numbers_for_the_next_stage, a_compiled_module,
        losses_of_samples, a_step_without_inputs,
        stages_of_another_rank, a_step_without_a_target,
        inputs_that_an_operator_refuses, a_forward_that_raises, a_builder_of_runners,
        an_unknown_argument, a_stage_without_a_schedule, integers_for_a_linear_layer,
        a_batch_of_another_size, a_loss_that_raises_later, a_step_after_that,
        a_forward_that_raises_later, an_evaluation_whose_last_stage_raises,
        a_loss_that_raises_under_a_list_of_actions, a_stage_of_torchs_own,
        stages_of_both_kinds_on_a_rank, a_context_of_forwards,
    )
}  # fmt: skip


def all_refusals() -> dict[str, tuple[str, str]]:
    """For each case the error's class and text."""
    found = {}
    for name, run in CASES.items():
        torch.manual_seed(0)
        try:
            run()
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
        else:
            found[name] = ("nothing", "")
        dist.barrier()
    found["advice"] = ("", "\n".join(_with_graph_breaks()))
    found["pairs"] = ("", "\n".join(_with_pairs_of_numbers()))
    return found


def _with_graph_breaks() -> list[str]:
    """What the error about graph breaks advises."""

    def make(part: nn.Module, at: int, count: int, device: torch.device) -> PipelineStage:
        module = autosplit.split(part)
        return PipelineStage(module, at, count, device, dw_builder=dw_builder(module))

    program = Program(
        [Broken(), *(nn.Linear(4, 4) for _ in range(3))],
        "ScheduleInterleavedZeroBubble",
        args=[torch.randn(8, 4)],
        target=torch.randn(8, 4),
        stage=make,
    )
    program.step()
    program.plain_step()
    return program.differences()


def _with_pairs_of_numbers() -> list[str]:
    """What the error about complex numbers advises."""
    program = _program(Spectrum(pairs=True), Inverse())
    program.step()
    program.plain_step()
    return program.differences()
