"""The tape of one step on one rank: digests of the arguments and results of its actions, and kept
tensors.

::

    before the actions   digests and versions of parameters, copies of buffers that F writes
    each F, I and B      digests of what it took and gave; what it took is kept, within a limit
    after the actions    digests of gradients; all numbers are read, which makes the record
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autosplit.device import settle
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.schedule.schedule import BACKWARDS, Action, ActionKind
from autosplit.pipeline.simulation.simulate import Span
from autosplit.recorder.digests import Digest, PendingDigests
from autosplit.runtime.residuals import is_plain, storage_of
from autosplit.stage import Stage
from autosplit.torch_internals.state import StateReader, versions

Record: TypeAlias = "dict[str, Any]"
"""The record of a step, as JSON has it; digests are lists."""


class StepTape:
    """Records one step.

    Args:
        step: the number of the step.
        stages: this rank's stages.
        modules: the stages' modules, which are used for stages without graphs.
        batch: the tensors of the batch, which the caller keeps alive.
        keep: the most bytes of other tensors that the tape keeps.
        seeds: the seeds of the step.
        reduces: whether gradients are reduced over ranks or scaled after they were summed.

    Attributes:
        kept: by action, the tensors that it got; None for a tensor that does not exist or is over
            the limit.
        state: by stage, its parameters and buffers by name. Buffers that F writes are copies.
    """

    def __init__(
        self,
        step: int,
        stages: Mapping[int, TrainableStage],
        modules: Mapping[int, nn.Module],
        batch: Iterable[Tensor | None],
        keep: int,
        seeds: StageSeeds,
        *,
        reduces: bool,
    ) -> None:
        self._step, self._stages, self._left, self._seeds = step, stages, keep, seeds
        self._batch = {storage_of(tensor) for tensor in batch if tensor is not None}
        self._digests = PendingDigests()
        self._places: dict[Action, dict[str, slice]] = {}
        self.kept: dict[Action, list[Tensor | None]] = {}
        self._functions: dict[tuple[int, int], Any] = {}
        self.state = {index: _state_of(stage, modules[index]) for index, stage in stages.items()}
        self._state = {
            index: ([*named], self._digests.queue(named.values(), finite=False))
            for index, named in self.state.items()
        }
        self._gradients: dict[int, tuple[list[str], slice]] = {}
        self._versions = {index: versions(state.values()) for index, state in self.state.items()}
        tensors = (tensor for state in self.state.values() for tensor in state.values())
        self._comparable = not reduces and all(tensor.grad is None for tensor in tensors)

    def note_arguments(self, action: Action, tensors: Sequence[Tensor | None]) -> None:
        """Record the arguments of an action, before it runs."""
        self._places[action] = {"took": self._digests.queue(tensors, finite=False)}
        self.kept[action] = [*map(self._keep, tensors)]

    def note_results(self, action: Action, tensors: Sequence[Tensor | None]) -> None:
        """Record the results of an action."""
        self._places[action]["gave"] = self._digests.queue(tensors)
        if action.kind is ActionKind.FORWARD:
            functions = getattr(self._stages[action.stage], "functions", None)
            self._functions[action.stage, action.microbatch] = functions

    def functions_of(self, index: int) -> dict[int, Any]:
        """The graphs of a stage by microbatch, in the order in which the microbatches began F.

        Of a microbatch whose F raised, the graphs that the stage used last. None for a stage
        without graphs.
        """
        latest = getattr(self._stages[index], "functions", None)
        return {
            action.microbatch: self._functions.get((index, action.microbatch), latest)
            for action in self._places
            if action.stage == index and action.kind is ActionKind.FORWARD
        }

    def note_gradients(self, *, are_finite: bool = False) -> None:
        """Record the sums of gradients, when they are complete.

        Args:
            are_finite: whether it is known that all their numbers are finite.
        """
        for index, state in self.state.items():
            named = {name: t.grad for name, t in state.items() if t.grad is not None}
            places = self._digests.queue(named.values(), finite=not are_finite)
            self._gradients[index] = [*named], places

    def _keep(self, tensor: Tensor | None) -> Tensor | None:
        """The tensor, or a copy in the host's memory; None if the copy is over the limit."""
        if tensor is None or (is_plain(tensor) and storage_of(tensor) in self._batch):
            return tensor
        if tensor.dim() and tensor.nbytes > self._left:  # the loss's gradient cannot be computed
            return None
        self._left -= tensor.nbytes
        if tensor.device.type != "cpu":
            return tensor.to("cpu", non_blocking=True)
        return tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()

    def record(self, spans: Iterable[Span], device: torch.device) -> Record:
        """Read all digests from the device, and return the record of the step. After an error, the
        record has only the actions that ran.

        Args:
            spans: the times of actions.
            device: the device of the stages; the call waits for it.
        """
        if not self._gradients:
            self.note_gradients()
        settle(device)
        digests = self._digests.read()
        actions: dict[str, Record] = {}
        for action, parts in self._places.items():
            row = actions[str(action)] = {name: digests[part] for name, part in parts.items()}
            if action.kind is ActionKind.FORWARD:
                row["seed"] = self._seeds.seed_of(action.stage, action.microbatch)
        for span in spans:
            actions.setdefault(str(span.action), {}).update(start=span.start, end=span.end)
        return {
            "step": self._step,
            "actions": actions,
            "state": _named(self._state, digests),
            "versions": self._versions,
            "gradients": _named(self._gradients, digests),
            "comparable": self._comparable,
        }

    def nonfinite(self, record: Record, *, gradients: bool) -> str:
        """Text on the first result of the step that is not finite; empty if all are finite.

        Outputs are only checked if they get a gradient; others, such as masks, may be infinite.

        Args:
            record: the record of the step.
            gradients: whether gradients must be finite; with loss scaling they need not be.
        """
        for action in self._places:
            counts: Iterable[bool] = itertools.repeat(gradients)
            if action.kind is ActionKind.FORWARD:
                counts = [spec[2] for spec in self._stages[action.stage].output_specs]
            gave = record["actions"][str(action)].get("gave", ())
            for at, (digest, count) in enumerate(zip(gave, counts, strict=False)):
                if digest is not None and count and not digest.finite:
                    return f"result {at} of {action}"
        for index, named in record["gradients"].items() if gradients else ():
            for name, digest in named.items():
                if digest.finite is False:
                    return f"the gradient of {name} in stage {index}"
        return ""

    def gradients_come(self, index: int) -> list[bool]:
        """For each output of a stage, whether its first backward took a gradient; empty if none has
        started.
        """
        backwards = (a for a in self._places if a.stage == index and a.kind in BACKWARDS)
        digests = self._digests.read()
        took = next((digests[self._places[action]["took"]] for action in backwards), [])
        return [digest is not None for digest in took]


def _state_of(stage: TrainableStage, module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by the names that the stage's graphs use. Buffers that F writes are
    copied.
    """
    if not isinstance(stage, Stage):
        return StateReader(module).read()
    state = {**StateReader(stage.module).read()}
    written = {name for functions in stage.captured for name in functions.updated_state}
    return state | {name: state[name].clone() for name in written}


def _named(
    places: Mapping[int, tuple[Sequence[str], slice]], digests: Sequence[Digest | None]
) -> dict[int, dict[str, Digest | None]]:
    return {
        index: dict(zip(names, digests[part], strict=True))
        for index, (names, part) in places.items()
    }
