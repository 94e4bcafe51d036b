"""A file of text as token ids, and the windows of it that each step trains on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from autosplit.errors import PipelineError


@dataclass(frozen=True)
class TextWindows:
    """The windows of a text, a batch a step; each pass through them is in an order of its own.

    Attributes:
        tokens: int64 [tokens].
        length: tokens in a window, and as many targets, which are one token later.
        batch: windows in a step.
    """

    tokens: Tensor
    length: int
    batch: int

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.length:
            raise PipelineError(
                f"the text has {len(self.tokens)} tokens, and a window of --length {self.length} "
                f"takes {self.length + 1} with the last target: take a longer text, or --length "
                f"{max(1, len(self.tokens) - 1)} at most"
            )

    @property
    def count(self) -> int:
        """Windows in one pass."""
        return (len(self.tokens) - 1) // self.length

    @property
    def steps_of_a_pass(self) -> int:
        """Steps that take every window once, as far as whole batches go."""
        return max(1, self.count // self.batch)

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, int64 [batch, length]; the same whenever they are asked
        for, so that a run that is resumed goes on in the text where it was.
        """
        first = step * self.batch
        passes = range(first // self.count, (first + self.batch - 1) // self.count + 1)
        order = torch.cat([self._order(each) for each in passes])
        begin = first - passes.start * self.count
        starts = order[begin : begin + self.batch] * self.length
        windows = self.tokens[starts[:, None] + torch.arange(self.length + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _order(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randperm(self.count, generator=generator, device="cpu")

    def digest(self) -> str:
        """Tells one text from another."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()


def read_tokens(file: Path, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """The token ids of a file, int64 [tokens]: its bytes where there is no tokenizer.

    Raises:
        PipelineError: the file cannot be read, is empty, or holds something else than text.
    """
    content = read_content(file)
    if tokenizer is None:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    ids = tokenizer(content.decode(), add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise PipelineError(f"the tokenizer finds no token in the text {str(file)!r}")
    return torch.tensor(ids)


def read_content(file: Path) -> bytes:
    """The bytes of a file of text.

    Raises:
        PipelineError: as ``read_tokens``.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise PipelineError(f"cannot read the text {str(file)!r}: {error.strerror}") from error
    if not content.strip():
        raise PipelineError(f"the text {str(file)!r} is empty: there is nothing to train on")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise PipelineError(
            f"{str(file)!r} is no UTF-8 text ({error.reason} at byte {error.start:,}): give plain "
            "text, unpacked"
        ) from error
    if b"\0" in content:
        raise PipelineError(
            f"{str(file)!r} is no text, it has null characters (the first at byte "
            f"{content.index(0):,}): give plain text"
        )
    return content
