"""Run recorded actions again, on one machine without the model.

::

    F  takes  batch or outputs of earlier stages   kept, or computed by replaying these stages
    I  takes  saved of F, gradients of outputs     saved are computed by a replay of F
    W  takes  deferred of I
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import ReplayError
from autosplit.pipeline.engine.stage_arguments import (
    bind_arguments,
    gradients_for,
    output_gradients,
)
from autosplit.pipeline.schedule.routes import Source, StageDataflow, Wiring, needs_of
from autosplit.pipeline.schedule.schedule import METHODS, Action, ActionKind
from autosplit.pipeline.simulation.simulate import Span, Timeline
from autosplit.recorder.bundle import BundlePart
from autosplit.recorder.program import Program, Role
from autosplit.text.figures import few
from autosplit.torch_internals.pytree import tree_map

_F, _I = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT


class StepReplay:
    """The recorded step of one pipeline.

    Args:
        parts: the parts of the bundle, by rank.
        pipeline: the number of the pipeline among its replicas.

    Attributes:
        facts: facts about the step, see ``bundle.BundlePart``.
        records: maps an action to its record.
        homes: maps a stage to the part of the rank that ran it.
        results: maps an action that was run again to its results by role. May be cleared.
    """

    def __init__(self, parts: Mapping[int, BundlePart], pipeline: int = 0) -> None:
        self._parts, self._gathered = parts, dict[tuple[int, str], Tensor]()
        parts = {rank: p for rank, p in parts.items() if p.facts["pipeline"] == pipeline}
        self.facts = next(iter(parts.values())).facts
        wiring = self.facts["wiring"]
        if wiring is not None:
            rows = [tuple([Source(**source) for source in row]) for row in wiring["inputs"]]
            wiring = Wiring(tuple(rows), tuple(wiring["outputs"]), tuple(wiring["names"]))
        self._dataflow = StageDataflow(len(self.facts["placement"]), wiring)
        self.records: dict[Action, Mapping[str, Any]] = {}
        # By stage, the place of each microbatch in the order in which they ran F.
        self._places: dict[int, dict[int, int]] = defaultdict(dict)
        self.homes: dict[int, BundlePart] = {}
        for part in parts.values():
            step = part.facts["steps"][-1]
            self.records |= {Action.parse(name): row for name, row in step["actions"].items()}
            self.homes |= {int(stage): part for stage in step["state"]}
        for action in self.records:
            if action.kind is _F:
                places = self._places[action.stage]
                places[action.microbatch] = len(places)
        self._programs: dict[tuple[int, int, str], Program] = {}
        self.results: dict[Action, dict[Role, Any]] = {}
        self._updates: dict[Action, dict[str, Any]] = {}  # by F, the buffers that it wrote

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
        wanted = self.records.keys() if last is None else self.records.keys() & self._needs(last)
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
                f"the recorded step has no action from {ends}: choose actions that began before "
                "the step ended, and name the earlier one first"
            )
        return order

    @property
    def unfinished(self) -> list[Action]:
        """The recorded F, I and B that had begun, but gave no result before the step ended."""
        return [a for a, row in self.records.items() if "took" in row and "gave" not in row]

    def check_recorded(self, action: Action) -> None:
        """Raise a ``ReplayError`` if an action is not in the record of the step."""
        if action not in self.records:
            alike = [str(a) for a in self.records if a.kind is action.kind]
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
        return fused if action.kind is _I and fused in self.records else action

    def rank_of(self, action: Action) -> int:
        """The rank that ran an action."""
        rank: int = self.homes[action.stage].facts["rank"]
        return rank

    @property
    def timeline(self) -> Timeline:
        """The times of the step's actions."""
        placement = self.facts["placement"]
        spans = [
            Span(placement[a.stage], a, row["start"], row["end"])
            for a, row in self.records.items()
            if "start" in row
        ]
        return Timeline(max(placement) + 1, tuple(spans))

    def program(self, action: Action) -> Program:
        """The program of an action.

        Raises:
            ReplayError: the action's stage cannot run alone, the bundle has no tensors, or no
                gradient of the stage is needed.
        """
        graphs, part = self.graph_facts(action), self.homes[action.stage]
        key = stage, capture, call = action.stage, graphs["capture"], METHODS[action.kind]
        if call not in graphs["programs"]:
            raise ReplayError(
                f"{action} computes nothing: no gradient of its stage is needed; "
                "choose another action"
            )
        if key not in self._programs:
            constants = part.tensors["constants"][stage][capture][call]
            path = part.path / f"stage-{stage}" / f"capture-{capture}" / f"{call}.py"
            self._programs[key] = Program(path, graphs["programs"][call], constants)
        return self._programs[key]

    def stage_facts(self, stage: int) -> Mapping[str, Any]:
        """Facts about a stage.

        Raises:
            ReplayError: the stage cannot run alone, or the bundle has no tensors of it.
        """
        part = self.homes.get(stage)
        facts: Mapping[str, Any] = {} if part is None else part.facts["stages"].get(str(stage), {})
        if "captures" not in facts:
            reason = facts.get("reason") or "the bundle has no tensors of it"
            raise ReplayError(f"stage {stage} cannot be run again: {reason}")
        return facts

    def graph_facts(self, action: Action) -> dict[str, Any]:
        """Facts about an action's stage, and about the graphs that ran its microbatch."""
        stage = self.stage_facts(action.stage)
        microbatch = stage["microbatches"][str(action.microbatch)]
        return {**stage, **stage["captures"][microbatch["capture"]], **microbatch}

    def samples_of(self, stage: int, microbatch: int) -> int:
        """The number of samples of a microbatch."""
        took = self.records.get(Action(stage, _F, microbatch), {}).get("took")
        shape = took[0][0] if took and took[0] else ()
        return shape[0] if shape else 0

    def results_of(self, action: Action) -> dict[Role, Any]:
        """The results of an action by role; each action runs once."""
        if action not in self.results:
            program, arguments = self.program(action), self.program_arguments(action)
            roles = [(kind, name) for kind, name in program.facts["outputs"]]
            with self.as_in_run(action):
                results = dict(zip(roles, program.run(arguments), strict=True))
            self.results[action] = results
            self._updates[action] = {n: v for (kind, n), v in results.items() if kind == "update"}
        return self.results[action]

    @contextlib.contextmanager
    def as_in_run(self, action: Action) -> Iterator[None]:
        """Context with the seed and the number of threads of the run, on which bits depend."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.homes[action.stage].facts.get("threads", threads))
        if action.kind is _F:
            torch.default_generator.manual_seed(self.records[action]["seed"])
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def program_arguments(self, action: Action) -> list[Any]:
        """The arguments of an action's program, in order."""
        return [self.argument(action, *role) for role in self.program(action).facts["inputs"]]

    def argument(self, action: Action, kind: str, name: str) -> Any:
        """The argument of an action with this role."""
        stage, facts = action.stage, self.graph_facts(action)
        forward = Action(stage, _F, action.microbatch)
        if kind in ("parameter", "buffer"):
            value = self.state_of(stage, name)
            if name in facts["updates"]:
                places = self._places[stage]
                for microbatch in [*places][: places[action.microbatch]]:
                    earlier = Action(stage, _F, microbatch)
                    if earlier not in self._updates:
                        self.results_of(earlier)
                    value = self._updates[earlier].get(name, value)
            return value
        if kind == "input":
            return self._took(forward)[facts["inputs"].index(name)]
        if kind == "saved":
            return self.results_of(forward)[kind, name]
        if kind == "deferred":
            return self.results_of(Action(stage, _I, action.microbatch))[kind, name]
        gradient = self._took(action)[facts["outputs"].index(name)]
        stride = facts["tangents"][name]
        return torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype).copy_(gradient)

    def state_of(self, stage: int, name: str) -> Tensor:
        """A parameter or buffer, whole."""
        key, shard = (stage, name), self.stage_facts(stage)["shards"].get(name)
        if shard is None:
            value: Tensor = self.homes[stage].tensors["state"][stage][name]
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
        kept: list[Any] = self.homes[action.stage].tensors["kept"][str(action)]
        digests = self.records[action]["took"]
        if any(value is None and row for value, row in zip(kept, digests, strict=True)):
            sent = self.upstream(action, self.gave)
            sent += [None] * (len(kept) - len(sent))
            kept = [b if a is None else a for a, b in zip(kept, sent, strict=False)]
        return kept

    def gave(self, action: Action) -> list[Any]:
        """The tensors that an action sent to other stages."""
        facts, results = self.graph_facts(action), self.results_of(action)
        kind, names = ("output", "outputs") if action.kind is _F else ("input_grad", "inputs")
        return [results.get((kind, name)) for name in facts[names]]

    def upstream(self, action: Action, gave: Callable[[Action], Any]) -> list[Any]:
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
        torch.save([*saved, self.records[action].get("seed", 0)], file)
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
