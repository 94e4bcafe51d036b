"""``ActionAudit`` runs an action a second time from the same arguments, and compares the bits.

::

    the action        runs on a copy of the stage; digests of its results
    the next action   takes the tensors that the stage has held since; digests of these, too
    a later wait      runs the action again on another copy, and compares the digests
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.device import settle
from autosplit.pipeline.schedule.schedule import METHODS, Action, ActionKind
from autosplit.recorder.digests import Digest, PendingDigests
from autosplit.recorder.tape import held_tensors
from autosplit.stage import Stage
from autosplit.text.figures import few

_INPUT_PREFIX = "taken "  # of the names of tensors that an action takes
_FOLLOWERS = {"F": "IB", "I": "W", "W": "", "B": ""}
"""The kinds that may take what an action leaves on its stage."""


class ActionAudit:
    """The audit of one action in one step.

    Args:
        action: an F, I, W or B; also an attribute.
        stage: its stage.
        rank: the rank, for messages.
        device: the device of the stage.
    """

    def __init__(self, action: Action, stage: Stage, rank: int, device: torch.device) -> None:
        self.action, self._stage = action, stage
        self._rank, self._device = rank, device
        self._arguments: list[list[Any]] = []
        self._snapshot = stage
        self._names: list[str] = []
        self._digests = PendingDigests()
        self._is_taken = False

    def wraps(self) -> Iterator[tuple[Action, Callable[..., Any]]]:
        """The functions around the action and the next one, see ``Executor.set_audits``."""
        stage, kind, microbatch = self.action.stage, self.action.kind, self.action.microbatch
        yield self.action, self._run
        for follower in _FOLLOWERS[kind.value]:
            yield Action(stage, ActionKind(follower), microbatch), self._run_next

    def _run(self, _: Callable[..., Any], *arguments: list[Any]) -> Any:
        """Run the action on a copy of its stage, and keep its arguments and the tensors that it
        takes from the stage."""
        microbatch, stage = self.action.microbatch, self._stage
        self._arguments = [[*tensors] for tensors in arguments]
        self._snapshot, copy = stage.copy_of(microbatch), stage.copy_of(microbatch)
        self._note(self._inputs())
        results = self._call(copy, *arguments)
        self._note(_computed(results, copy))
        stage.take_from(copy, microbatch)
        return results

    def _call(self, stage: Stage, *arguments: list[Any]) -> Any:
        return getattr(stage, METHODS[self.action.kind])(self.action.microbatch, *arguments)

    def _run_next(self, compute: Callable[..., Any], *arguments: list[Any]) -> Any:
        """Run the next action, which takes the tensors that the audited action has left on its
        stage."""
        self._note(held_tensors(self._stage, self.action.microbatch))
        self._is_taken = True
        return compute(*arguments)

    def _inputs(self) -> dict[str, Tensor | None]:
        """The tensors that the action takes, which another run must find unchanged."""
        tensors = [tensor for row in self._arguments for tensor in row]
        state = held_tensors(self._snapshot, self.action.microbatch)
        state |= {f"argument {place}": tensor for place, tensor in enumerate(tensors)}
        return {f"{_INPUT_PREFIX}{name}": tensor for name, tensor in state.items()}

    def _note(self, tensors: Mapping[str, Tensor | None]) -> None:
        self._names += tensors
        self._digests.queue(tensors.values())

    def run_again(self) -> str:
        """Run the action again, compare, and drop what was kept.

        Returns:
            Text that names the tensors with other bits, and says which of three runs differs, or
            that memory has changed between two runs; empty without a difference.
        """
        if not self._is_taken:
            self._note(held_tensors(self._stage, self.action.microbatch))
        first, second = self._read(self._names, self._digests), self._run_copy()
        names = [name for name, value in first.items() if second[name] != value]
        text = names and (
            f"rank {self._rank}: {self.action} had other bits when it ran again, in "
            f"{few(names, 4)}; {self._verdict(names, first, second)}"
        )
        self._arguments, self._snapshot = [], self._stage
        return text or ""

    def _verdict(
        self,
        names: Sequence[str],
        first: Mapping[str, Digest | None],
        second: Mapping[str, Digest | None],
    ) -> str:
        """Say which of three runs was wrong, or that memory has changed between two runs.

        Args:
            names: the tensors that differ.
            first: the digests of the first run, by name.
            second: the digests of the second run.
        """
        if any(name.startswith(_INPUT_PREFIX) for name in names):
            return "a tensor that it took has changed in memory since"
        third = self._run_copy()
        for number, other in (("first", second), ("second", first)):
            if all(other[name] == third[name] for name in names):
                return f"the {number} of three runs was wrong"
        return "all three runs differ"

    def _run_copy(self) -> dict[str, Digest | None]:
        """The digests of another run, by name."""
        microbatch, stage = self.action.microbatch, self._snapshot.copy_of(self.action.microbatch)
        results = self._call(stage, *([*tensors] for tensors in self._arguments))
        tensors = self._inputs() | _computed(results, stage) | held_tensors(stage, microbatch)
        return self._read(tensors, PendingDigests(tensors.values()))

    def _read(self, names: Iterable[str], digests: PendingDigests) -> dict[str, Digest | None]:
        settle(self._device)
        return dict(zip(names, digests.read(), strict=True))


def _computed(results: list[Tensor | None] | None, stage: Stage) -> dict[str, Tensor | None]:
    """The results of an action, and the weight gradients of the copy on which it ran."""
    named = {f"result {place}": tensor for place, tensor in enumerate(results or ())}
    return named | {f"gradient of {name}": tensor for name, tensor in stage.gradients.items()}
