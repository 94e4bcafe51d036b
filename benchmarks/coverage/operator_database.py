"""Every differentiable entry of torch's operator databases, each operator as a module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.custom_op_db import custom_op_db

from .judge import is_inexact
from .module_database import spread
from .subject import Call, Subject, projection

DATABASES = {"": op_db, "custom ": custom_op_db, "function ": autograd_function_db}
# The first of these that an entry can be differentiated in.
DTYPES = (torch.float32, torch.float64, torch.complex64)
FACTOR = 0.96875  # near 1: samples lie where the operator is defined


class Operator(nn.Module):
    """``operator(x, ...)``."""

    def __init__(self, operator: Callable[..., Any]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.operator(x, *args, **kwargs)


class ScaledOperator(Operator):
    """``operator(x * p, ...)`` with a parameter ``p``."""

    def __init__(self, operator: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(operator)
        self.factor = nn.Parameter(torch.tensor(FACTOR, dtype=dtype))

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Tensor):
            return self.operator(x * self.factor, *args, **kwargs)
        scaled = [each * self.factor if is_inexact(each) else each for each in x]
        return self.operator(scaled, *args, **kwargs)


def entries(samples: int) -> Iterator[tuple[str, Iterator[Subject]]]:
    """(name of an entry, its cases): at most ``samples`` inputs, each plain and scaled. Cases are
    made as they are asked for.
    """
    for prefix, database in DATABASES.items():
        for entry in database:
            dtypes = entry.supported_backward_dtypes("cpu") if entry.supports_autograd else ()
            dtype = next((each for each in DTYPES if each in dtypes), None)
            if dtype is not None:
                variant = f".{entry.variant_test_name}" if entry.variant_test_name else ""
                name = f"{prefix}{entry.name}{variant}"
                yield name, _subjects(entry, name, dtype, samples)


def _subjects(entry: Any, name: str, dtype: torch.dtype, samples: int) -> Iterator[Subject]:
    found = list(_samples(entry, dtype))
    for index in spread(len(found), samples):
        given = found[index].input
        inputs = [given] if isinstance(given, Tensor) else given
        # Of decompositions that are unique only up to a phase or a sign, what is unique.
        processed = found[index].output_process_fn_grad
        yield _subject(entry, f"{name} plain {index}", dtype, index, processed, scaled=False)
        if isinstance(inputs, (list, tuple)) and any(map(is_inexact, inputs)):
            yield _subject(entry, f"{name} scaled {index}", dtype, index, processed, scaled=True)


def _subject(
    entry: Any,
    name: str,
    dtype: torch.dtype,
    index: int,
    processed: Callable[[Any], Any],
    *,
    scaled: bool,
) -> Subject:
    def build() -> nn.Module:
        return ScaledOperator(entry.op, dtype) if scaled else Operator(entry.op)

    def call() -> Call:
        sample = _sample(entry, dtype, index)
        return (sample.input, *sample.args), dict(sample.kwargs)

    def loss(output: Any, generator: torch.Generator) -> Tensor:
        return projection(processed(output), generator)

    return Subject(name, build, call, loss)


def _samples(entry: Any, dtype: torch.dtype) -> Iterator[Any]:
    yield from entry.sample_inputs("cpu", dtype, requires_grad=True)


def _sample(entry: Any, dtype: torch.dtype, index: int) -> Any:
    return next(itertools.islice(_samples(entry, dtype), index, None))
