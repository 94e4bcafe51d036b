"""A whole model, cut into stages: who feeds whom, the modules of stages, and which of them has
which parameters and buffers, under which of their names; captured, measured and cut for a
schedule, which all ranks do at once, and alike.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx, nn

from autosplit.capture.module_paths import common, inside, stack
from autosplit.capture.roles import canonical_names
from autosplit.errors import AutosplitError, PlanError
from autosplit.mesh.costs import device_of_group
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.schedule.routes import Wiring
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, estimate, profile
from autosplit.planner.cuts import CapError, Solution, solve
from autosplit.planner.meta_model import Values, initial_values, materialise_stage
from autosplit.planner.operation_sequence import OperationSequence
from autosplit.planner.stage_module import StageGraph, StageLayout, StageModule
from autosplit.text.progress import working

Names = Mapping[str, Mapping[int, Sequence[str]]]
"""Of every parameter and buffer, by its first name in the model: by stage, all names that it has
there; each name is in some stage."""


def _keys(line: OperationSequence) -> list[list[Any]]:
    """Of each operation, its modules, what it calls, and how often that came before, which is the
    same in each capture of a model. A region that is checkpointed in one mode only is known by the
    operations in it.
    """
    seen: Counter[Any] = Counter()
    found = []
    for node in line.body:
        keys = []
        for part in inside(node) or [node]:
            key = (stack(part), str(part.target))
            seen[key] += 1
            keys.append((key, seen[key]))
        found.append(keys)
    return found


def _places(layout: StageLayout, line: OperationSequence) -> list[int]:
    """Where another capture is cut if it is cut where this one is.

    Raises:
        PlanError: it cannot be cut there.
    """
    keys = _keys(layout.line)
    known = {key: index for index, each in enumerate(_keys(line)) for key in each}
    found: list[int] = []
    for place in layout.places:
        there = next((known[key] for key in keys[place] if key in known), None)
        if there is None or there in line.forbidden or there in (0, *found):
            raise PlanError(f"there can be no cut before {layout.line.body[place].name}")
        found.append(there)
    return found


def _names(whole: WholeModel, nodes: Sequence[Sequence[fx.Node]]) -> Names:
    """The names of parameters and buffers in stages that run these operations: what a stage reads
    is there by the names of the modules that read it; what no stage reads in this mode is with what
    has the name most like it.
    """
    aliases: dict[str, list[str]] = {}
    for name, first in canonical_names(whole.model).items():
        aliases.setdefault(first, []).append(name)
    readers: dict[str, dict[int, set[str]]] = {}
    state = whole.line.forward.state
    for stage, own in enumerate(nodes):
        for node in own:
            for read in filter(state.__contains__, node.all_input_nodes):
                modules = readers.setdefault(state[read], {}).setdefault(stage, set())
                modules.update(path.partition("@")[0] for path in stack(node))
    for read in filter(state.__contains__, whole.line.results):
        readers.setdefault(state[read], {}).setdefault(len(nodes) - 1, set())
    found = {}
    for first, names in aliases.items():
        like = max(readers, key=partial(_likeness, first), default=first)
        alone = {min(readers.get(like, [0])): set[str]()}
        found[first] = _placed(names, readers.get(first, alone))
    return found


def _likeness(one: str, other: str) -> int:
    return len(common(tuple(one.split(".")), tuple(other.split("."))))


def _placed(aliases: list[str], readers: Mapping[int, set[str]]) -> dict[int, list[str]]:
    """Stage -> the names that a parameter or buffer has there."""
    found = {
        stage: [a for a in aliases if a.rpartition(".")[0] in modules] or aliases[:1]
        for stage, modules in readers.items()
    }
    known = {name for names in found.values() for name in names}
    first = found[min(found)]
    found[min(found)] = [a for a in aliases if a in first or a not in known]
    return found


def cut(whole: WholeModel, cuts: Sequence[int]) -> Partition:
    """Cut a model into stages.

    Args:
        whole: the model.
        cuts: for every stage but the first, its first block.

    Raises:
        PlanError: the cuts do not increase, or there is no such block.
    """
    cuts = tuple(cuts)
    count = len(whole.blocks)
    if list(cuts) != sorted({*cuts}) or any(not 0 < k < count for k in cuts):
        raise PlanError(
            f"cuts are the first blocks of all stages but the first, increasing, of 1 to "
            f"{count - 1}; got {list(cuts)}"
        )
    return Partition(whole, cuts)


class Partition:
    """A model in stages.

    Attributes:
        whole: the model.
        cuts: the names of the first blocks of all stages but the first.
        wiring: who feeds whom.
        shared: for each parameter in several stages, where it is: (stage, name).
    """

    def __init__(self, whole: WholeModel, firsts: Sequence[int]) -> None:
        self.whole = whole
        blocks = [whole.blocks[first] for first in firsts]
        self.cuts = tuple(block.name for block in blocks)
        layout = StageLayout(whole.line, [block.first for block in blocks])
        given = tuple(tuple(map(layout.source, each)) for each in layout.given)
        self.wiring = Wiring(given, tuple(map(len, layout.sent)), whole.names)
        self._layout = layout
        self._names = _names(whole, layout.nodes)
        self._values: Values | None = None
        trained = whole.line.forward.parameters
        held = [
            tuple((stage, names[0]) for stage, names in sorted(where.items()))
            for first, where in self._names.items()
            if first in trained
        ]
        self.shared = tuple(sorted(each for each in held if len(each) > 1))

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.cuts) + 1

    def initialise(self, *, seed: int = 0) -> None:
        """Have stages that are built from now on start with initial values.

        Only what the model has on the meta device gets any, and only on the rank that builds the
        stage. They depend on the seed alone, not on the cuts.

        Args:
            seed: of all random numbers.
        """
        self._values = partial(initial_values, self.whole.model, seed=seed)

    def build(self, index: int) -> nn.Module:
        """The module of a stage, with the model's own parameters and buffers. What the model has on
        the meta device is here on the CPU, with the values that ``initialise`` chose.

        It runs the forward as it is in training and as it is in evaluation, and is in the mode that
        the model is in now. The mode in which the model was not captured is captured, as the model
        is then, when the first stage is built.

        Raises:
            PlanError: there is no such stage, or something on the meta device has no values.
        """
        if not 0 <= index < self.stages:
            raise PlanError(f"there are stages 0 to {self.stages - 1}, got {index}")
        programs = {
            self.whole.training: self._renamed(index, self._layout.program(index)),
            not self.whole.training: self._in_other_mode(index),
        }
        names = [name for where in self._names.values() for name in where.get(index, ())]
        module = StageModule(index, programs, self.whole.model, names)
        module.cuts = self.cuts
        module.tied_elsewhere = tuple(
            name for held in self.shared for at, name in held if at == index
        )
        module.training = self.whole.model.training  # what is inside has that of the model already
        return materialise_stage(module, self._values)

    def _renamed(self, index: int, program: StageGraph) -> StageGraph:
        """With the names that a stage has for what the program reads.

        Raises:
            PlanError: it reads what only other stages hold.
        """
        for first in program.state:
            if index not in self._names[first]:
                raise PlanError(f"stage {index} would read {first!r}, which other stages hold")
        return replace(program, state=tuple(self._names[f][index][0] for f in program.state))

    def _in_other_mode(self, index: int) -> StageGraph | PlanError:
        """The graph of a stage in the mode in which the model was not captured, or why there is
        none.
        """
        given = self.wiring.inputs[index]
        try:
            layout = self._other_layout
            known = {layout.source(node): node for node in layout.given[index]}
            if not known.keys() <= {*given}:
                raise PlanError(f"stage {index} would need inputs that it is not given")
            return self._renamed(index, layout.program(index, [*map(known.get, given)]))
        except AutosplitError as error:
            mode = "evaluation" if self.whole.training else "training"
            told = PlanError(f"the model cannot be cut for {mode} where it is cut: {error}")
            warnings.warn(f"{told} (a call in that mode will raise this)", stacklevel=2)
            return told

    @cached_property
    def _other_layout(self) -> StageLayout:
        line = self.whole.other_mode
        if isinstance(line, AutosplitError):
            raise line
        layout = StageLayout(line, _places(self._layout, line))
        if layout.looks() != self._layout.looks():
            raise PlanError(
                "other tensors would be sent from stage to stage; is there a result that one mode "
                "alone has, as a cache (transformers: config.use_cache = False)?"
            )
        return layout


# --- cut for a schedule ---------------------------------------------------------------------------


COSTS = ("profile", "estimate")
PLANNING = ("costs", "seconds", "cut_at")
"""What a trainer's user may say of how its model is cut."""

T = TypeVar("T")


def cut_model(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    stages: int,
    request: ScheduleRequest,
    options: BlockOptions,
    *,
    costs: str | ModelCosts = "profile",
    seconds: float = 10.0,
    cut_at: Sequence[str] | None = None,
    cap: float = math.inf,
) -> tuple[WholeModel, Solution]:
    """Cut a model into stages, so that a step of a schedule is short; see ``partition``.

    Args:
        model: what to cut.
        args: example positional inputs of one microbatch.
        kwargs: example keyword inputs.
        stages: how many stages.
        request: the schedule that they are to run.
        options: how stages are made.
        costs: see ``partition``.
        seconds: likewise.
        cut_at: likewise.
        cap: bytes that no rank shall hold more than, if there are such cuts.

    Returns:
        the model, and the best cuts of it that were found with the schedule that they are for.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: it cannot be cut so; says why.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    if not isinstance(costs, ModelCosts) and costs not in COSTS:
        raise PlanError(f"unknown costs {costs!r}; known: {', '.join(COSTS)}, or a ModelCosts")
    if cut_at is not None and stages != len(cut_at) + 1:
        raise PlanError(
            f"cut_at has {len(cut_at)} names, which gives {len(cut_at) + 1} stages, but "
            f"stages={stages}"
        )
    whole = WholeModel.capture(model, args, kwargs)
    firsts: list[int] | None = None
    if cut_at is not None:
        whole, firsts = whole.divided(cut_at)
        cut(whole, firsts)  # refuses what is no cut, before anything is measured
    if not 1 <= stages <= len(whole.blocks):
        raise PlanError(
            f"{type(model).__name__} has blocks for 1 to {len(whole.blocks)} stages, got "
            f"stages={stages}"
        )
    alone = request.ranks == 1  # this process plans for itself, whatever group it is in
    options = replace(options, device=device_of_trainer(alone=alone))

    def find() -> Solution:
        known = _costs(costs, seconds, whole, options)
        with working(f"searching where to cut into {stages} stages"):
            try:
                return solve(known, stages, request, cap=cap, firsts=firsts)
            except CapError:  # a trainer moves or makes again what is too much
                return solve(known, stages, request, firsts=firsts)

    return whole, on_all_ranks(find, alone=alone)


def _costs(
    costs: str | ModelCosts, seconds: float, whole: WholeModel, options: BlockOptions
) -> ModelCosts:
    """What the blocks cost: measured, estimated, or as given."""
    if isinstance(costs, ModelCosts):
        if len(costs.blocks) != len(whole.blocks):
            raise PlanError(
                f"costs of {len(costs.blocks)} blocks were given, and the model has "
                f"{len(whole.blocks)}: give those of this model, or leave costs out"
            )
        return costs
    with working(f"measuring {len(whole.blocks)} blocks"):
        if costs == "profile":
            return profile(whole, options, seconds=seconds)
        return estimate(whole, options)


def on_all_ranks(work: Callable[[], T], *, alone: bool = False) -> T:
    """What rank 0 of the default process group finds, on all ranks: each might find something
    else, and cut elsewhere. All do the work at once, for in a step they share memory and caches
    too. An error on one is an error on all.

    Args:
        work: measures costs, and what is wanted of them.
        alone: whether this process works for itself, whatever group it is in.
    """
    if alone or not grouped():
        return work()

    def outcome() -> T | AutosplitError:
        try:
            return work()
        except AutosplitError as error:
            return error

    found = gather(outcome())
    for each in found:
        if isinstance(each, AutosplitError):
            raise each
    first: T = found[0]
    return first


def grouped() -> bool:
    """Whether there are other ranks, in the default process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def device_of_trainer(*, alone: bool = False) -> torch.device | None:
    """Where a trainer puts its stages, if that is not where the model is.

    Args:
        alone: whether it has one process, whatever group that is in.
    """
    device = None if alone or not grouped() else device_of_group()
    return None if device is None or device.type == "cpu" else device
