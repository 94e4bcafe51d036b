"""The stages that a rank runs, made of modules: to train, or forward only to evaluate."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autosplit.dump import boundary_tensors, total_bytes
from autosplit.errors import PipelineError
from autosplit.passes import CollectiveCosts, Kind
from autosplit.passes.analysis.aliasing import distinct_bytes
from autosplit.passes.graph import inputs as graph_inputs
from autosplit.pipeline.engine.boundaries import Boundaries, Boundary, Dependence, TensorMeta
from autosplit.pipeline.engine.executor import BackwardStage
from autosplit.pipeline.engine.transport import Receive, arguments
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import BACKWARDS, Action, ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.ranks.groups import Groups
from autosplit.runtime.build import SplitOptions
from autosplit.runtime.gradient_accumulation import GradientSums
from autosplit.runtime.refusals import misfit
from autosplit.stage import Stage
from autosplit.torch_internals.pytree import is_flat
from autosplit.torch_internals.state import preserve_modes, versions


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of ``schedule`` on the same ranks, each rank's in the order in which they could
    start if it were never busy; so nothing waits for what its own rank could do first.
    """
    order = sorted(
        itertools.product(range(schedule.stages), range(schedule.microbatches)),
        key=lambda each: (sum(each), each),
    )
    return Schedule(
        name=f"{schedule.name}, forward only",
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        ranks=tuple(
            tuple(
                Action(stage, ActionKind.FORWARD, microbatch)
                for stage, microbatch in order
                if schedule.placement[stage] == rank
            )
            for rank in range(len(schedule.ranks))
        ),
        placement=schedule.placement,
        split_backward=False,
    )


class ModuleStage:
    """A module as a stage that only runs forward.

    Args:
        module: the stage's module.
        index: the stage's place in the pipeline.
        shared: places of arguments that other stages may take as well.
    """

    def __init__(self, module: nn.Module, index: int, shared: Sequence[int] = ()) -> None:
        self._module = module
        self._index = index
        self._shared = shared

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        """The module's outputs; clears ``inputs``.

        Raises:
            PipelineError: the module puts out something else than a tensor or a tuple of tensors,
                or writes into an argument that other stages take.
        """
        args = tuple(inputs)
        inputs.clear()
        before = versions(args[place] for place in self._shared)
        outputs = self._module(*args)
        if versions(args[place] for place in self._shared) != before:
            raise PipelineError(
                f"stage {self._index} writes in place into an input that other stages take, which "
                "would find it changed: let its module write into a copy"
            )
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        if not isinstance(outputs, tuple | list) or not all(
            isinstance(output, Tensor) for output in outputs
        ):
            raise _misshapen(self._index, type(outputs))
        return list(outputs)


def _misshapen(index: int, found: type) -> PipelineError:
    what = "nested tuple or list" if issubclass(found, tuple | list) else found.__name__
    return PipelineError(
        f"stage {index} must put out a tensor or a tuple of tensors, which the next one takes in "
        f"this order; got a {what}"
    )


@contextlib.contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode; afterwards each submodule is as it was before."""
    roots = list(modules)
    with preserve_modes(roots):
        for root in roots:
            root.eval()
        yield


class TrainableStage(BackwardStage, Protocol):
    """What the trainer asks of a stage beyond running its actions."""

    @property
    def output_specs(self) -> Sequence[tuple[torch.Size, torch.dtype, bool]]:
        """Shape, dtype and whether it needs a gradient, of each output."""
        ...

    def publish(self) -> None:
        """Add the accumulated gradients to the parameters' ``.grad`` and forget them."""
        ...


class StageFactory(Protocol):
    """How the trainer makes a stage from a module."""

    def __call__(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """A stage for ``module(*args)``.

        Args:
            module: the stage's module; the last stage's puts out the loss.
            args: example inputs: true shapes and dtypes, values that mean nothing. Those with
                ``requires_grad`` are the ones whose gradient is wanted.
            index: the stage's place in the pipeline.
        """
        ...


@dataclass(frozen=True)
class SplitStage:
    """Makes an ``autosplit.Stage`` with these options, which are its own.

    Where a stage's inputs need no gradient, no other stage waits for its I, which would put off the
    forwards behind it: with ``defer_whole_backward`` its W is the whole backward.

    Raises:
        SplitError: an unknown backend or memory setting (lists the known), or a
            ``grad_dtype`` that is not floating-point.
    """

    backend: str = "eager"
    memory: str | int = "balanced"
    grad_dtype: torch.dtype | None = None
    defer_whole_backward: bool = True
    overlap: CollectiveCosts | None = None

    def __post_init__(self) -> None:
        SplitOptions(self.backend, self.memory, overlap=self.overlap)
        GradientSums(self.grad_dtype)

    @property
    def split(self) -> SplitOptions:
        """How each stage is split."""
        return SplitOptions(self.backend, self.memory, self.defer_whole_backward, self.overlap)

    def __call__(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """A stage for ``module(*args)``; see ``StageFactory``.

        Raises:
            PipelineError: it puts out something else than a tensor or a tuple of tensors.
        """
        stage = Stage(module, args, index=index, **vars(self))
        if not is_flat(spec := stage.functions.capture.output_spec):
            raise _misshapen(index, spec.type)
        return stage


def traced(stages: Mapping[int, TrainableStage]) -> dict[int, Stage]:
    """Those whose graphs are known; what a factory of the user's makes need not have any."""
    return {index: stage for index, stage in stages.items() if isinstance(stage, Stage)}


def footprint(stage: TrainableStage) -> tuple[float, float]:
    """Bytes that a stage keeps of one microbatch: from F to the backward, and from I to W.

    A stage that does not say counts as 1 each, so that microbatches are counted.
    """
    if not isinstance(stage, Stage):
        return (1.0, 1.0)
    graphs = stage.functions.graphs
    if graphs.backward is None or graphs.backward_input is None or graphs.backward_weight is None:
        return (0.0, 0.0)
    saved = boundary_tensors(graphs.forward, graphs.backward, Kind.SAVED)
    deferred = boundary_tensors(graphs.backward_input, graphs.backward_weight, Kind.DEFERRED)
    return float(total_bytes(saved)), float(total_bytes(deferred))


def stage_memory(stage: TrainableStage) -> StageMemory:
    """What a stage keeps of one microbatch, as ``footprint``, and what its inputs take."""
    saved, deferred = footprint(stage)
    if not isinstance(stage, Stage) or not stage.functions.has_backward:
        return StageMemory(saved, deferred)
    forward = stage.functions.graphs.forward
    taken = list(graph_inputs(forward.graph, Kind.INPUT).values())
    return StageMemory(saved, deferred, float(distinct_bytes(taken)))


def check_inputs(
    modules: Mapping[int, nn.Module], dataflow: StageDataflow, inputs: Sequence[Tensor | None]
) -> None:
    """Ask stages that know what they can take, before they are traced, where an error would come
    out as one of tracing.

    Args:
        modules: this rank's modules by stage.
        dataflow: the dataflow between stages.
        inputs: one microbatch's.

    Raises:
        PlanError: the batch is not of the size for which the model was cut.
        PipelineError: the first stage takes another number of inputs.
    """
    if dataflow.wiring is None:
        if 0 in modules and (text := misfit(modules[0], inputs)):
            raise PipelineError(f"stage 0 {text}; the batch has {len(inputs)} input(s)")
        return
    for index, module in modules.items():
        sources = dataflow.wiring.inputs[index]
        given = [inputs[each.position] if each.stage is None else None for each in sources]
        for part in module.modules():
            check: Any = getattr(part, "check_inputs", None)
            if check is not None:
                check(given)  # None for those that are not known


def build_stages(
    modules: Mapping[int, nn.Module],
    stages: int,
    dataflow: StageDataflow,
    groups: Groups,
    factory: StageFactory,
    *,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    device: torch.device,
) -> tuple[dict[int, TrainableStage], Boundaries]:
    """Build this rank's stages, and agree on what crosses between all: stage after stage, whoever
    holds one builds it for what those before it put out, and tells the others; collective.

    Args:
        modules: this rank's modules by stage, the last one with its loss.
        stages: how many stages there are.
        dataflow: the dataflow between stages.
        groups: the trainer's process groups.
        factory: makes a stage.
        inputs: one microbatch's inputs, as examples; only those that this rank's stages take are
            needed.
        targets: one microbatch's targets, likewise; only the last stage's rank needs them.
        device: where example inputs are made.

    Raises:
        PipelineError: the loss is not one floating scalar that needs a gradient.
        LostPeerError: another rank failed or was not ready in time. Each stage has the whole
            timeout.
    """
    built: dict[int, TrainableStage] = {}
    boundaries = Boundaries()
    dependence: list[Dependence | None] = []
    for index in range(stages):
        told: tuple[Boundary, Dependence | None] | None = None
        if index in modules:
            args = _examples(index, dataflow, boundaries, inputs, device)
            if index == stages - 1:
                args += targets
            stage = built[index] = factory(modules[index], args, index=index)
            metas = tuple([TensorMeta(*spec) for spec in stage.output_specs])
            dataflow.check_outputs(index, len(metas))
            if index == stages - 1:
                check_loss(metas)
            told = metas, dependence_of(stage, len(metas))
        heard = groups.gather(told, f"stage {index} to be built")
        boundaries.known[index], rows = next(filter(None, heard))
        dependence.append(rows)
    boundaries.settle_gradients(dependence, dataflow)
    return built, boundaries


def dependence_of(stage: TrainableStage, outputs: int) -> Dependence | None:
    """For which of its inputs a stage gives a gradient, by output; None: it does not know."""
    known = getattr(stage, "inputs_given", None)  # takes for which outputs a gradient comes
    if known is None:
        return None
    return [known([at == one for at in range(outputs)]) for one in range(outputs)]


_NO_TENSOR = "no tensor: return it as it is, without .item() or float()"


def compile_stages(stages: Mapping[int, TrainableStage], schedule: Schedule) -> None:
    """Compile what the schedule runs of each stage: in a step, other ranks would wait for it."""
    for index, stage in traced(stages).items():
        row = schedule.ranks[schedule.placement[index]]
        stage.compile([BACKWARDS[a.kind] for a in row if a.stage == index and a.kind in BACKWARDS])


def _examples(
    index: int,
    dataflow: StageDataflow,
    boundaries: Boundaries,
    inputs: Sequence[Tensor],
    device: torch.device,
) -> list[Tensor]:
    """Example arguments of a stage, without targets."""

    def made_by(stage: int) -> Receive:
        wanted = dataflow.select(boundaries.known[stage], stage, index)
        return lambda: [_example(meta, device) for meta in wanted]

    receives = [made_by(stage) for stage in dataflow.sources(index)]
    found = arguments(index, dataflow, receives, lambda: [*inputs])()
    return [each for each in found if each is not None]


def _example(meta: TensorMeta, device: torch.device) -> Tensor:
    return torch.zeros(
        meta.shape, dtype=meta.dtype, device=device, requires_grad=meta.requires_grad
    )


def check_loss(metas: Sequence[TensorMeta]) -> None:
    """Refuse a last stage that does not put out one scalar to differentiate.

    Raises:
        PipelineError: says what came instead.
    """
    scalar = [(len(meta.shape), meta.dtype.is_complex) for meta in metas] == [(0, False)]
    if scalar and metas[0].requires_grad:
        return
    if scalar and not torch.is_grad_enabled():
        raise PipelineError("training needs gradients: call the trainer outside torch.no_grad()")
    came = ", ".join(f"{meta}{'' if meta.requires_grad else ' without gradient'}" for meta in metas)
    raise PipelineError(
        f"loss_fn(output, target) must give one real scalar that depends on the parameters, such "
        f"as the mean over the microbatch; got {came or _NO_TENSOR}"
    )
