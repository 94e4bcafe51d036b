"""What the blocks of a model cost, measured: each kind of block runs by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from autosplit.device import generators_kept
from autosplit.passes.analysis.operator_cost import value_bytes
from autosplit.pipeline.engine.stages import footprint
from autosplit.planner.model.block_instance import (
    BlockInstance,
    BlockSequence,
    StageOptions,
    distinct,
    prepare_blocks,
)
from autosplit.stage import Stage

from .block_costs import BlockCost, ModelCosts
from .timing import Rounds, error, time_stages


def profile(
    whole: BlockSequence, options: StageOptions | None = None, *, seconds: float = 60.0
) -> ModelCosts:
    """Time F, I and W of a block of each kind, warm, by medians.

    One block of each kind runs, one after the other as in a stage, see ``clock.run``; those whose
    parameters are on the meta device are made, timed and forgotten one after another. The
    model's state, the random number generators and ``.grad`` stay as they are. Progress is shown
    on a terminal.

    Args:
        whole: the model in blocks, for one microbatch.
        options: how stages are made of blocks; None for a trainer's defaults.
        seconds: how long to measure, all kinds of blocks together; tracing is not counted. It ends
            sooner where the medians are known sooner.

    Returns:
        Seconds of blocks without what a call takes whatever the stage holds; that is ``call``.
        ``noise`` is by what share their sum may be off.

    Raises:
        CaptureError: a block cannot be traced.
        SplitError: a block's graph cannot be split, or a bad option.
    """
    options = options or StageOptions()
    kinds = list(distinct(whole, options).values())
    costs: dict[int, BlockCost] = {}
    calls: list[float] = []
    noise = 0.0
    # None: shown on a terminal, not in a log file.
    with generators_kept(), tqdm(total=seconds, unit="s", disable=None) as bar:
        for group in _groups(whole, [members[0] for members in kinds]):
            share = seconds * len(group) / len(kinds)
            found, call, off = _measure(whole, group, options, share, bar.update)
            costs |= found
            calls.append(call)
            noise = max(noise, off)
    blocks = {index: costs[members[0]] for members in kinds for index in members}
    return ModelCosts(
        tuple(blocks[index] for index in sorted(blocks)),
        tuple(map(crossing_bytes, whole.crossing)),
        statistics.median(calls),
        tuple(map(returning_bytes, whole.crossing)),
        noise,
    )


def crossing_bytes(tensors: Sequence[Tensor]) -> float:
    """Bytes of one message with these tensors."""
    return float(sum(map(value_bytes, tensors)))


def returning_bytes(tensors: Sequence[Tensor]) -> float:
    """Bytes of the message with their gradients; a mask has none."""
    return crossing_bytes([tensor for tensor in tensors if tensor.requires_grad])


def _groups(whole: BlockSequence, kinds: list[int]) -> list[list[int]]:
    """Which kinds (by a block of each) are in memory at once."""
    for first in kinds:
        module, _ = whole.segment(first, first + 1)
        if any(parameter.is_meta for parameter in module.parameters()):
            return [[each] for each in kinds]
    return [kinds]


def _measure(
    whole: BlockSequence,
    group: Sequence[int],
    options: StageOptions,
    seconds: float,
    progress: Callable[[float], object],
) -> tuple[dict[int, BlockCost], float, float]:
    """The costs of some blocks, the seconds of a call with next to nothing to compute, and by what
    share the blocks' sum may be off.
    """
    instances = [prepare_blocks(whole, first, first + 1, options) for first in group]
    device = instances[0].inputs[0].device
    nothing = [torch.ones(1, device=device)]
    backend = options.split.backend
    empty = Stage(_Scale().to(device), [nothing[0].requires_grad_()], backend=backend)
    subjects = [(each.stage, each.inputs) for each in instances]
    *rounds, least = time_stages([*subjects, (empty, nothing)], seconds, progress)
    parts = (least.forward, least.backward_input, least.backward_weight)
    call = statistics.fmean(map(statistics.median, parts))
    pairs = zip(group, instances, rounds, strict=True)
    return {first: _cost(each, found, call) for first, each, found in pairs}, call, error(rounds)


class _Scale(nn.Module):
    """The smallest module with an F, an I and a W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _cost(instance: BlockInstance, rounds: Rounds, call: float) -> BlockCost:
    forward, inputs, weights, backward = (
        max(statistics.median(values) - call, 0.0)
        for values in (
            rounds.forward,
            rounds.backward_input,
            rounds.backward_weight,
            rounds.backward,
        )
    )
    saved, deferred = footprint(instance.stage)
    if instance.stage.index == 0:
        inputs, weights = 0.0, backward
    return BlockCost(forward, inputs, weights, saved, deferred, instance.parameter_bytes, backward)
