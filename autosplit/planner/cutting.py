"""Cut a whole model into stages: build their modules, the dataflow between them, and the placement
and names of parameters and buffers. ``cut_model`` captures, measures and cuts a model for a
schedule, with the same result on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx, nn

from autosplit.capture.module_paths import common, stack
from autosplit.capture.roles import canonical_names
from autosplit.errors import AutosplitError, PlanError
from autosplit.mesh.costs import device_of_group
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.engine.boundaries import Boundary
from autosplit.pipeline.schedule.routes import Wiring
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, estimate, profile
from autosplit.planner.cuts import CapError, Solution, solve
from autosplit.planner.meta_model import Values, initial_values, materialise_stage
from autosplit.planner.other_sizes import OtherSizes, Sizes, matching_layout
from autosplit.planner.precision import OWN_DTYPES, MixedPrecision
from autosplit.planner.stage_layout import StageGraph, StageLayout
from autosplit.planner.stage_module import StageModule
from autosplit.ranks.default_group import gather
from autosplit.text.progress import working

Names = Mapping[str, Mapping[int, Sequence[str]]]
"""The names of every parameter and buffer, by its first name in the model and by stage. Each name
is in one stage or more.
"""


def _names(whole: WholeModel, nodes: Sequence[Sequence[fx.Node]]) -> Names:
    """The names of parameters and buffers in the stages that run these operations.

    A parameter that a stage reads has, in that stage, the names of the modules that read it. A
    parameter that no stage reads in this mode goes to the stage with the longest common name
    prefix.
    """
    aliases: dict[str, list[str]] = {}
    for name, first in canonical_names(whole.model).items():
        aliases.setdefault(first, []).append(name)
    readers: dict[str, dict[int, set[str]]] = {}
    state = whole.line.forward.state
    for stage, stage_nodes in enumerate(nodes):
        for node in stage_nodes:
            for read in filter(state.__contains__, node.all_input_nodes):
                modules = readers.setdefault(state[read], {}).setdefault(stage, set())
                modules.update(path.partition("@")[0] for path in stack(node))
    for read in filter(state.__contains__, whole.line.results):
        readers.setdefault(state[read], {}).setdefault(len(nodes) - 1, set())
    placements = {}
    for first, names in aliases.items():
        if first in readers:
            holders: dict[int, set[str]] = readers[first]
        else:
            like = max(readers, key=partial(_likeness, first), default=first)
            holders = {min(readers.get(like, [0])): set()}
        placements[first] = _placed(names, holders)
    return placements


def _likeness(one: str, other: str) -> int:
    return len(common(tuple(one.split(".")), tuple(other.split("."))))


def _placed(aliases: list[str], readers: Mapping[int, set[str]]) -> dict[int, list[str]]:
    """Map each stage that has a parameter or buffer to its names in that stage."""
    by_stage = {
        stage: [a for a in aliases if a.rpartition(".")[0] in modules] or aliases[:1]
        for stage, modules in readers.items()
    }
    assigned = {name for names in by_stage.values() for name in names}
    first = by_stage[min(by_stage)]
    by_stage[min(by_stage)] = [a for a in aliases if a in first or a not in assigned]
    return by_stage


def cut(whole: WholeModel, cuts: Sequence[int]) -> Partition:
    """Cut a model into stages.

    Args:
        whole: the model.
        cuts: the first block of every stage except the first.

    Raises:
        PlanError: the cuts do not increase, or name a block that does not exist.
    """
    check_cuts(whole, cuts)
    return Partition(whole, cuts)


def check_cuts(whole: WholeModel, cuts: Sequence[int]) -> None:
    """Refuse cuts that do not increase, or that begin with a block that does not exist.

    Raises:
        PlanError: names the blocks that are possible.
    """
    count = len(whole.blocks)
    if list(cuts) != sorted({*cuts}) or any(not 0 < k < count for k in cuts):
        raise PlanError(
            "cuts must list the number of the first block of each stage but the first, in "
            f"increasing order, from 1 to {count - 1}; got {list(cuts)}"
        )


class Partition:
    """A model that is cut into stages.

    Attributes:
        whole: the model.
        cuts: the names of the first blocks of all stages except the first.
        wiring: the dataflow between stages.
        shared: for each parameter in several stages, all its (stage, name).
    """

    def __init__(self, whole: WholeModel, firsts: Sequence[int]) -> None:
        self.whole = whole
        blocks = [whole.blocks[first] for first in firsts]
        self.cuts = tuple(block.name for block in blocks)
        layout = StageLayout(whole.line, [block.first for block in blocks])
        sources = tuple(tuple(map(layout.argument_source, nodes)) for nodes in layout.received)
        self.wiring = Wiring(sources, tuple(map(len, layout.sent)), whole.names)
        self._layout = layout
        self._names = _names(whole, layout.nodes)
        self._values: Values | None = None
        self._other_sizes: dict[bool, OtherSizes] = {}
        trained = whole.line.forward.parameters
        holders = [
            tuple((stage, names[0]) for stage, names in sorted(by_stage.items()))
            for first, by_stage in self._names.items()
            if first in trained
        ]
        self.shared = tuple(sorted(names for names in holders if len(names) > 1))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1

    def boundaries(self, sizes: Sizes) -> list[Boundary]:
        """Per stage except the last, the tensors that it sends for a microbatch of these sizes in
        the mode of the capture; empty if the model is not captured for them.

        Args:
            sizes: the sizes of the model's inputs.
        """
        return self._sizes_in(self.whole.training).boundaries(sizes)

    def initialise(self, *, seed: int = 0) -> None:
        """Give initial values to the stages that are built from now on.

        Only tensors on the meta device get values, and only on the rank that builds the stage. The
        values depend on the seed alone, not on the cuts.

        Args:
            seed: the seed of all random numbers.
        """
        self._values = partial(initial_values, self.whole.model, seed=seed)

    def build(self, index: int) -> nn.Module:
        """Build the module of a stage, with the model's own parameters and buffers. Tensors on the
        meta device are created on the CPU, with the values of ``initialise``.

        The module has a forward for training and one for evaluation, and is in the model's present
        mode. The model was captured in one mode, for the sizes of the example. The other mode is
        captured from the model when a stage is first put into that mode or called in it; other
        sizes when a trainer first gets them. So the stages keep the whole model alive.

        Raises:
            PlanError: the stage does not exist, or a tensor on the meta device has no values.
        """
        if not 0 <= index < self.stages:
            raise PlanError(f"build(index) needs a stage from 0 to {self.stages - 1}; got {index}")
        programs = {self.whole.training: self._renamed(index, self._layout.program(index))}
        first_names = {
            name: first
            for first, by_stage in self._names.items()
            for name in by_stage.get(index, ())
        }
        # A copy of a stage copies no function, and so no whole model.
        module = StageModule(
            index,
            programs,
            self.whole.model,
            [*first_names],
            lambda training, rows, skip: self._graphs(index, training, rows, skip),
            self.whole.line.repeated,
        )
        module.cuts, module.first_names = self.cuts, first_names
        vars(module).update(dict.fromkeys(self.whole.line.forward.aux_losses))
        module.tied_elsewhere = tuple(
            name for names in self.shared for at, name in names if at == index
        )
        module.training = self.whole.model.training  # submodules have their mode already
        return materialise_stage(module, self._values)

    def _renamed(self, index: int, program: StageGraph) -> StageGraph:
        """The graph of a stage, with the stage's names for the parameters and buffers that it
        reads.

        Raises:
            PlanError: the graph reads parameters or buffers of other stages.
        """
        for first in program.state:
            if index not in self._names[first]:
                raise PlanError(
                    f"stage {index} would read the parameter or buffer {first!r}, which only other "
                    "stages hold: cut elsewhere (cut_at=)"
                )
        return replace(program, state=tuple(self._names[f][index][0] for f in program.state))

    def _graphs(
        self, index: int, training: bool, rows: Sequence[Sizes], skip: int
    ) -> list[StageGraph]:
        """The graphs of a stage, see ``GraphsOf``."""
        sizes = self._sizes_in(training)
        sizes.capture_missing(rows)
        return sizes.graphs_of(index, skip)

    def _sizes_in(self, training: bool) -> OtherSizes:
        """The stages' graphs in a mode, training or evaluation.

        Raises:
            PlanError: the model cannot be cut at these places in this mode.
        """
        if training not in self._other_sizes:
            layout = self._layout_in(training)
            self._other_sizes[training] = OtherSizes(
                self.whole, training, layout, self._stage_graphs
            )
        return self._other_sizes[training]

    def _layout_in(self, training: bool) -> StageLayout:
        """The stages' operations in a mode, training or evaluation, for the sizes of the example.

        Raises:
            PlanError: the model cannot be captured in that mode, or cannot be cut at these places.
        """
        if training is self.whole.training:
            return self._layout
        line = self.whole.other_mode
        try:
            if isinstance(line, AutosplitError):
                raise line
            return matching_layout(self._layout, line)
        except AutosplitError as error:
            mode = "training" if training else "evaluation"
            raise PlanError(
                f"the model cannot be cut for {mode} at the present cuts: {error}"
            ) from error

    def _stage_graphs(self, layout: StageLayout) -> list[StageGraph]:
        """The graphs of all stages in a capture of the model.

        Raises:
            PlanError: a stage would read tensors that it does not receive or hold.
        """
        graphs = []
        for index, sources in enumerate(self.wiring.inputs):
            if not {*map(layout.argument_source, layout.received[index])} <= {*sources}:
                raise PlanError(
                    f"stage {index} would need tensors that it does not receive: cut elsewhere "
                    "(cut_at=)"
                )
            program = layout.program(index, [*map(layout.node_of, sources)])
            graphs.append(self._renamed(index, program))
        return graphs


# --- cut for a schedule ---------------------------------------------------------------------------


COSTS = ("profile", "estimate")
PLANNING = ("costs", "seconds", "cut_at")
"""Options of a trainer that control how its model is cut."""

T = TypeVar("T")


def cut_model(
    model: nn.Module | WholeModel,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    stages: int,
    request: ScheduleRequest,
    options: BlockOptions,
    *,
    costs: str | ModelCosts | Mapping[str, Any] = "profile",
    seconds: float = 10.0,
    cut_at: Sequence[str] | None = None,
    memory_limit: float | Sequence[float] = math.inf,
    precision: MixedPrecision = OWN_DTYPES,
    aux_losses: Collection[str] = (),
    alone: bool = False,
) -> tuple[WholeModel, Solution]:
    """Cut a model into stages, so that a step of a schedule is short; see ``partition``.

    Args:
        model: the model; or a capture of it, and then ``args`` and ``kwargs`` are not used.
        args: example positional inputs of one microbatch.
        kwargs: example keyword inputs.
        stages: the number of stages.
        request: the schedule that the stages will run.
        options: how blocks become stages.
        costs: see ``partition``.
        seconds: see ``partition``.
        cut_at: see ``partition``.
        memory_limit: the most bytes of a rank: one number, or one for each rank. Ignored if no cuts
            keep it.
        precision: the dtypes of parameters, inputs and outputs.
        aux_losses: names of attributes in which the forward leaves auxiliary losses.
        alone: whether this process cuts for itself, even if there is a process group. Otherwise
            all ranks have the cuts of rank 0.

    Returns:
        (captured model, best cuts with their schedule).

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: the model cannot be cut into these stages; the text says why.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    if isinstance(costs, Mapping):
        costs = ModelCosts.of(costs)
    if not isinstance(costs, ModelCosts) and costs not in COSTS:
        raise PlanError(f"unknown costs {costs!r}; known: {', '.join(COSTS)}, or a ModelCosts")
    if cut_at is not None and stages != len(cut_at) + 1:
        raise PlanError(
            f"cut_at has {len(cut_at)} names, which gives {len(cut_at) + 1} stages, but "
            f"stages={stages}"
        )
    if isinstance(model, WholeModel):
        whole = model
    else:
        whole = WholeModel.capture(model, args, kwargs, precision, aux_losses)
    firsts: list[int] | None = None
    if cut_at is not None:
        whole, firsts = whole.divided(cut_at)
        check_cuts(whole, firsts)  # before measuring
    if not 1 <= stages <= len(whole.blocks):
        raise PlanError(
            f"{type(whole.model).__name__} has blocks for 1 to {len(whole.blocks)} stages, got "
            f"stages={stages}"
        )
    options = replace(options, device=device_of_trainer(alone=alone))

    def find() -> Solution:
        block_costs = _costs(costs, seconds, whole, options)
        with working(f"searching where to cut into {stages} stages"):
            try:
                return solve(block_costs, stages, request, cap=memory_limit, firsts=firsts)
            except CapError:  # a trainer offloads or recomputes the excess
                return solve(block_costs, stages, request, firsts=firsts)

    if not alone and costs != "profile" and grouped():
        return whole, on_first_rank(find)
    return whole, on_all_ranks(find, alone=alone)


def _costs(
    costs: str | ModelCosts, seconds: float, whole: WholeModel, options: BlockOptions
) -> ModelCosts:
    """The costs of the blocks: measured, estimated, or as passed."""
    if isinstance(costs, ModelCosts):
        if len(costs.blocks) != len(whole.blocks):
            raise PlanError(
                f"costs has {len(costs.blocks)} blocks, but the model has {len(whole.blocks)}: "
                "give the costs of this model, or leave costs out"
            )
        return costs
    with working(f"measuring {len(whole.blocks)} blocks"):
        if costs == "profile":
            return profile(whole, options, seconds=seconds)
        return estimate(whole, options)


def on_all_ranks(work: Callable[[], T], *, alone: bool = False) -> T:
    """Run ``work`` on all ranks of the default process group; return rank 0's result on all.

    Otherwise, ranks might have different results, and cut at different places. All ranks run the
    work at the same time, because in a step they share memory and caches, too. An error on one rank
    is raised on all.

    Args:
        work: a function that measures costs and cuts the model by them.
        alone: whether to run on this process only, even if there is a process group.
    """
    if alone or not grouped():
        return work()
    outcomes = gather(_outcome(work))
    for result in outcomes:
        if isinstance(result, AutosplitError):
            raise result
    first: T = outcomes[0]
    return first


def on_first_rank(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 of the default process group; return its result on all ranks.

    The other ranks wait. They leave the processors of a shared machine to rank 0. An error is
    raised on all ranks.

    Args:
        work: a function that cuts the model without timing its blocks.
    """
    result: T | AutosplitError = gather(_outcome(work) if dist.get_rank() == 0 else None)[0]
    if isinstance(result, AutosplitError):
        raise result
    return result


def _outcome(work: Callable[[], T]) -> T | AutosplitError:
    """The result of ``work``, or the error that it raised."""
    try:
        return work()
    except AutosplitError as error:
        return error


def grouped() -> bool:
    """Whether the default process group has other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def device_of_trainer(*, alone: bool = False) -> torch.device | None:
    """The device to which a trainer moves its stages; None if they stay on the model's device.

    Args:
        alone: whether the trainer has a single process, even if there is a process group.
    """
    device = None if alone or not grouped() else device_of_group()
    return None if device is None or device.type == "cpu" else device
