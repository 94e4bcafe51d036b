"""Run recorded actions again, on one machine without the model, and find the action that went wrong
first.

::

    F  takes  batch or outputs of earlier stages   kept, or computed by replaying these stages
    I  takes  saved of F, gradients of outputs     saved are computed by a replay of F
    W  takes  deferred of I
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import ReplayError
from autosplit.passes.graph import value_text
from autosplit.pipeline.engine.stage_arguments import (
    bind_arguments,
    gradients_for,
    output_gradients,
)
from autosplit.pipeline.schedule.routes import Source, StageDataflow, Wiring, needs_of
from autosplit.pipeline.schedule.schedule import METHODS, Action, ActionKind
from autosplit.pipeline.simulation.simulate import Span, Timeline
from autosplit.recorder.bundle import BundlePart
from autosplit.recorder.digests import digest
from autosplit.recorder.program import Program, Role
from autosplit.text.figures import few
from autosplit.torch_internals.pytree import tree_map

_F, _I = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT
_SUMMED = (ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD)
_FAULTY_STATE = {"NaN": ("parameter", "buffer"), "infinity": ("parameter",)}
"""Kinds of state that never have a fault on purpose. Buffers may be masks of infinities."""
_GRADIENTS = ("input_grad", "parameter_grad")


class StepReplay:
    """The recorded step of one pipeline.

    Args:
        parts: the parts of the bundle, by rank.
        pipeline: the number of the pipeline among its replicas.
        bound: the largest magnitude that counts as right.

    Attributes:
        facts: facts about the step, see ``bundle.BundlePart``.
    """

    def __init__(
        self, parts: Mapping[int, BundlePart], pipeline: int = 0, bound: float = math.inf
    ) -> None:
        self._parts, self._gathered = parts, dict[tuple[int, str], Tensor]()
        parts = {rank: p for rank, p in parts.items() if p.facts["pipeline"] == pipeline}
        self.facts, self._bound = next(iter(parts.values())).facts, bound
        wiring = self.facts["wiring"]
        if wiring is not None:
            rows = [tuple([Source(**source) for source in row]) for row in wiring["inputs"]]
            wiring = Wiring(tuple(rows), tuple(wiring["outputs"]), tuple(wiring["names"]))
        self._dataflow = StageDataflow(len(self.facts["placement"]), wiring)
        self._records: dict[Action, Mapping[str, Any]] = {}
        self._places: dict[int, dict[int, int]] = defaultdict(dict)
        """By stage, the place of each microbatch in the order in which they ran F."""
        self._homes: dict[int, BundlePart] = {}
        for part in parts.values():
            step = part.facts["steps"][-1]
            self._records |= {Action.parse(name): row for name, row in step["actions"].items()}
            self._homes |= {int(stage): part for stage in step["state"]}
        for action in self._records:
            if action.kind is _F:
                places = self._places[action.stage]
                places[action.microbatch] = len(places)
        self._programs: dict[tuple[int, int, str], Program] = {}
        self._results: dict[Action, dict[Role, Any]] = {}
        self._updates: dict[Action, dict[str, Any]] = {}  # by F, the buffers that it wrote
        self._state_faults: dict[int, str] = {}
        self._sums: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def actions(self, first: Action | None = None, last: Action | None = None) -> list[Action]:
        """The recorded F, I, W and B, each after the actions that it needs.

        Args:
            first: actions that do not depend on this action are left out.
            last: actions on which this action does not depend are left out.

        Raises:
            ReplayError: no action is left, or one of the two is not in the step.
        """
        for end in (first, last):
            if end is not None:
                self.check_recorded(end)
        wanted = self._records.keys() if last is None else self._records.keys() & self._needs(last)
        order = sorted(
            (a for a in wanted if a.kind in METHODS),
            key=lambda a: (
                self._places[a.stage][a.microbatch],
                [*METHODS].index(a.kind),
                a.stage if a.kind is _F else -a.stage,
            ),
        )
        order = [a for a in order if first is None or first in self._needs(a)]
        if not order:
            ends = f"{first or 'the first'} to {last or 'the last'}"
            raise ReplayError(
                f"no action from {ends} had begun when the step was written: choose a range that "
                "the step reached, and its first action first"
            )
        return order

    def check_recorded(self, action: Action) -> None:
        """Raise a ``ReplayError`` if an action is not in the record of the step."""
        if action not in self._records:
            alike = [str(a) for a in self._records if a.kind is action.kind]
            kind = action.kind.value
            raise ReplayError(
                f"{action} is not in the step, or had not begun when it ended; "
                f"its actions of kind {kind}: {few(alike, 8) or 'none'}"
            )

    def _needs(self, action: Action) -> set[Action]:
        """An action and all actions on which it depends."""
        needs = (self._needs(self._recorded(n)) for n in needs_of(action, self._dataflow))
        return {action}.union(*needs)

    def _recorded(self, action: Action) -> Action:
        """The action under which the step recorded this action's result: for an I in a step with
        full backwards, the microbatch's B; else the action itself.
        """
        fused = Action(action.stage, ActionKind.BACKWARD, action.microbatch)
        return fused if action.kind is _I and fused in self._records else action

    @property
    def timeline(self) -> Timeline:
        """The times of the step's actions."""
        placement = self.facts["placement"]
        spans = [
            Span(placement[a.stage], a, row["start"], row["end"])
            for a, row in self._records.items()
            if "start" in row
        ]
        return Timeline(max(placement) + 1, tuple(spans))

    # --- faults -----------------------------------------------------------------------------------

    def findings(self, actions: Sequence[Action]) -> Iterator[tuple[Action, str]]:
        """Run each action again, and yield (action, text on its fault; empty if it has none).

        Results are kept until the next microbatch. The sum of a stage's weight gradients is
        compared if all actions that add to it are run, in the order of the recorded run.
        """
        left = Counter(action.stage for action in actions)
        in_run = sorted(self._records, key=lambda a: self._records[a].get("start", 0.0))
        comparable = {s for s in left if _sum_order(actions, s) == _sum_order(in_run, s)}
        for action in actions:
            left[action.stage] -= 1
            if any(a.microbatch != action.microbatch for a in self._results):
                self._results.clear()
            text = self._fault_of(action)
            if not text and not left[action.stage] and action.stage in comparable:
                text = self._sum_fault(action.stage)
            yield action, text and f"{action} on rank {self.rank_of(action)}: {text}"

    def recorded_fault(self, actions: Sequence[Action]) -> tuple[Action, str] | None:
        """The first action with a fault by its record, and text on the fault; None if there is
        none. Nothing is run.
        """
        for action in actions:
            row = self._records[action]
            if text := row.get("nonfinite") or row.get("memory"):
                return action, f"{action} on rank {self.rank_of(action)}: {text}, by the record"
        return None

    def rank_of(self, action: Action) -> int:
        """The rank that ran an action."""
        rank: int = self._homes[action.stage].facts["rank"]
        return rank

    def _fault_of(self, action: Action) -> str:
        """Text on the fault of an action; empty if it has none."""
        facts = self._graphs(action)
        if action.stage not in self._state_faults:
            self._state_faults[action.stage] = self._state_fault(action.stage)
        if text := (
            self._state_faults[action.stage]
            or self._message_fault(action)
            or self._records[action].get("memory", "")
        ):
            return text
        if METHODS[action.kind] not in facts["programs"]:  # a frozen first stage has no backward
            return ""
        self.program_arguments(action)  # an error of an earlier action is none of this one
        try:
            results = self._results_of(action)
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
        pairs = zip(self._gave(action), self._records[action].get("gave", ()), strict=False)
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
        facts = self.facts
        same = facts["device"] == "cpu" and facts["torch"] == torch.__version__
        return bool(same and self._stage(stage)["exact"])

    def _state_fault(self, stage: int) -> str:
        """Text on a parameter or buffer whose bits have changed since the step began; empty if none
        has.
        """
        part = self._homes[stage]
        for name, recorded in part.facts["steps"][-1]["state"][str(stage)].items():
            if _differs(part.tensors["state"][stage][name], recorded):
                shown = name.removeprefix(self._stage(stage)["prefix"])
                return f"{shown} has other bits than when the step began"
        return ""

    def _message_fault(self, action: Action) -> str:
        """Text on a tensor that changed on its way to an action; empty if none did."""
        took = self._records[action].get("took", ())
        sent = self._upstream(action, lambda need: self._records.get(need, {}).get("gave"))
        for at, (sent_row, taken_row) in enumerate(zip(sent, took, strict=False)):
            if sent_row and taken_row and len(sent_row) == 4 and sent_row[2] != taken_row[2]:
                return f"argument {at} has other bits than its sender computed"
        return ""

    def _sum_fault(self, stage: int) -> str:
        """Text on a weight gradient whose sum has other bits than in the recorded run; empty if all
        sums are equal.
        """
        record = self._homes[stage].facts["steps"][-1]
        adds_exactly = self._stage(stage)["adds_exactly"]
        if record["comparable"] and adds_exactly and self._is_exact(stage):
            for name, recorded in record["gradients"][str(stage)].items():
                total = self._sums[stage].get(name)
                if total is not None and _differs(total.to(getattr(torch, recorded[1])), recorded):
                    shown = name.removeprefix(self._stage(stage)["prefix"])
                    return f"the gradient of {shown}, summed over microbatches, has other bits"
        return ""

    def _origin(self, action: Action, result: int | None) -> str:
        """Lines of text on the operator that first computed a wrong value."""
        program = self.program(action)
        *earlier, rows = [self._rows(action.stage, m) for m in range(action.microbatch + 1)]
        arguments, samples = self.program_arguments(action), self._sample_arguments(action)
        with self._as_in_run(action):
            origin = program.origin(arguments, result, self._fault, rows, samples)
        if origin.argument and origin.argument[0] in _FAULTY_STATE.get(origin.reason, ()):
            return self._state_origin(action, origin.argument)
        module, line = program.facts["lines"].get(origin.statement.name, ["", ""])
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
        (kind, name), value = role, self._argument(action, *role)
        began = "the step" if self._fault(self._state_of(action.stage, name)) else str(action)
        shown = name.removeprefix(self._stage(action.stage)["prefix"])
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
        roles: set[Role] = {(kind, name) for kind, name in self.program(action).facts["inputs"]}
        samples = {role for role in roles if role[0] in ("input", "tangent")}
        for kind, call in (("saved", _F), ("deferred", _I)):
            if any(role[0] == kind for role in roles):
                maker = Action(action.stage, call, action.microbatch)
                samples |= self.program(maker).sample_results(self._sample_arguments(maker))
        return samples & roles

    def _rows(self, stage: int, microbatch: int) -> int:
        """The number of samples of a microbatch."""
        took = self._records.get(Action(stage, _F, microbatch), {}).get("took")
        shape = took[0][0] if took and took[0] else ()
        return shape[0] if shape else 0

    # --- running an action ------------------------------------------------------------------------

    def program(self, action: Action) -> Program:
        """The program of an action.

        Raises:
            ReplayError: the action's stage cannot run alone, the bundle has no tensors, or no
                gradient of the stage is needed.
        """
        graphs, part = self._graphs(action), self._homes[action.stage]
        key = stage, capture, call = action.stage, graphs["capture"], METHODS[action.kind]
        if call not in graphs["programs"]:
            raise ReplayError(f"{action} computes nothing: no gradient of its stage is needed")
        if key not in self._programs:
            constants = part.tensors["constants"][stage][capture][call]
            path = part.path / f"stage-{stage}" / f"capture-{capture}" / f"{call}.py"
            self._programs[key] = Program(path, graphs["programs"][call], constants)
        return self._programs[key]

    def _stage(self, stage: int) -> Mapping[str, Any]:
        part = self._homes.get(stage)
        facts: Mapping[str, Any] = {} if part is None else part.facts["stages"].get(str(stage), {})
        if "captures" not in facts:
            reason = facts.get("reason") or "the bundle has no tensors of it"
            raise ReplayError(f"stage {stage} cannot be run again: {reason}")
        return facts

    def _graphs(self, action: Action) -> dict[str, Any]:
        """Facts about an action's stage, and about the graphs that ran its microbatch."""
        stage = self._stage(action.stage)
        microbatch = stage["microbatches"][str(action.microbatch)]
        return {**stage, **stage["captures"][microbatch["capture"]], **microbatch}

    def _results_of(self, action: Action) -> dict[Role, Any]:
        """The results of an action by role; each action runs once."""
        if action not in self._results:
            program, arguments = self.program(action), self.program_arguments(action)
            roles = [(kind, name) for kind, name in program.facts["outputs"]]
            with self._as_in_run(action):
                results = dict(zip(roles, program.run(arguments), strict=True))
            self._results[action] = results
            self._updates[action] = {n: v for (kind, n), v in results.items() if kind == "update"}
        return self._results[action]

    @contextlib.contextmanager
    def _as_in_run(self, action: Action) -> Iterator[None]:
        """Context with the seed and the number of threads of the run, on which bits depend."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._homes[action.stage].facts.get("threads", threads))
        if action.kind is _F:
            torch.default_generator.manual_seed(self._records[action]["seed"])
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def program_arguments(self, action: Action) -> list[Any]:
        """The arguments of an action's program, in order."""
        return [self._argument(action, *role) for role in self.program(action).facts["inputs"]]

    def _argument(self, action: Action, kind: str, name: str) -> Any:
        stage, facts = action.stage, self._graphs(action)
        forward = Action(stage, _F, action.microbatch)
        if kind in ("parameter", "buffer"):
            value = self._state_of(stage, name)
            if name in facts["updates"]:
                places = self._places[stage]
                for microbatch in [*places][: places[action.microbatch]]:
                    earlier = Action(stage, _F, microbatch)
                    if earlier not in self._updates:
                        self._results_of(earlier)
                    value = self._updates[earlier].get(name, value)
            return value
        if kind == "input":
            return self._took(forward)[facts["inputs"].index(name)]
        if kind == "saved":
            return self._results_of(forward)[kind, name]
        if kind == "deferred":
            return self._results_of(Action(stage, _I, action.microbatch))[kind, name]
        gradient = self._took(action)[facts["outputs"].index(name)]
        stride = facts["tangents"][name]
        return torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype).copy_(gradient)

    def _state_of(self, stage: int, name: str) -> Tensor:
        """A parameter or buffer, whole."""
        key, shard = (stage, name), self._stage(stage)["shards"].get(name)
        if shard is None:
            value: Tensor = self._homes[stage].tensors["state"][stage][name]
            return value
        if key not in self._gathered:
            shards = dict[int, Tensor]()
            for part in self._parts.values():
                other = part.facts["stages"].get(str(stage), {}).get("shards", {}).get(name)
                if other is not None and other["copy"] == shard["copy"]:
                    shards[other["number"]] = part.tensors["state"][stage][name]
            if missing := {*range(shard["count"])} - shards.keys():
                raise ReplayError(
                    f"{name} of stage {stage} is sharded over {shard['count']} ranks, and the "
                    f"bundle lacks the shards {sorted(missing)}: replay the folder that has the "
                    "parts of all ranks"
                )
            whole = torch.cat([shards[number] for number in sorted(shards)], shard["dim"])
            self._gathered[key] = whole.to(getattr(torch, shard["dtype"]))
        return self._gathered[key]

    def _took(self, action: Action) -> list[Any]:
        """The arguments that an action got. Arguments that were not kept are computed."""
        action = self._recorded(action)
        kept: list[Any] = self._homes[action.stage].tensors["kept"][str(action)]
        digests = self._records[action]["took"]
        if any(value is None and row for value, row in zip(kept, digests, strict=True)):
            sent = self._upstream(action, self._gave)
            sent += [None] * (len(kept) - len(sent))
            kept = [b if a is None else a for a, b in zip(kept, sent, strict=False)]
        return kept

    def _gave(self, action: Action) -> list[Any]:
        """The tensors that an action sent to other stages."""
        facts, results = self._graphs(action), self._results_of(action)
        kind, names = ("output", "outputs") if action.kind is _F else ("input_grad", "inputs")
        return [results.get((kind, name)) for name in facts[names]]

    def _upstream(self, action: Action, gave: Callable[[Action], Any]) -> list[Any]:
        """The tensors that other stages sent to an action. ``gave`` returns what an action sent."""
        flow, stage = self._dataflow, action.stage

        def sent(need: Action) -> list[Any]:
            values = gave(self._recorded(need)) or [None] * 64
            if need.kind is _F:
                return [*flow.select(values, need.stage, stage)]
            choose = gradients_for(stage, need.stage, flow)
            return [*(values if choose is None else choose(values))]

        needs = [partial(sent, n) for n in needs_of(action, flow) if n.stage != stage]
        if action.kind is _F:
            return bind_arguments(stage, flow, needs, lambda: [None] * 64)()
        return output_gradients(stage, flow, needs)() if needs else []

    def reproducer(self, action: Action, *, tensors: bool = True) -> str:
        """Source of one Python file that runs an action: its program with its arguments.

        Args:
            action: the action.
            tensors: whether the file has the values of tensors; else they are zeros.
        """
        program, file = self.program(action), io.BytesIO()
        saved = [self.program_arguments(action), dict(program.constants)]
        if not tensors:
            saved = tree_map(lambda v: torch.zeros_like(v) if isinstance(v, Tensor) else v, saved)
        torch.save([*saved, self._records[action].get("seed", 0)], file)
        text = base64.b64encode(file.getvalue()).decode()
        return _REPRODUCER.format(program.source, text, METHODS[action.kind])


_REPRODUCER = """{0}

import base64
import io

SAVED = "{1}"

if __name__ == "__main__":
    arguments, constants, seed = torch.load(io.BytesIO(base64.b64decode(SAVED)))
    torch.manual_seed(seed)
    for number, value in enumerate({2}(arguments, constants)):
        print(number, value)
"""


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
