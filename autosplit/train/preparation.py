"""A file of text as token ids, and the windows of it that each step trains on.

What ranks make ready alike before they train: model, text, and that they agree on both.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from autosplit.checkpoint import read_progress
from autosplit.checkpoint.folder import METADATA
from autosplit.errors import AutosplitError, CheckpointError, PipelineError
from autosplit.pipeline.engine.default_group import gather
from autosplit.train.language_model import LanguageModel, TrainSettings, load_model


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
        windows = self.tokens[starts[:, None] + torch.arange(self.length + 1, device="cpu")]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _order(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randperm(self.count, generator=generator, device="cpu")

    @cached_property
    def identity(self) -> dict[str, Any]:
        """By what a run knows its checkpoint: what must not change from one start to the next, or
        steps would be of other windows.
        """
        digest = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()
        return {"--batch": self.batch, "--length": self.length, "--data": digest}


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
    return torch.tensor(ids, device="cpu")


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


_LOCAL = ("checkpoint", "history", "data", "model")  # each host may have its own paths


@dataclass(frozen=True)
class Prepared:
    """What a run trains.

    Attributes:
        language_model: the model, without memory.
        windows: of the text.
        start: how many steps a checkpoint has, with which the run goes on.
        end: at which step it ends.
    """

    language_model: LanguageModel
    windows: TextWindows
    start: int
    end: int


def prepare(settings: TrainSettings) -> Prepared:
    """Read model and text, and find out whether all ranks have the same; collective.

    Raises:
        AutosplitError: on all ranks, if any of them cannot use its model, text or checkpoint, or if
            they differ.
    """
    found: Prepared | AutosplitError
    try:
        found = ready = _prepared(settings)
        own = "", _digest(settings, ready)
    except AutosplitError as error:
        found, own = error, (str(error), "")
    said = gather(own)
    if isinstance(found, AutosplitError) and {*said} == {own}:
        raise found
    problems = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(said) if problem]
    if problems or isinstance(found, AutosplitError):
        raise PipelineError("\n".join(problems))
    if other := [str(rank) for rank, each in enumerate(said) if each != said[0]]:
        raise PipelineError(
            f"rank {', '.join(other)} has another model, text, checkpoint or options than rank 0: "
            "start all ranks with the same options, and the same files on every host"
        )
    return found


def _prepared(settings: TrainSettings) -> Prepared:
    language_model = load_model(settings)
    tokens = read_tokens(settings.data, language_model.tokenizer)
    language_model.check_tokens(tokens, settings.length)
    windows = TextWindows(tokens, settings.length, settings.samples)
    end = settings.steps or windows.steps_of_a_pass
    return Prepared(language_model, windows, _start(settings, windows, end), end)


def _start(settings: TrainSettings, windows: TextWindows, end: int) -> int:
    """How many steps the checkpoint has.

    Raises:
        CheckpointError: there is one of another run, or one that would be lost.
        PipelineError: it has all the steps already.
    """
    folder = settings.checkpoint
    if folder is None or not (folder / METADATA).exists():
        return 0
    if not settings.resume:
        raise CheckpointError(
            f"{folder} holds a checkpoint, which this run would replace: --resume goes on from it; "
            "else name another folder"
        )
    step, extra = read_progress(folder)
    if step is None or not windows.identity.keys() <= extra.keys():
        raise CheckpointError(
            f"the checkpoint in {folder} was not saved by autosplit train: name another folder"
        )
    for name, value in windows.identity.items():
        if (was := extra[name]) != value:
            advice = "give the same text as then" if name == "--data" else f"{name} {was}"
            raise CheckpointError(
                f"the checkpoint in {folder} is of a run with another {name}, so that its steps "
                f"were of other windows: {advice}"
            )
    if step >= end:
        raise PipelineError(
            f"the checkpoint in {folder} is of step {step}, and the run ends at step {end}: "
            f"--steps {step + 1} or more goes on"
        )
    return step


def _digest(settings: TrainSettings, found: Prepared) -> str:
    """Of all that ranks must have alike."""
    options = {k: v for k, v in dataclasses.asdict(settings).items() if k not in _LOCAL}
    model = found.language_model.model
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    config = getattr(model, "config", None)
    values = dict(config.to_dict()) if isinstance(config, PreTrainedConfig) else {}
    values.pop("_name_or_path", None)  # each host may have it elsewhere
    described = options, f"{model!r}", values, shapes, found.windows.identity, found.start
    return hashlib.sha256(repr(described).encode()).hexdigest()
