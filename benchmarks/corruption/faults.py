"""Faults that change numbers and end nothing by themselves, and how each is put into a rank."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.pipeline import PipelineTrainer
from autosplit.pipeline.engine.transport import Mailbox
from autosplit.pipeline.schedule.schedule import METHODS, Action, ActionKind
from autosplit.recorder.tape import StepTape
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import Residuals

BITS = {
    "output": "F",
    "saved": "F",
    "input gradient": "IB",
    "deferred": "I",
    "weight gradient": "WB",
}
"""Bits that flip in an action, or while its stage holds what it left; the kinds of actions."""
KINDS = ("NaN", "target", *BITS, "held", "message", "parameter", "reduction")


@dataclass(frozen=True)
class Fault:
    """One fault of a run.

    Attributes:
        kind: one of ``KINDS``.
        ranks: the number of ranks.
        seed: chooses the action, the tensor, the element and the bit.
    """

    kind: str
    ranks: int
    seed: int

    @property
    def name(self) -> str:
        """The fault in a line."""
        return f"{self.kind}, {self.ranks} ranks, seed {self.seed}"


def faults(count: int) -> Iterator[Fault]:
    """So many faults, of all kinds alike, on two and four ranks."""
    pairs = [(kind, ranks) for kind in KINDS for ranks in (2, 4)]
    pairs = [pair for pair in pairs if pair != ("reduction", 2)]  # two replicas of two stages
    for seed, (kind, ranks) in zip(range(count), itertools.cycle(pairs), strict=False):
        yield Fault(kind, ranks, seed)


def flip(tensors: list[Any], dice: random.Random) -> None:
    """Flip one bit of one element of one of these tensors, unseen by autograd."""
    floats = [
        t for t in tensors if isinstance(t, Tensor) and t.dtype is torch.float32 and t.numel()
    ]
    words = dice.choice(floats).data.view(torch.int32)
    place = tuple(dice.randrange(size) for size in words.shape)
    words[place] ^= 1 << dice.randrange(23)  # of the mantissa: it stays finite


FLIPPING: dict[str, Any] = {}
"""The action whose message has a bit that flips, with the activity of the rank, and the dice."""


def messages_flipped() -> Any:
    """A patch of what receives messages, to be entered before a trainer binds it."""
    original = Mailbox.await_message

    def receive(*args: Any) -> Any:
        tensors = original(*args)
        if FLIPPING and FLIPPING["activity"].action == FLIPPING["action"]:
            flip(tensors, FLIPPING["dice"])
        return tensors

    return mock.patch.object(Mailbox, "await_message", receive)


@contextlib.contextmanager
def happening(fault: Fault, trainer: PipelineTrainer, action: Action) -> Iterator[None]:
    """Let a fault happen in each step that runs inside, on the rank that has the action's stage.

    Args:
        fault: the fault.
        trainer: the trainer of this rank.
        action: the action.
    """
    dice, activity = random.Random(fault.seed), trainer._groups.activity
    if trainer.schedule.placement[action.stage] != trainer.rank:
        yield
        return

    parameters = [p for module in trainer.modules.values() for p in module.parameters()]

    def around(original: Callable[..., Any], parts: Callable[[Any, set[int]], list[Any]]) -> Any:
        def call(*args: Any) -> Any:
            saved = args[1].tensors if isinstance(args[1], Residuals) else ()
            others = _places([*parameters, *saved])
            results = original(*args)
            if activity.action == action and not activity.waiting:
                flip(parts(results, others), dice)
            return results

        return call

    def results_of(kind: str) -> Callable[[Any, set[int]], list[Any]]:
        if kind == "output":
            return lambda results, _: results.outputs[:1]
        if kind == "saved":
            return lambda results, others: _free(results.saved, others)
        if kind == "deferred":
            return lambda results, others: _free(results[1], others)
        at = 0 if kind == "input gradient" else 1
        return lambda results, _: results[at] if isinstance(results, tuple) else results

    if fault.kind == "message":
        with mock.patch.dict(FLIPPING, action=action, activity=activity, dice=dice):
            yield
    elif fault.kind == "reduction":
        reduce = dist.all_reduce

        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = reduce(tensor, *args, **kwargs)
            if tensor.dtype is torch.float32 and dist.get_rank() == 0:
                if work is not None:
                    work.wait()
                flip([tensor[: tensor.numel() // 2]], dice)
            return work

        with mock.patch.object(dist, "all_reduce", all_reduce):
            yield
    elif fault.kind == "held":
        note, runner = StepTape.note_held, trainer._runner

        def note_and_flip(tape: StepTape, at: Action) -> None:
            """Flip a bit after the digests of what the action has left."""
            note(tape, at)
            stage: Any = runner.stages[at.stage]
            others = _places(parameters)
            left = [t for r in stage.residuals_of(at.microbatch) for t in _free(r, others)]
            if at == action and left:
                flip(left, dice)

        with mock.patch.object(StepTape, "note_held", note_and_flip):
            yield
    elif fault.kind == "parameter":
        stages = trainer.modules[action.stage]
        after = mock.patch.object(
            SplitFunctions,
            "run",
            around(SplitFunctions.run, lambda *_: [*stages.parameters()]),
        )
        with after:
            yield
    else:
        name = "run" if action.kind is ActionKind.FORWARD else METHODS[action.kind]
        call = around(getattr(SplitFunctions, name), results_of(fault.kind))
        with mock.patch.object(SplitFunctions, name, call):
            yield


def _places(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the tensors' storages."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _free(residuals: Any, others: set[int]) -> list[Tensor]:
    """The residuals that are whole storages, except for storages at other addresses: those of
    parameters, and for an I those that F has saved.
    """
    return [
        tensor
        for tensor in residuals.tensors
        if tensor.untyped_storage().nbytes() == tensor.nbytes
        and tensor.untyped_storage().data_ptr() not in others
    ]
