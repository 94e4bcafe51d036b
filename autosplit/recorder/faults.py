"""Find the action of a recorded step that went wrong first, and the operator in it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.passes.graph import value_text
from autosplit.pipeline.schedule.schedule import METHODS, Action, ActionKind
from autosplit.recorder.digests import digest
from autosplit.recorder.program import OriginSearch, Role
from autosplit.recorder.replay import StepReplay

_F, _I = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT
_SUMMED = (ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD)
_FAULTY_STATE = {"NaN": ("parameter", "buffer"), "infinity": ("parameter",)}
"""Kinds of state that never have a fault on purpose. Buffers may be masks of infinities."""
_GRADIENTS = ("input_grad", "parameter_grad")


class FaultSearch:
    """Compares the actions of a recorded step with their replay.

    Args:
        step: the recorded step.
        bound: the largest magnitude that counts as right.
    """

    def __init__(self, step: StepReplay, bound: float = math.inf) -> None:
        self._step, self._bound = step, bound
        self._state_faults: dict[int, str] = {}
        self._sums: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def findings(self, actions: Sequence[Action]) -> Iterator[tuple[Action, str]]:
        """Run each action again, and yield (action, text on its fault; empty if it has none).

        Results are kept until the next microbatch. The sum of a stage's weight gradients is
        compared if all actions that add to it are run, in the order of the recorded run.
        """
        left = Counter(action.stage for action in actions)
        step = self._step
        in_run = sorted(step.records, key=lambda a: step.records[a].get("start", 0.0))
        comparable = {s for s in left if _sum_order(actions, s) == _sum_order(in_run, s)}
        for action in actions:
            left[action.stage] -= 1
            if any(a.microbatch != action.microbatch for a in step.results):
                step.results.clear()
            text = self._fault_of(action)
            if not text and not left[action.stage] and action.stage in comparable:
                text = self._sum_fault(action.stage)
            yield action, text and f"{action} on rank {step.rank_of(action)}: {text}"

    def recorded_fault(self, actions: Sequence[Action]) -> tuple[Action, str] | None:
        """The first action with a fault by its record, and text on the fault; None if there is
        none. Nothing is run.
        """
        for action in actions:
            row = self._step.records[action]
            if text := row.get("nonfinite") or row.get("memory"):
                rank = self._step.rank_of(action)
                return action, f"{action} on rank {rank}: {text}, by the record"
        return None

    def _fault_of(self, action: Action) -> str:
        """Text on the fault of an action; empty if it has none."""
        step, row = self._step, self._step.records[action]
        facts = step.graph_facts(action)
        if action.stage not in self._state_faults:
            self._state_faults[action.stage] = self._state_fault(action.stage)
        if text := (
            self._state_faults[action.stage] or self._message_fault(action) or row.get("memory", "")
        ):
            return text
        if METHODS[action.kind] not in facts["programs"]:  # a frozen first stage has no backward
            return ""
        step.program_arguments(action)  # an error of an earlier action is none of this one
        try:
            results = step.results_of(action)
        except Exception:
            return self._origin(action, None)
        sums = self._sums[action.stage]
        for at, ((kind, name), value) in enumerate(results.items()):
            # Outputs without a gradient are not checked: masks may be infinite.
            is_checked = kind in _GRADIENTS or (kind == "output" and name in facts["tangents"])
            if is_checked and self._fault(value):
                return self._origin(action, at)
            if kind == "parameter_grad":
                dtype = getattr(torch, facts["grad_dtype"] or str(value.dtype)[6:])
                total = sums.get(name)
                sums[name] = value.to(dtype, copy=True) if total is None else total.add_(value)
        pairs = zip(step.gave(action), row.get("gave", ()), strict=False)
        for at, (value, recorded) in enumerate(pairs):
            if self._is_exact(action.stage) and _differs(value, recorded):
                return f"result {at}, {_described(value)}, has other bits than in the run"
        return ""

    def _fault(self, value: Any) -> str:
        if isinstance(value, list | tuple):
            return next(filter(None, map(self._fault, value)), "")
        if not isinstance(value, Tensor) or not value.numel():
            return ""
        largest = float(value.abs().max()) if value.is_floating_point() else 0.0
        if math.isnan(largest):
            return "NaN"
        if math.isinf(largest):
            return "infinity"
        return f"a magnitude above {self._bound:g}" if largest > self._bound else ""

    def _is_exact(self, stage: int) -> bool:
        """Whether a replay has the same bits as the run, because the same kernels run."""
        facts = self._step.facts
        same = facts["device"] == "cpu" and facts["torch"] == torch.__version__
        return bool(same and self._step.stage_facts(stage)["exact"])

    def _state_fault(self, stage: int) -> str:
        """Text on a parameter or buffer whose bits have changed since the step began; empty if none
        has.
        """
        part = self._step.homes[stage]
        for name, recorded in part.facts["steps"][-1]["state"][str(stage)].items():
            if _differs(part.tensors["state"][stage][name], recorded):
                shown = name.removeprefix(self._step.stage_facts(stage)["prefix"])
                return f"{shown} has other bits than when the step began"
        return ""

    def _message_fault(self, action: Action) -> str:
        """Text on a tensor that changed on its way to an action; empty if none did."""
        records = self._step.records
        took = records[action].get("took", ())
        sent = self._step.upstream(action, lambda need: records.get(need, {}).get("gave"))
        for at, (sent_row, taken_row) in enumerate(zip(sent, took, strict=False)):
            if sent_row and taken_row and len(sent_row) == 4 and sent_row[2] != taken_row[2]:
                return f"argument {at} has other bits than its sender computed"
        return ""

    def _sum_fault(self, stage: int) -> str:
        """Text on a weight gradient whose sum has other bits than in the recorded run; empty if all
        sums are equal.
        """
        record = self._step.homes[stage].facts["steps"][-1]
        adds_exactly = self._step.stage_facts(stage)["adds_exactly"]
        if record["comparable"] and adds_exactly and self._is_exact(stage):
            for name, recorded in record["gradients"][str(stage)].items():
                total = self._sums[stage].get(name)
                if total is not None and _differs(total.to(getattr(torch, recorded[1])), recorded):
                    shown = name.removeprefix(self._step.stage_facts(stage)["prefix"])
                    return f"the gradient of {shown}, summed over microbatches, has other bits"
        return ""

    def _origin(self, action: Action, result: int | None) -> str:
        """Lines of text on the operator that first computed a wrong value."""
        step, program = self._step, self._step.program(action)
        *earlier, rows = [step.samples_of(action.stage, m) for m in range(action.microbatch + 1)]
        arguments, samples = step.program_arguments(action), self._sample_arguments(action)
        with step.as_in_run(action):
            search = OriginSearch(program, arguments, self._fault, rows, samples)
            origin = search.origin(result)
        if origin.argument and origin.argument[0] in _FAULTY_STATE.get(origin.reason, ()):
            return self._state_origin(action, origin.argument)
        name = next(iter(origin.statement.names), "")
        module, line = program.facts["lines"].get(name, ["", ""])
        lines = [
            f"{origin.reason} in {origin.statement.operator}",
            f"module    {module or 'the loss, or the stage itself'}",
            f"line      {line or 'unknown'}",
        ]
        if origin.samples:
            # An earlier microbatch of the batch may not have begun.
            first, batch = (sum(earlier), "the batch, in ") if all(earlier) else (0, "")
            numbers = ", ".join(str(first + sample) for sample in origin.samples)
            lines.append(f"samples   {numbers} of {batch}microbatch {action.microbatch}")
        width = max([9, *map(len, origin.values)])
        lines += [f"{name:{width}} {_described(value)}" for name, value in origin.values.items()]
        return "\n  ".join(lines)

    def _state_origin(self, action: Action, role: Role) -> str:
        """Lines of text on a parameter or buffer that was not finite before an action."""
        (kind, name), value = role, self._step.argument(action, *role)
        began = "the step" if self._fault(self._step.state_of(action.stage, name)) else str(action)
        shown = name.removeprefix(self._step.stage_facts(action.stage)["prefix"])
        place = (~value.isfinite()).nonzero()[0].tolist()
        lines = [
            f"{kind} {shown} was not finite when {began} began",
            f"where     first at {place}",
            f"{shown:9} {_described(value)}",
            "do        load a checkpoint in which it is finite; the step before, or the checkpoint "
            "that the run loaded, has the cause",
        ]
        return "\n  ".join(lines)

    def _sample_arguments(self, action: Action) -> set[Role]:
        """The roles of an action's arguments that derive from inputs or gradients of outputs; the
        others derive from parameters and buffers alone.
        """
        inputs = self._step.program(action).facts["inputs"]
        roles: set[Role] = {(kind, name) for kind, name in inputs}
        samples = {role for role in roles if role[0] in ("input", "tangent")}
        for kind, call in (("saved", _F), ("deferred", _I)):
            if any(role[0] == kind for role in roles):
                maker = Action(action.stage, call, action.microbatch)
                samples |= self._step.program(maker).sample_results(self._sample_arguments(maker))
        return samples & roles


def _sum_order(actions: Sequence[Action], stage: int) -> list[int]:
    """The microbatches in the order in which these actions add their gradients to a stage's sum."""
    return [a.microbatch for a in actions if a.stage == stage and a.kind in _SUMMED]


def _differs(value: Any, recorded: Sequence[Any] | None) -> bool:
    return isinstance(value, Tensor) and recorded is not None and digest(value).mark != recorded[2]


def _described(tensor: Tensor) -> str:
    """Text with the dtype, shape and range of a tensor."""
    text = value_text(tensor)
    if tensor.is_complex() or not tensor.numel():
        return text
    finite = tensor[tensor.isfinite()]
    bounds = f" in [{finite.min():.4g}, {finite.max():.4g}]" if finite.numel() else ""
    wrong = tensor.numel() - finite.numel()
    return text + bounds + (f", {wrong} of {tensor.numel()} numbers not finite" if wrong else "")
