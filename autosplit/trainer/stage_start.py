"""How stages start: each built under a seed of its own, and compared with the others."""

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

_SAMPLES = 16  # numbers of a parameter that are compared


def build_apart(
    build: Callable[[int], nn.Module], stages: Iterable[int], device: torch.device
) -> tuple[dict[int, nn.Module], bool]:
    """Build stages, each under a seed of its own: under one seed on all ranks they start with
    different weights, and with the same ones on whichever rank. Generators stay as they are.

    Args:
        build: makes stage ``index``.
        stages: which.
        device: whose generator is seeded beside the CPU's.

    Returns:
        the modules by stage, and whether building them drew random numbers.
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
    """If building drew on any rank, move the CPU's generator on by one number on all, so that the
    next trainer starts otherwise. Warn of stages that start with equal weights. Collective.

    Args:
        modules: this rank's stages.
        shared: parameters that several stages hold, which are equal by intent.
        groups: the trainer's process groups.
        drew: whether building this rank's stages drew random numbers.
    """
    tied = {(stage, name) for holders in shared for stage, name in holders}
    samples = {index: _sample(index, module, tied) for index, module in modules.items()}
    rows = groups.everybody.gather((drew, samples))
    if any(drew for drew, _ in rows):
        draw_number()
    alike: dict[str, set[int]] = {}
    for index, sample in (item for _, samples in rows for item in samples.items()):
        alike.setdefault(sample, set()).add(index)
    alike.pop("", None)
    equal = [few([*map(str, sorted(stages))], 8) for stages in alike.values() if len(stages) > 1]
    if equal:
        warnings.warn(
            f"stages {'; '.join(equal)} start with equal weights: was each built after the same "
            "torch.manual_seed(...), or copied? Pass a function that builds stage number index "
            "and sets no seed, which the trainer seeds by stage, or call torch.manual_seed(seed + "
            "index) before each",
            UserWarning,
            stacklevel=5,
        )


def _sample(index: int, module: nn.Module, tied: set[Holder]) -> str:
    """A digest of a stage's weights that are not shared; empty if each is constant."""
    named = module.named_parameters()
    values = [(name, _numbers(p)) for name, p in named if (index, name) not in tied]
    if all(len({*numbers}) < 2 for _, numbers in values):
        return ""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _numbers(parameter: Tensor) -> list[complex]:
    if parameter.is_meta:
        return []
    numbers: list[complex] = local_tensor(parameter).detach().flatten()[:_SAMPLES].tolist()
    return numbers
