"""What each rank does with one architecture."""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor

import autosplit
from autosplit import errors
from autosplit.pipeline import RunOptions
from autosplit.ranks.first_error import RankError

from ..examine import Verdict
from ..observe import Observed, seed_everything
from .lesson import MICROBATCHES, STEPS, Lesson, gradients, losses, optimizer, state
from .reference import SEED, count_draws

_TYPED = tuple(
    name
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, errors.AutosplitError)
)
# What says where things are installed, before what says which file it is.
_INSTALLED = re.compile(r"[^\s:'\"()]*/(?:site-packages/|(?=autosplit/|passes/|benchmarks/))")


@dataclass(frozen=True)
class Trained:
    """What came of one rank.

    Attributes:
        verdict: None where all steps were made.
        detail: why there are none.
        cut: where the model is cut.
        draws: how many operators of a microbatch's forward draw random numbers on the first rank;
            known there.
        seen: what this rank has seen.
    """

    verdict: Verdict | None = None
    detail: str = ""
    cut: str = ""
    draws: int = 0
    seen: Observed = field(default_factory=dict)


def train_on_rank(name: str, stages: int, timeout: float) -> Trained:
    """Cut the architecture as a user does, and train it."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lesson = Lesson(name)
        try:
            return _trained(lesson, stages, timeout)
        except RankError as error:
            return _failed(error, error.fault.error)
        except Exception as error:
            return _failed(error, f"{type(error).__name__}: {error}")


def _trained(lesson: Lesson, stages: int, timeout: float) -> Trained:
    plan = autosplit.partition(
        lesson.model,
        kwargs=lesson.example,
        stages=stages,
        microbatches=MICROBATCHES,
        costs="estimate",
    )
    seen: Observed = {}
    with plan.trainer(
        lesson.loss,
        optimizer,
        run_options=RunOptions(timeout=timeout),
    ) as trainer:
        modules = trainer.modules.values()
        seed_everything(SEED)
        for step in range(STEPS):
            values = trainer.forward_backward((lesson.batch(step), ()))
            seen |= losses(values, step)
            for module in modules:
                seen |= gradients(module, step)
            if trainer.optimizer is not None:
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
            for module in modules:
                seen |= state(module, step)
        draws = 0
        if 0 in trainer.modules:
            tensors = [value for value in lesson.example.values() if isinstance(value, Tensor)]
            given = [tensors[source.position] for source in plan.wiring.inputs[0]]
            draws = count_draws(lambda: trainer.modules[0](*given))
    return Trained(cut=", ".join(plan.cuts), draws=draws, seen=seen)


def _failed(error: Exception, text: str) -> Trained:
    """A refusal, if autosplit raised it on purpose, of whatever rank."""
    typed = text.partition(":")[0] in _TYPED
    detail = _INSTALLED.sub("", " ".join(text.split()))[:600]
    if not typed:
        trace = traceback.extract_tb(error.__traceback__)
        cause = error.__cause__
        if cause is not None and cause.__traceback__ is not None:
            trace = traceback.extract_tb(cause.__traceback__)
        detail += f" (at {_INSTALLED.sub('', trace[-1].filename)}:{trace[-1].lineno})"
    return Trained(Verdict.REFUSED if typed else Verdict.CRASHED, detail)
