"""What ranks make ready alike before they train: model, text, and that they agree on both."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from autosplit.errors import AutosplitError, PipelineError
from autosplit.pipeline.engine.messages.default_group import gather

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
    """

    language_model: LanguageModel
    windows: TextWindows


def prepare(settings: TrainSettings) -> Prepared:
    """Read model and text, and find out whether all ranks have the same; collective.

    Raises:
        PipelineError: on all ranks, if any of them cannot use its model or text, or if they differ.
    """
    try:
        found: Prepared | AutosplitError = _prepared(settings)
    except AutosplitError as error:
        found = error
    said = gather(str(found) if isinstance(found, AutosplitError) else _digests(settings, found))
    refused = {rank: each for rank, each in enumerate(said) if isinstance(each, str)}
    if refused:
        who = "" if len(refused) == len(said) else f"rank {min(refused)}: "
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
    return Prepared(language_model, TextWindows(tokens, settings.length, settings.samples))


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
    return {"model": digest, "text": found.windows.digest(), **options}


def _shown(first: object, other: object) -> str:
    """Values of options; digests say nothing to anybody."""
    long = any(isinstance(each, str) and len(each) == 64 for each in (first, other))
    return "" if long else f" ({other!r}, not {first!r})"
