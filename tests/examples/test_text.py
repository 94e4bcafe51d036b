"""Batches of the text that every Python carries."""

from __future__ import annotations

import pytest
import torch

from autosplit.errors import PipelineError
from examples import text


def test_targets_are_the_inputs_one_byte_later() -> None:
    inputs, targets = text.batch(step=3, size=4, seq=32)
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    whole = text.read_text()
    for window, last in zip(inputs.tolist(), targets[:, -1].tolist(), strict=True):
        assert bytes([*window, last]) in whole


def test_a_step_always_gives_the_same_batch_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (text.batch(step, size=2, seq=16)[0] for step in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_longest_window_is_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "corpus", lambda: torch.arange(5, dtype=torch.uint8))
    inputs, targets = text.batch(step=0, size=1, seq=4)
    assert (inputs.tolist(), targets.tolist()) == ([[0, 1, 2, 3]], [[1, 2, 3, 4]])
    with pytest.raises(PipelineError) as error:
        text.batch(step=0, size=1, seq=5)
    assert str(error.value) == (
        "a window of seq + 1 = 6 bytes does not fit the text of 5 bytes; use a shorter seq"
    )


def test_a_python_without_any_text_is_an_error() -> None:
    with pytest.raises(PipelineError) as error:
        text.read_text(topics="nowhere_at_all", modules=("sys",))
    assert str(error.value) == (
        "no text to train on: expected help topics in the module 'nowhere_at_all' or sources of "
        "sys, found neither; use a Python with its standard library's sources"
    )
