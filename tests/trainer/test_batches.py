"""Batches are checked and cut into microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosplit.errors import PipelineError
from autosplit.trainer.batches import BatchSplitter

CPU = torch.device("cpu")


def _splitter(count: int = 2, *, inputs: bool = True, targets: bool = True) -> BatchSplitter:
    return BatchSplitter(count, CPU, inputs=None if inputs else frozenset(), targets=targets)


NAMED = torch.arange(2), torch.arange(2) + 2, torch.arange(2) + 4


def _named(*used: int) -> BatchSplitter:
    return BatchSplitter(2, CPU, inputs=frozenset(used), targets=False, names=("a", "b", "c"))


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            {"a": NAMED[0], "d": NAMED[0]},
            "inputs have the unknown name 'd'; the model was cut with the inputs a, b, c",
        ),
        ({"a": NAMED[0], "b": NAMED[0]}, "uses the batch's input 'c', which is missing; got 2"),
        ((NAMED[0], None, NAMED[2]), "uses the batch's input 'b', which is missing; got 2"),
        (NAMED[:2], "uses the batch's input 'c', which is missing; got 2"),
    ],
)
def test_inputs_that_are_missing_or_unknown(inputs: Any, text: str) -> None:
    with pytest.raises(PipelineError) as caught:
        _named(1, 2).check_batch((inputs, None))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((torch.zeros(0, 3), torch.zeros(4)), "inputs has shape [0, 3]: 0 samples"),
        (torch.zeros(4), "a pair (inputs, targets); got a tensor of shape [4]"),
        ((torch.zeros(4),), "a pair (inputs, targets); got a tuple of length 1"),
        ({"inputs": 1}, "a pair (inputs, targets); got a dict"),
        (("text", torch.zeros(4)), "inputs must be a tensor or a tuple of tensors; got a str"),
        ((3, torch.zeros(4)), "inputs must be a tensor or a tuple of tensors; got a int"),
        ((torch.zeros(4), None), "a stage of this rank uses the batch's targets; got None"),
        (None, "a stage of this rank uses the batch's inputs; got None"),
    ],
)
def test_bad_batches(batch: Any, text: str) -> None:
    with pytest.raises(PipelineError) as caught:
        _splitter().check_batch(batch)
    assert text in str(caught.value)
