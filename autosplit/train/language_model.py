"""What is trained: a model by a folder or config of transformers, or by a function."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
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

from autosplit.compare.factory import prepared
from autosplit.errors import PipelineError
from autosplit.planner.meta_model import meta_model, model_of

MICROBATCHES_PER_RANK = 2


@dataclass(frozen=True)
class TrainSettings:
    """One run; every rank has the same.

    Attributes:
        model: a folder of transformers, its ``config.json``, or ``MODULE:FUNCTION``.
        data: a file of UTF-8 text.
        ranks: processes, one stage each.
        overrides: keyword settings of the function.
        steps: at which step to end; None: behind one pass through the text.
        batch: windows of text in a step; None: one a microbatch.
        microbatches: M; None: ``MICROBATCHES_PER_RANK`` for each rank.
        length: tokens in a window.
        schedule: see ``autosplit.partition``.
        learning_rate: of AdamW.
        memory_limit: see ``autosplit.partition``.
        seed: of what the model draws; each rank adds its number.
        estimate: cut by FLOPs and bytes rather than by measured times.
        checkpoint: the folder of the run's checkpoint; None: none is written.
        every: steps between two checkpoints; None: one, at the end.
        resume: go on from the checkpoint, if there is one.
        history: a file of JSON lines, one a step; None: none is written.

    Raises:
        PipelineError: values that cannot be, or do not go together.
    """

    model: str
    data: Path
    ranks: int
    overrides: Mapping[str, str] = field(default_factory=dict)
    steps: int | None = None
    batch: int | None = None
    microbatches: int | None = None
    length: int = 128
    schedule: str = "1f1b"
    learning_rate: float = 1e-3
    memory_limit: str | None = None
    seed: int = 0
    estimate: bool = False
    checkpoint: Path | None = None
    every: int | None = None
    resume: bool = False
    history: Path | None = None

    def __post_init__(self) -> None:
        if self.samples % self.parts:
            raise PipelineError(
                f"a batch of {self.samples} windows cannot be cut into {self.parts} equal "
                f"microbatches: --batch {self.parts * max(1, self.samples // self.parts)}, or "
                "another number of --microbatches"
            )
        if not self.learning_rate > 0:
            raise PipelineError(f"--lr is a positive number; got {self.learning_rate}")
        for name, value in (("--every", self.every), ("--resume", self.resume)):
            if value and self.checkpoint is None:
                raise PipelineError(f"{name} has no effect without --checkpoint FOLDER")

    @property
    def parts(self) -> int:
        """M."""
        return self.microbatches or MICROBATCHES_PER_RANK * self.ranks

    @property
    def samples(self) -> int:
        """Windows of text in a step."""
        return self.batch or self.parts


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
