"""What other frameworks are asked for, and what needs a GPU."""

from __future__ import annotations

import functools

import torch
from torch import nn

from .. import gradients
from ..case import ENGINE, Absent, Case, Thread
from ..gradients import mean_square
from ..schedules import chunks

_MICROBATCHES = 8


def _schedules(*names: str) -> str:
    from ..training import Trainer

    for name in names:
        torch.manual_seed(0)
        stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        x, y = torch.randn(16, 8), torch.randn(16, 8)
        expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
        with Trainer(stages, _MICROBATCHES, schedule=name) as trainer:
            gradients.check(trainer.step((x, y)), expected)
    return f"{', '.join(names)}: {gradients.EQUAL}"


_MEGATRON = Absent("asks Megatron-LM, which runs on GPUs only, for a schedule that it has not")

CASES = [
    Case(
        "zero-bubble-asked-of-megatron-lm",
        (Thread("NVIDIA/Megatron-LM", 1399),),
        "no schedule that splits the backward",
        _MEGATRON,
        functools.partial(_schedules, "zb-v", "dualpipe-v"),
        by=ENGINE,
    ),
    Case(
        "dualpipev-asked-of-megatron-lm",
        (Thread("NVIDIA/Megatron-LM", 1524),),
        "no DualPipeV, for the library's modules compute both gradients at once",
        _MEGATRON,
        functools.partial(_schedules, "dualpipe-v"),
        by=ENGINE,
    ),
    Case(
        "dualpipe-asked-of-deepspeed",
        (Thread("deepspeedai/DeepSpeed", 7100),),
        "no DualPipe",
        Absent("asks DeepSpeed for a schedule that it has not"),
        functools.partial(_schedules, "dualpipe"),
        by=ENGINE,
    ),
    Case(
        "offloaded-activations",
        (Thread("pytorch/torchtitan", 2379),),
        "no activations offloaded to the host and fetched ahead of the backward",
        Absent("on CPU ranks all memory is the host's"),
        Absent("on CPU ranks all memory is the host's; autosplit offloads nothing either"),
    ),
    Case(
        "a-step-as-one-cuda-graph",
        (Thread("pytorch/torchtitan", 3820),),
        "no step of a pipeline captured as one CUDA graph, communication included",
        Absent("no CUDA graphs on CPU ranks"),
        Absent("no CUDA graphs on CPU ranks"),
    ),
]
