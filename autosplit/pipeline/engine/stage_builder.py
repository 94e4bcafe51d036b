"""Build the stages of a rank from their modules, and agree with the other ranks on the tensors
between stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.errors import (
    CaptureError,
    FailingCallError,
    FirstCallError,
    PipelineError,
    reworded,
    with_code,
)
from autosplit.pipeline.engine.boundaries import (
    Boundaries,
    Boundary,
    Dependence,
    NamedLoss,
    TensorMeta,
)
from autosplit.pipeline.engine.stage_protocols import (
    StageFactory,
    TrainableStage,
    unsupported_output,
)
from autosplit.pipeline.engine.transport import Receive, bind_arguments
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule, calls_of
from autosplit.ranks.groups import Groups
from autosplit.runtime.options import SplitOptions
from autosplit.runtime.refusals import misfit
from autosplit.stage import Stage
from autosplit.torch_internals.distributed import fsdp_part
from autosplit.torch_internals.pytree import class_of, is_flat, tree_unflatten


@dataclass(frozen=True)
class SplitStage:
    """The ``StageFactory`` that makes an ``autosplit.Stage``, or a ``PartialStage`` for a module
    that cannot be captured in one graph.

    Attributes:
        options: how stages are split.
        fullgraph: whether to refuse a module that cannot be captured in one graph: True, or the
            name of the trainer's option that needs one graph.
    """

    options: SplitOptions
    fullgraph: bool | str = False

    def __call__(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """Make a stage for ``module(*args)``; see ``StageFactory``.

        Raises:
            CaptureError: the module cannot be captured, and cannot or must not run as several
                graphs.
            PipelineError: the module returns neither a tensor nor a tuple of tensors.
        """
        try:
            stage = Stage(module, args, index=index, options=self.options)
        except (FailingCallError, FirstCallError):
            raise
        except CaptureError as error:
            return self._in_parts(module, args, index, error)
        spec = stage.functions.capture.output_spec
        if not (is_flat(spec) or class_of(spec) is NamedLoss):
            raise unsupported_output(index, class_of(spec))
        return stage

    def _in_parts(
        self, module: nn.Module, args: list[Tensor], index: int, error: CaptureError
    ) -> TrainableStage:
        """Make a ``PartialStage``, or raise ``error``."""
        needed_by = "fully_shard" if fsdp_part(module) is not None else self.fullgraph
        if isinstance(needed_by, str):
            text = f"Such a stage can run as several graphs, but {needed_by} needs one graph"
            raise reworded(error, f"{error}\n  {text}") from error
        if needed_by:
            raise error
        from autosplit.pipeline.engine.partial_stage import PartialStage  # imports Dynamo

        return PartialStage(module, args, index=index, options=self.options, error=error)


def traced(stages: Mapping[int, TrainableStage]) -> dict[int, Stage]:
    """The stages that are an ``autosplit.Stage``. A user's stage factory may make other stages."""
    return {index: stage for index, stage in stages.items() if isinstance(stage, Stage)}


def check_inputs(
    modules: Mapping[int, nn.Module], dataflow: StageDataflow, inputs: Sequence[Tensor | None]
) -> None:
    """Check a microbatch's inputs before stages are traced, which would raise a capture error.

    Args:
        modules: this rank's modules by stage. The method ``check_inputs`` of submodules that have
            it is called.
        dataflow: the dataflow between stages.
        inputs: the inputs of one microbatch.

    Raises:
        PlanError: the batch size differs from the one for which the model was cut.
        PipelineError: the first stage takes another number of inputs.
    """
    if dataflow.wiring is None:
        if 0 in modules and (text := misfit(modules[0], inputs)):
            raise PipelineError(f"stage 0 {text}; the batch has {len(inputs)} input(s)")
        return
    for index, module in modules.items():
        sources = dataflow.wiring.inputs[index]
        args = [inputs[source.position] if source.stage is None else None for source in sources]
        for part in module.modules():
            check: Any = getattr(part, "check_inputs", None)
            if check is not None:
                check(args)  # None for outputs of other stages


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
    """Build this rank's stages, and agree on the tensors between all stages. Collective.

    Stages are built one after another. A stage's rank builds it for the outputs of earlier stages,
    and sends the shapes of its outputs to all ranks.

    Args:
        modules: this rank's modules by stage, the last one with its loss.
        stages: the number of stages.
        dataflow: the dataflow between stages.
        groups: the trainer's process groups.
        factory: makes a stage.
        inputs: one microbatch's inputs, as examples; only the inputs that this rank's stages read
            are needed.
        targets: one microbatch's targets, as examples; only the last stage's rank needs them.
        device: the device of example inputs.

    Raises:
        PipelineError: the loss is not one floating scalar that needs a gradient.
        LostPeerError: another rank failed or was not ready in time. Each stage has the whole
            timeout.
    """
    built: dict[int, TrainableStage] = {}
    boundaries = Boundaries()
    dependence: list[Dependence | None] = []
    for index in range(stages):
        built_here: tuple[Boundary, Dependence | None, tuple[str, ...]] | None = None
        if index in modules:
            args = _examples(index, dataflow, boundaries, inputs, device)
            if index == stages - 1:
                args += targets
            stage = built[index] = factory(modules[index], args, index=index)
            metas = tuple([TensorMeta(*spec) for spec in stage.output_specs])
            dataflow.check_outputs(index, len(metas))
            names = _part_names(stage)
            if index == stages - 1:
                check_loss(metas, names)
            built_here = metas, dependence_of(stage, len(metas)), names
        of_ranks = groups.gather(built_here, f"stage {index} to be built")
        boundaries.outputs[index], rows, boundaries.part_names = next(filter(None, of_ranks))
        dependence.append(rows)
    boundaries.resolve_gradients(dependence, dataflow)
    return built, boundaries


def _part_names(stage: TrainableStage) -> tuple[str, ...]:
    """The names of the parts of a stage's loss, in the order of its outputs after the loss."""
    if not isinstance(stage, Stage):
        names: tuple[str, ...] = getattr(stage, "part_names", ())
        return names
    spec = stage.functions.capture.output_spec
    positions = tree_unflatten([*range(spec.num_leaves)], spec)
    if not isinstance(positions, NamedLoss):
        return ()
    return tuple(sorted(positions.parts, key=positions.parts.__getitem__))


def dependence_of(stage: TrainableStage, outputs: int) -> Dependence | None:
    """For each output of a stage, the inputs that get a gradient from it; None for a stage without
    graphs.
    """
    inputs_given = getattr(stage, "inputs_given", None)
    if inputs_given is None:
        return None
    return [inputs_given([at == one for at in range(outputs)]) for one in range(outputs)]


_NO_TENSOR = "no tensor: return it as it is, without .item() or float()"


def compile_stages(stages: Mapping[int, TrainableStage], schedule: Schedule) -> None:
    """Compile the graphs that the schedule runs, before the step, in which other ranks would wait
    for the compilation.
    """
    for index, stage in traced(stages).items():
        row = schedule.ranks[schedule.placement[index]]
        # Moves between two Ws keep them apart, as in the executor.
        stage.compile(calls_of(row, index))


def _examples(
    index: int,
    dataflow: StageDataflow,
    boundaries: Boundaries,
    inputs: Sequence[Tensor],
    device: torch.device,
) -> list[Tensor]:
    """Example arguments of a stage, without targets."""

    def outputs_of(stage: int) -> Receive:
        metas = dataflow.select(boundaries.outputs[stage], stage, index)
        return lambda: [_example(meta, device) for meta in metas]

    receives = [outputs_of(stage) for stage in dataflow.sources(index)]
    examples = bind_arguments(index, dataflow, receives, lambda: [*inputs])()
    return [example for example in examples if example is not None]


def _example(meta: TensorMeta, device: torch.device) -> Tensor:
    return torch.zeros(
        meta.shape, dtype=meta.dtype, device=device, requires_grad=meta.requires_grad
    )


def check_loss(metas: Sequence[TensorMeta], part_names: Sequence[str] = ()) -> None:
    """Refuse a last stage that does not return one scalar loss with a gradient, then scalar parts
    of the loss.

    Args:
        metas: metadata of the stage's outputs.
        part_names: names of the outputs after the first.

    Raises:
        PipelineError: names the outputs.
    """
    metas, parts = metas[: len(metas) - len(part_names)], metas[len(metas) - len(part_names) :]
    scalar = [*map(_is_real_scalar, metas)] == [True]
    if scalar and metas[0].requires_grad:
        for name, meta in zip(part_names, parts, strict=True):
            if not _is_real_scalar(meta):
                raise PipelineError(
                    f"the part {name!r} of the loss must be a real scalar, which is averaged over "
                    f"microbatches; got {meta}: return its mean or its sum"
                )
        return
    if scalar and not torch.is_grad_enabled():
        raise PipelineError("training needs gradients: call the trainer outside torch.no_grad()")
    outputs = ", ".join(
        f"{meta}{'' if meta.requires_grad else ' without gradient'}" for meta in metas
    )
    raise PipelineError(
        with_code(
            "loss_fn(output, target) must return one real scalar that depends on the parameters, "
            f"such as the mean over the microbatch; got {outputs or _NO_TENSOR}",
            wrong="loss_fn = lambda output, target: (output - target).square()",
            right="loss_fn = lambda output, target: (output - target).square().mean()",
        )
    )


def _is_real_scalar(meta: TensorMeta) -> bool:
    return not (meta.shape or meta.dtype.is_complex)
