"""What ranks make ready alike before they train: model, text, and that they agree on both."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from autosplit.checkpoint import read_progress
from autosplit.checkpoint.storage.manifest import METADATA
from autosplit.errors import AutosplitError, CheckpointError, PipelineError
from autosplit.pipeline.engine.default_group import gather

from .language_model import LanguageModel, load_model
from .settings import TrainSettings
from .text_windows import TextWindows, read_tokens

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

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change from one start to the next, or steps would be of other windows."""
        return identity_of(self.windows)


def prepare(settings: TrainSettings) -> Prepared:
    """Read model and text, and find out whether all ranks have the same; collective.

    Raises:
        AutosplitError: on all ranks, if any of them cannot use its model, text or checkpoint, or if
            they differ.
    """
    try:
        found: Prepared | AutosplitError = _prepared(settings)
    except AutosplitError as error:
        found = error
    said = gather(str(found) if isinstance(found, AutosplitError) else _digests(settings, found))
    refused = {rank: each for rank, each in enumerate(said) if isinstance(each, str)}
    if refused:
        who = "" if len(refused) == len(said) else f"rank {min(refused)}: "
        if isinstance(found, AutosplitError) and not who:
            raise found
        raise PipelineError(who + refused[min(refused)])
    for rank, each in enumerate(said):
        for what, value in each.items():
            if value != said[0][what]:
                raise PipelineError(
                    f"rank {rank} has another {what} than rank 0{_shown(said[0][what], value)}: "
                    "start all ranks with the same options, and the same files on every host"
                )
    if isinstance(found, AutosplitError):  # it is among those refused
        raise found
    return found


def _prepared(settings: TrainSettings) -> Prepared:
    language_model = load_model(settings)
    tokens = read_tokens(settings.data, language_model.tokenizer)
    language_model.check_tokens(tokens, settings.length)
    windows = TextWindows(tokens, settings.length, settings.samples)
    end = settings.steps or windows.steps_of_a_pass
    return Prepared(language_model, windows, _start(settings, windows, end), end)


def identity_of(windows: TextWindows) -> dict[str, Any]:
    """By what a run knows its checkpoint."""
    return {"--batch": windows.batch, "--length": windows.length, "--data": windows.digest()}


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
    if step is None or not identity_of(windows).keys() <= extra.keys():
        raise CheckpointError(
            f"the checkpoint in {folder} was not saved by autosplit train: name another folder"
        )
    for name, value in identity_of(windows).items():
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


def _digests(settings: TrainSettings, found: Prepared) -> dict[str, Any]:
    options = {
        f"option {name}": value
        for name, value in dataclasses.asdict(settings).items()
        if name not in _LOCAL
    }
    model = found.language_model.model
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    config = getattr(model, "config", None)
    values = dict(config.to_dict()) if isinstance(config, PreTrainedConfig) else {}
    values.pop("_name_or_path", None)  # each host may have it elsewhere
    described = f"{model!r} {values} {shapes}"
    digest = hashlib.sha256(described.encode()).hexdigest()
    return {"model": digest, "text": found.windows.digest(), "step": found.start, **options}


def _shown(first: object, other: object) -> str:
    """Values of options; digests say nothing to anybody."""
    long = any(isinstance(each, str) and len(each) == 64 for each in (first, other))
    return "" if long else f" ({other!r}, not {first!r})"
