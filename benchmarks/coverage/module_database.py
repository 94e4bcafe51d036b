"""Every entry of torch's module database, ``torch.testing``'s own list of modules with inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

from .subject import Call, Subject

DTYPES = (torch.float32, torch.float64)


def subjects(samples: int) -> Iterator[Subject]:
    """At most ``samples`` inputs of every entry, in each dtype, in train and in eval mode."""
    for entry, dtype, training in itertools.product(module_db, DTYPES, (True, False)):
        for index in spread(len(_samples(entry, dtype, training)), samples):
            yield _subject(entry, dtype, training, index)


def spread(count: int, limit: int) -> list[int]:
    """At most ``limit`` of ``range(count)``, from end to end: neighbours are much alike."""
    if count <= limit:
        return list(range(count))
    return [round(index * (count - 1) / max(limit - 1, 1)) for index in range(limit)]


def _samples(entry: Any, dtype: torch.dtype, training: bool) -> list[Any]:
    found: list[Any] = entry.module_inputs_func(
        entry, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    return found


def _subject(entry: Any, dtype: torch.dtype, training: bool, index: int) -> Subject:
    def build() -> nn.Module:
        arguments = _samples(entry, dtype, training)[index].constructor_input
        module: nn.Module = entry.module_cls(*arguments.args, **arguments.kwargs)
        return module.to(dtype).train(training)

    def call() -> Call:
        arguments = _samples(entry, dtype, training)[index].forward_input
        return tuple(arguments.args), dict(arguments.kwargs)

    mode = "train" if training else "eval"
    precision = str(dtype).removeprefix("torch.")
    return Subject(f"{entry.name} {precision} {mode} {index}", build, call)
