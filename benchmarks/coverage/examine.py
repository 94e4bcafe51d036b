"""Split one subject, run it beside plain autograd, and say what came of it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import re
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autosplit
from autosplit import AutosplitError

from .judge import differences, out_of_tolerance
from .observe import Observed, observe, seed_everything
from .subject import Call, NothingToDifferentiateError, Subject

ROUNDS = (2, 1)  # microbatches pending before each backward_weight()
# What says where things are installed, before what says which file it is.
_INSTALLED = re.compile(r"/[^\s:'\"]*/(?:site-packages/|lib/python3\.\d+/(?=\w)|(?=benchmarks/))")


class Verdict(enum.Enum):
    """What came of a subject, best first."""

    EQUAL = "equal"
    CLOSE = "equal within tolerance"
    REFUSED = "refused"
    WRONG = "WRONG"
    CRASHED = "CRASHED"
    NO_BACKWARD = "no backward in eager"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of one subject.

    Attributes:
        name: of the subject.
        verdict: the category.
        in_parts: no single graph holds it: parts are split, the rest is ordinary autograd.
        detail: what differs, why it was refused, or what was raised.
        warned: what autosplit warned of.
        share: of weight gradients, how much waits for W; None where that is not known.
        seconds: time taken.
    """

    name: str
    verdict: Verdict
    in_parts: bool = False
    detail: str = ""
    warned: tuple[str, ...] = ()
    share: float | None = None
    seconds: float = 0.0


class Split(Protocol):
    """What the harness needs of a split module."""

    def backward_weight(self) -> None: ...


Splitter = Callable[[nn.Module], Any]


def split_for_rounds(model: nn.Module) -> autosplit.SplitModule:
    return autosplit.split(model, max_pending=max(ROUNDS))


def examine(subject: Subject, splitter: Splitter = split_for_rounds) -> Finding:
    """Two microbatches pending, then one, with a step of descent in between."""
    start = time.perf_counter()
    torch.compiler.reset()
    seed_everything(0)
    model = subject.build()
    rounds = [[_call(subject) for _ in range(count)] for count in ROUNDS]
    twin, exact = copy.deepcopy(model), copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs = observe(twin, rounds, subject.loss, kept=subject.kept)
        except NothingToDifferentiateError as reason:
            return Finding(subject.name, Verdict.NO_BACKWARD, detail=str(reason))
        except Exception as error:
            return Finding(subject.name, Verdict.NO_BACKWARD, detail=_brief(error))
    finding = _against(subject, splitter, model, rounds, theirs, exact)
    return dataclasses.replace(finding, seconds=time.perf_counter() - start)


def _against(
    subject: Subject,
    splitter: Splitter,
    model: nn.Module,
    rounds: list[list[Call]],
    theirs: Observed,
    exact: nn.Module,
) -> Finding:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            split = splitter(model)
            mine = observe(
                split,
                rounds,
                subject.loss,
                backward_weight=split.backward_weight,
                kept=subject.kept,
            )
        except AutosplitError as error:
            return Finding(subject.name, Verdict.REFUSED, detail=_brief(error))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            file = _INSTALLED.sub("", where.filename)
            detail = f"{_brief(error)} (at {file}:{where.lineno})"
            return Finding(subject.name, Verdict.CRASHED, detail=detail)
    warned = tuple(dict.fromkeys(str(each.message) for each in caught))
    differing = differences(mine, theirs)
    parts = _parts(split)
    verdict, detail = Verdict.EQUAL, "" if parts is None else f"{parts} graphs are split"
    if differing:
        reference = _reference(subject, exact, rounds)
        wrong = out_of_tolerance(differing, mine, theirs, reference)
        verdict = Verdict.WRONG if wrong else Verdict.CLOSE
        detail = "; ".join(wrong[:5] or differing[:3])
    return Finding(subject.name, verdict, parts is not None, detail, warned, _share(split))


def _parts(split: Any) -> int | None:
    """How many parts of a module were split that no single graph holds; None for one graph."""
    partial = getattr(split, "_by_graphs", None)
    return None if partial is None else len(partial.parts)


def _share(split: Any) -> float | None:
    """How much of the elements of weight gradients waits for W."""
    partial = getattr(split, "_by_graphs", None)
    if partial is not None:
        share: float | None = partial.deferred_share
        return share
    functions = getattr(split, "functions", ())
    return functions[-1].dependence.deferred_share if functions else None


def _reference(subject: Subject, model: nn.Module, rounds: list[list[Call]]) -> Observed | None:
    """Plain autograd in float64; None where that cannot run."""
    wide = [[_double(call) for call in calls] for calls in rounds]
    try:
        return observe(model.double(), wide, subject.loss, kept=subject.kept)
    except Exception:
        return None


def _double(call: Call) -> Any:
    leaves, spec = pytree.tree_flatten(call)
    wide = {id(leaf): _wide(leaf) for leaf in leaves}  # one tensor given twice stays one
    return pytree.tree_unflatten([wide[id(leaf)] for leaf in leaves], spec)


def _wide(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().double().requires_grad_(leaf.requires_grad)


def _call(subject: Subject) -> Call:
    return subject.call()


def _brief(error: Exception) -> str:
    text = _INSTALLED.sub("", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:500]
