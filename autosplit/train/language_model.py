"""The language model that is trained: a folder or config of transformers, or a function's."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from autosplit.compare.workload import prepared
from autosplit.errors import PipelineError
from autosplit.planner.meta_model import meta_model, model_of

from .settings import TrainSettings

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_LONGEST = 300  # of what transformers says; it likes to list all that it has


@dataclass(frozen=True)
class LanguageModel:
    """A model whose parameters are on the meta device, and what belongs to it.

    Attributes:
        model: ``model(ids)`` gives logits, or an output that has them as ``logits``.
        tokenizer: None for bytes.
        weights: the folder with trained values to begin with; None: it begins with random ones.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None = None
    weights: Path | None = None

    def check_tokens(self, tokens: Tensor, length: int) -> None:
        """Refuse a text that the model has no embeddings for.

        Raises:
            PipelineError: it says what the model has.
        """
        config = getattr(self.model, "config", None)
        config = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
        known = getattr(config, "vocab_size", None)
        most = int(tokens.max()) + 1
        if isinstance(known, int) and most > known:
            who = "bytes (there is no tokenizer)" if self.tokenizer is None else "the tokenizer"
            raise PipelineError(
                f"{who} gave token {most - 1}, and the model has a vocabulary of {known}: set "
                f"vocab_size to {most if self.tokenizer is None else len(self.tokenizer)} or more"
            )
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and length > positions:
            raise PipelineError(
                f"windows of {length} tokens are longer than the model's {positions} positions: "
                f"--length {positions}"
            )


def load_model(settings: TrainSettings) -> LanguageModel:
    """The model that ``settings`` names; no parameter takes memory.

    Raises:
        PipelineError: there is no such model, or it cannot be built.
    """
    path = Path(settings.model)
    if path.exists():
        if settings.overrides:
            raise PipelineError("--set is for MODULE:FUNCTION; of a folder, edit its config.json")
        return _of_transformers(path)
    if ":" in settings.model:
        return LanguageModel(model_of(meta_model(prepared(settings.model, settings.overrides))))
    raise PipelineError(
        f"there is no folder {settings.model!r}: give a folder with the config.json of a model of "
        "transformers (models are not downloaded: model.save_pretrained(folder)), such a config "
        "itself, or MODULE:FUNCTION"
    )


def _of_transformers(path: Path) -> LanguageModel:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        # Otherwise the keys and values of all layers are outputs of the model.
        config.use_cache = config.get_text_config().use_cache = False
        # Trained in float32, whatever the config says of the dtype that it is saved in.
        build = functools.partial(AutoModelForCausalLM.from_config, config, dtype=torch.float32)
        model = meta_model(build)
        tokenizer = None
        if any((path / name).exists() for name in _TOKENIZERS):
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever transformers raises for a config that it does not know
        reason = str(error).strip().partition("\n")[0]
        raise PipelineError(
            f"transformers makes no causal language model of {str(path)!r}: "
            f"{type(error).__name__}: {reason[:_LONGEST]}"
        ) from error
    _refuse_encoder(model_of(model).config)
    return LanguageModel(model, tokenizer, path if any(path.glob("*.safetensors")) else None)


def _refuse_encoder(config: Any) -> None:
    """BERT and its kind are made for causal language modelling without a word, and see what
    follows unless they are told to be decoders.

    Raises:
        PipelineError: it is one of them.
    """
    told = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not told:
        raise PipelineError(
            f"a model of {config.model_type!r} sees the tokens that it is to predict, and would "
            'learn to copy them: set "is_decoder": true in its config.json'
        )


def next_token_loss(output: Any, targets: Tensor) -> Tensor:
    """Cross-entropy in float32: what ``model(ids, labels=ids)`` of transformers takes."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
