"""The tape of one step on one rank: digests of the arguments and results of its actions, and kept
tensors.

::

    before the first action   parameters and buffers; buffers that F writes are copied
    each F, I and B           arguments and results are noted; arguments are kept
    before a rank waits       digests of noted tensors; earlier if they outgrow the caches
    after the actions         digests of the rest; of gradients, if ranks compare or must check them
    before a step is written  digests of gradients

All but the first stage's rank wait for a message before their first action, so that the digests of
their parameters cost the step no time. After the kernels of an action, the code of a digest is in
no cache, and the first digest takes ten times as long as the next: therefore digests are computed
for several actions together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from autosplit.device import settle
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.schedule.schedule import BACKWARDS, Action, ActionKind
from autosplit.pipeline.simulation.simulate import Span
from autosplit.recorder.digests import PendingDigests
from autosplit.runtime.storages import is_plain, storage_of
from autosplit.stage import Stage
from autosplit.torch_internals.state import versions

_NOTED = 4 << 20
"""The most bytes of tensors that wait for their digests. Caches of the last level have more."""

Record: TypeAlias = "dict[str, Any]"
"""The record of a step, as JSON has it; digests are lists."""


class NamedDigests(NamedTuple):
    """Digests by the names of their tensors."""

    names: list[str]
    places: slice


class StepTape:
    """Records one step.

    Args:
        step: the number of the step.
        stages: this rank's stages.
        state: by stage, its parameters and buffers by name; buffers that F writes are copies.
        batch: the tensors of the batch, which the caller keeps alive.
        keep: the most bytes of other tensors that the tape keeps.
        seeds: the seeds of the step.
        device: the device of the stages.
        reduces: whether gradients are reduced over ranks or scaled after they were summed.
        scales: whether losses are scaled, so that gradients may be infinite.

    Attributes:
        kept: by action, the tensors that it got; None for a tensor that does not exist or is over
            the limit.
        state: as passed.
        metrics: the metrics of the step, once they are known.
        faults: by alarm, the actions that gave or found a wrong tensor, each with a text; None for
            a gradient.
    """

    def __init__(
        self,
        step: int,
        stages: Mapping[int, TrainableStage],
        state: Mapping[int, dict[str, Tensor]],
        batch: Iterable[Tensor | None],
        keep: int,
        seeds: StageSeeds,
        device: torch.device,
        *,
        reduces: bool,
        scales: bool,
    ) -> None:
        self._scales = scales
        self._step, self._stages, self._left, self._seeds = step, stages, keep, seeds
        self._device = device
        self._batch = {storage_of(tensor) for tensor in batch if tensor is not None}
        self._digests = PendingDigests()
        self._notes: list[tuple[Action, str, list[Tensor | None]]] = []
        self._noted_bytes = 0
        self._places: dict[Action, dict[str, slice]] = {}
        self.kept: dict[Action, list[Tensor | None]] = {}
        self._functions: dict[Action, Any] = {}
        self._stage_tensors: list[tuple[Action, NamedDigests]] = []
        self.state, self.metrics = state, dict[str, float]()
        self.faults: dict[str, list[tuple[Action | None, str]]] = {}
        self._state: dict[int, NamedDigests] = {}
        self._gradients: dict[int, NamedDigests] = {}
        self._gradient_tensors: dict[int, dict[str, Tensor]] = {}
        self._spans: Sequence[Span] = ()
        self._versions = {index: versions(named.values()) for index, named in state.items()}
        rows = [{id(tensor): tensor for tensor in named.values()} for named in state.values()]
        tensors = {number: tensor for row in rows for number, tensor in row.items()}
        # A replay sums the gradients of one stage, into nothing.
        self._comparable = (
            not reduces
            and len(tensors) == sum(map(len, rows))
            and all(tensor.grad is None for tensor in tensors.values())
        )

    def note_arguments(self, action: Action, tensors: Sequence[Tensor | None]) -> None:
        """Record the arguments of an action, before it runs."""
        self._places[action] = {}
        self._note(action, "took", tensors)

    def note_held(self, action: Action) -> None:
        """Record the tensors that the stage holds of the action's microbatch, before or after
        it.
        """
        stage = self._stages[action.stage]
        if isinstance(stage, Stage):
            self._stage_tensors.append(
                (action, self._queue(held_tensors(stage, action.microbatch)))
            )

    def note_results(self, action: Action, tensors: Sequence[Tensor | None]) -> None:
        """Record the results of an action."""
        self._note(action, "gave", tensors)
        if action.kind is ActionKind.FORWARD:
            functions = getattr(self._stages[action.stage], "functions", None)
            self._functions[action] = functions

    def _note(self, action: Action, part: str, tensors: Sequence[Tensor | None]) -> None:
        self._notes.append((action, part, [*tensors]))
        for tensor in tensors:
            if tensor is not None:
                self._noted_bytes += tensor.nbytes
        if self._noted_bytes > min(_NOTED, self._left):
            self.compute_digests()

    def compute_digests(self) -> None:
        """Compute the digests of noted tensors, and keep arguments."""
        for action, part, tensors in self._notes:
            self._places[action][part] = self._digests.queue(tensors, finite=part == "gave")
            if part == "took":
                self.kept[action] = [*map(self._keep, tensors)]
        self._notes.clear()
        self._noted_bytes = 0

    def note_state(self) -> None:
        """Record parameters and buffers, if no action has run yet."""
        if not self._state:
            # Caches have the last ones, which the optimizer wrote, and F needs the first ones next.
            for index, named in self.state.items():
                self._state[index] = self._queue(dict(reversed(named.items())))

    def _queue(self, named: Mapping[str, Tensor | None], *, finite: bool = False) -> NamedDigests:
        return NamedDigests([*named], self._digests.queue(named.values(), finite=finite))

    def functions_of(self, index: int) -> dict[int, Any]:
        """The graphs of a stage by microbatch, in the order in which the microbatches began F.

        A microbatch whose F raised has the graphs that the stage used last. None for a stage
        without graphs.
        """
        latest = getattr(self._stages[index], "functions", None)
        return {
            action.microbatch: self._functions.get(action, latest)
            for action in self._places
            if action.stage == index and action.kind is ActionKind.FORWARD
        }

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

    def end(
        self, spans: Sequence[Span], *, are_finite: bool = False, compares: bool = True
    ) -> None:
        """Keep the sums of gradients, and read all digests from the device, for which the call
        waits. After an error, the tape has only the actions that ran.

        Args:
            spans: the times of actions.
            are_finite: whether it is known that all numbers of gradients are finite.
            compares: whether to compute digests of gradients before ``record`` needs them.
        """
        self._spans = spans
        self.note_state()
        self.compute_digests()
        for index, state in self.state.items():
            gradients = {name: t.grad for name, t in state.items() if t.grad is not None}
            self._gradient_tensors[index] = gradients
        if compares or not are_finite:
            self._note_gradients(finite=not are_finite)
        settle(self._device)
        self._digests.reduce()
        self._seed_of = {
            action: self._seeds.seed_of(action.stage, action.microbatch)
            for action in self._places
            if action.kind is ActionKind.FORWARD
        }
        self.faults = {
            "nonfinite": [*self._nonfinite_tensors()],
            "memory": [*self._changed_tensors()],
        }

    def _note_gradients(self, *, finite: bool) -> None:
        for index, gradients in self._gradient_tensors.items():
            self._gradients[index] = self._queue(gradients, finite=finite)
        self._gradient_tensors.clear()

    def release(self) -> None:
        """Drop all tensors. The record stays."""
        self.kept, self.state, self._functions, self._stages = {}, {}, {}, {}
        self._gradient_tensors.clear()

    def record(self) -> Record:
        """The record of the step. After ``release``, it has only digests of gradients that were
        computed.
        """
        self._note_gradients(finite=False)
        read = self._digests.read
        actions: dict[str, Record] = {}
        for action, parts in self._places.items():
            row = actions[str(action)] = {name: read(part) for name, part in parts.items()}
            if action in self._seed_of:
                row["seed"] = self._seed_of[action]
        for alarm, faults in self.faults.items():
            for place, text in faults:
                if place is not None:
                    actions.setdefault(str(place), {}).setdefault(alarm, text)
        for span in self._spans:
            actions.setdefault(str(span.action), {}).update(start=span.start, end=span.end)
        state, gradients = (
            {index: dict(zip(names, read(at), strict=True)) for index, (names, at) in row.items()}
            for row in (self._state, self._gradients)
        )
        return {
            "step": self._step,
            "actions": actions,
            "state": state,
            "versions": self._versions,
            "gradients": gradients,
            "comparable": self._comparable,
            "metrics": self.metrics,
        }

    def checksum(self, parameters: Iterable[tuple[int, str]]) -> int:
        """A checksum of parameters, as (stage, name), and of their gradients; 0 for none."""
        rows: list[list[int] | None] = []
        for stage, name in parameters:
            for names, places in (self._state[stage], self._gradients[stage]):
                if name in names:
                    at = places.start + names.index(name)
                    rows += self._digests.numbers(slice(at, at + 1))
        return crc32(repr(rows).encode()) if rows else 0

    def _changed_tensors(self) -> Iterator[tuple[Action | None, str]]:
        """Tensors whose bits changed while a stage held them, with the action that found it."""
        left: dict[tuple[int, int, str], Any] = {}
        for action, named in self._stage_tensors:
            for name, numbers in zip(named.names, self._digests.numbers(named.places), strict=True):
                key = action.stage, action.microbatch, name
                if left.setdefault(key, numbers) != numbers:
                    yield action, f"{name} has other bits before {action} than it was left with"

    def _nonfinite_tensors(self) -> Iterator[tuple[Action | None, str]]:
        """Results and gradients that are not finite, with the action that gave them.

        Outputs are only checked if they get a gradient; others, such as masks, may be infinite.
        With loss scaling, gradients may be infinite, too.
        """
        finite = self._digests.finite
        for action, parts in self._places.items():
            counts: Iterable[bool] = itertools.repeat(not self._scales)
            if action.kind is ActionKind.FORWARD:
                counts = [spec[2] for spec in self._stages[action.stage].output_specs]
            gave = finite(parts["gave"]) if "gave" in parts else []
            for at, (is_finite, count) in enumerate(zip(gave, counts, strict=False)):
                if count and is_finite is False:
                    yield action, f"result {at} of {action} is not finite"
        for index, (names, places) in self._gradients.items() if not self._scales else ():
            for name, is_finite in zip(names, finite(places), strict=True):
                if is_finite is False:
                    yield None, f"the gradient of {name} in stage {index} is not finite"

    def gradients_come(self, index: int) -> list[bool]:
        """For each output of a stage, whether its first backward took a gradient; empty if none has
        started.
        """
        backwards = (a for a in self._places if a.stage == index and a.kind in BACKWARDS)
        took = next((self._digests.read(self._places[a]["took"]) for a in backwards), [])
        return [digest is not None for digest in took]


def held_tensors(stage: Stage, microbatch: int) -> dict[str, Tensor | None]:
    """The tensors that the stage holds of the microbatch, by name, except views of gathered
    parameters.
    """
    shares = stage.sharding.shares_parameter_memory
    return {
        f"held {name}": tensor
        for residuals in stage.residuals_of(microbatch)
        for name, tensor in residuals.named_tensors.items()
        if not shares([tensor])
    }
