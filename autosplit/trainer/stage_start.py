"""Initial weights of stages: each stage is built under its own random seed, and the trainer warns
if two stages start with equal weights.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from autosplit.device import GeneratorStates, generators_kept, seed_generators
from autosplit.pipeline.engine.stage_seeds import draw_number, next_number, seed_at
from autosplit.ranks.groups import Groups
from autosplit.text.figures import few
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.trainer.stage_modules import Holder

_SAMPLES = 16  # the first numbers of each parameter, which are compared


def build_seeded_modules(
    build: Callable[[int], nn.Module], stages: Iterable[int], device: torch.device
) -> tuple[dict[int, nn.Module], bool]:
    """Build the modules of stages, each under its own seed, and restore the random generators.

    If all ranks use one seed, stages nevertheless start with different weights, and a stage starts
    with the same weights on any rank.

    Args:
        build: builds the module of a stage.
        stages: the stages to build.
        device: the device whose generator is seeded, together with the CPU's.

    Returns:
        (modules by stage, whether building them drew random numbers).
    """
    modules, drew, number = dict[int, nn.Module](), False, next_number()
    with generators_kept():
        for index in stages:
            seed_generators(device, seed_at(number, index))
            seeded = GeneratorStates.on(device)
            modules[index] = build(index)
            drew = drew or not seeded.unchanged()
    return modules, drew


def agree_on_start(
    modules: Mapping[int, nn.Module],
    shared: Sequence[Sequence[Holder]],
    groups: Groups,
    *,
    drew: bool,
) -> None:
    """Advance the random generators of all ranks equally, and warn of stages with equal weights;
    collective.

    If building drew random numbers on any rank, one number is drawn from the CPU's generator on
    all ranks, so that the next trainer starts with other weights.

    Args:
        modules: this rank's stages.
        shared: parameters that several stages share, which are equal on purpose.
        groups: the trainer's process groups.
        drew: whether building this rank's stages drew random numbers.
    """
    tied = {(stage, name) for holders in shared for stage, name in holders}
    samples = {index: _sample(index, module, tied) for index, module in modules.items()}
    rows = groups.everybody.gather((drew, samples))
    if any(drew for drew, _ in rows):
        draw_number()
    by_sample: dict[str, set[int]] = {}
    for index, sample in (item for _, samples in rows for item in samples.items()):
        by_sample.setdefault(sample, set()).add(index)
    by_sample.pop("", None)
    equal = [
        few([*map(str, sorted(stages))], 8) for stages in by_sample.values() if len(stages) > 1
    ]
    if equal:
        warnings.warn(
            f"stages {'; '.join(equal)} start with equal weights: was each built after the same "
            "torch.manual_seed(...), or copied? Pass a function that builds stage number index "
            "and sets no seed, as the trainer sets one for each stage; or call "
            "torch.manual_seed(seed + index) before you build each stage",
            UserWarning,
            stacklevel=5,
        )


def _sample(index: int, module: nn.Module, tied: set[Holder]) -> str:
    """Return a digest of a stage's untied parameters; empty if each has only equal values, such as
    zeros.
    """
    named = module.named_parameters()
    values = [(name, _numbers(p)) for name, p in named if (index, name) not in tied]
    if all(len({*numbers}) < 2 for _, numbers in values):
        return ""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _numbers(parameter: Tensor) -> list[complex]:
    """Return a parameter's first few elements, by which ranks compare initial values. Of a DTensor,
    they are those of this rank's part; complex numbers fit every dtype.
    """
    if parameter.is_meta:
        return []
    numbers: list[complex] = local_tensor(parameter).detach().flatten()[:_SAMPLES].tolist()
    return numbers
