"""Build the stages of a rank from their modules, and agree with the other ranks on the tensors
between stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.capture.size_rule import Leaf, SizeRule
from autosplit.errors import (
    AutosplitError,
    BatchError,
    PipelineError,
    with_code,
)
from autosplit.pipeline.engine.boundaries import Boundary, Dependence, NamedLoss, TensorMeta
from autosplit.pipeline.engine.partial_stage import PartialStage
from autosplit.pipeline.engine.stage_arguments import Receive, bind_arguments
from autosplit.pipeline.engine.stage_factory import traced
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.engine.stage_set import MicrobatchSizes, StageRule, StageSet
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule, calls_of
from autosplit.ranks.groups import Groups
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.refusals import misfit
from autosplit.stage import Stage
from autosplit.torch_internals.pytree import tree_unflatten


def check_inputs(
    modules: Mapping[int, nn.Module], dataflow: StageDataflow, inputs: Sequence[Tensor | None]
) -> None:
    """Check the number of a microbatch's inputs before stages are traced: tracing with another
    number would raise a capture error instead.

    Args:
        modules: this rank's modules by stage.
        dataflow: the dataflow between stages.
        inputs: the inputs of one microbatch.

    Raises:
        PipelineError: the first stage takes another number of inputs.
    """
    if dataflow.wiring is None and 0 in modules and (text := misfit(modules[0], inputs)):
        raise PipelineError(f"stage 0 {text}; the batch has {len(inputs)} input(s)")


@dataclass
class MicrobatchExample:
    """A microbatch for which stages are built.

    Attributes:
        number: the number of the microbatch in the step.
        inputs: the inputs of the microbatch; empty if no stage of this rank takes any.
        targets: the targets of the microbatch; empty if no stage of this rank takes any.
        sizes: the sizes of all inputs and targets.
        outputs: by stage, the stage's outputs; stages whose outputs are unknown are missing.
    """

    number: int
    inputs: Sequence[Any]
    targets: Sequence[Any]
    sizes: MicrobatchSizes
    outputs: dict[int, Boundary] = field(default_factory=dict)

    def example_arguments(
        self, index: int, built: StageSet, device: torch.device, *, blank: bool
    ) -> list[Any]:
        """Example arguments of a stage; outputs of other stages have no memory if ``blank``."""

        def outputs_of(stage: int) -> Receive:
            metas = built.dataflow.select(self.outputs[stage], stage, index)
            return lambda: [_example(meta, device, blank=blank) for meta in metas]

        receives = [outputs_of(stage) for stage in built.dataflow.sources(index)]
        examples = bind_arguments(index, built.dataflow, receives, lambda: [*self.inputs])()
        targets = self.targets if index == built.count - 1 else ()
        return [example for example in (*examples, *targets) if example is not None]


class _StageFacts(NamedTuple):
    """A stage's outputs and rules, which its rank sends to all ranks.

    Attributes:
        outputs: the outputs for the first microbatch.
        dependence: see ``Dependence``.
        part_names: names of the parts of the loss.
        rules: rules of new captures; None for a stage that has none.
    """

    outputs: Boundary
    dependence: Dependence | None
    part_names: tuple[str, ...]
    rules: list[StageRule] | None


def build_stages(
    built: StageSet,
    modules: Mapping[int, nn.Module],
    groups: Groups,
    factory: Callable[..., TrainableStage],
    rows: Sequence[MicrobatchExample],
    *,
    refuses: bool,
    device: torch.device,
    expected: Sequence[Boundary] = (),
) -> None:
    """Build this rank's stages for microbatches of new sizes, and agree with all ranks on the
    tensors between stages. Collective.

    The rank of a stage builds it for the outputs of earlier stages, and sends the stage's
    rules to all ranks. Stages are built one after another, because a stage's outputs are known once
    it is built::

        rank 0   stage 0 ─► outputs
        rank 1                     ─► stage 1 ─► outputs
        rank 2                                          ─► stage 2

    With ``expected`` outputs, all ranks build at the same time. If a stage has other outputs than
    expected, stages are built again, one after another.

    Args:
        built: gets the stages, the boundaries and the rules.
        modules: this rank's modules by stage, the last one with its loss.
        groups: the trainer's process groups.
        factory: ``factory(module, arguments, varying, index=index)`` returns a stage for
            ``arguments``. ``varying`` are arguments of other sizes.
        rows: one microbatch for each new combination of sizes.
        refuses: if a stage cannot take a microbatch, whether all ranks raise a ``BatchError``. Else
            the stage's rank raises the stage's error.
        device: the device of example inputs.
        expected: per stage except the last, the outputs that it will have for the first row, if
            they are known before any stage is built; else empty.

    Raises:
        BatchError: a stage cannot take a microbatch; names it.
        PipelineError: the loss is not one floating scalar that needs a gradient.
        LostPeerError: another rank failed or was not ready in time. Each stage has the whole
            timeout.
    """
    dependence, is_new = list[Dependence | None](), not built.boundaries.outputs
    builds = {
        index: partial(
            _build_stage, built, index, partial(factory, module, index=index), rows, device
        )
        for index, module in modules.items()
    }
    facts_by_stage = {}
    if built.count > 1 and len(expected) == built.count - 1 and len(rows) == 1:
        facts_by_stage = _build_at_once(built, builds, groups, rows[0], expected)
    for index in range(built.count):
        facts = facts_by_stage.get(index) or _build_in_turn(index, builds, groups, refuses=refuses)
        if is_new:
            built.boundaries.outputs[index] = facts.outputs
            built.boundaries.part_names = facts.part_names
            dependence.append(facts.dependence)
        _use_rules(built, index, facts, rows)
    if is_new:
        built.boundaries.resolve_gradients(dependence, built.dataflow)
        built.first_sizes = rows[0].sizes


def _build_at_once(
    built: StageSet,
    builds: Mapping[int, Callable[[], _StageFacts]],
    groups: Groups,
    row: MicrobatchExample,
    expected: Sequence[Boundary],
) -> dict[int, _StageFacts]:
    """Build this rank's stages for the expected outputs of the other stages; collective.

    Args:
        built: gets the stages.
        builds: by stage of this rank, a function that builds it.
        groups: the trainer's process groups.
        row: the microbatch for which stages are built.
        expected: the expected outputs, see ``build_stages``.

    Returns:
        the facts of all stages; empty if stages must be built one after another.
    """
    row.outputs.update(enumerate(expected))
    built_here: dict[int, _StageFacts] = {}
    with contextlib.suppress(BatchError):  # raised again when stages are built one after another
        built_here.update((index, builds[index]()) for index in sorted(builds))
    row.outputs.clear()
    facts: dict[int, _StageFacts] = {}
    for of_rank in groups.gather(built_here, "all stages to be built"):
        facts |= of_rank
    outputs = [facts[index].outputs for index in sorted(facts)]
    if len(facts) == built.count and outputs[:-1] == [*expected]:
        return facts
    built.stages.clear()
    return {}


def _build_in_turn(
    index: int, builds: Mapping[int, Callable[[], _StageFacts]], groups: Groups, *, refuses: bool
) -> _StageFacts:
    """Build a stage on its rank, while the other ranks wait for its facts; collective.

    Raises:
        BatchError: the stage cannot take a microbatch, see ``build_stages``.
    """
    facts: _StageFacts | BatchError | None = None
    if index in builds:
        try:
            facts = builds[index]()
        except BatchError as error:
            if not refuses:
                raise error.__cause__ or error from None
            facts = BatchError(*error.args)
    of_ranks: list[Any] = groups.gather(facts, f"stage {index} to be built")
    facts = next(filter(None, of_ranks))
    if isinstance(facts, BatchError):
        raise facts
    return facts


def _build_stage(
    built: StageSet,
    index: int,
    make: Callable[..., TrainableStage],
    rows: Sequence[MicrobatchExample],
    device: torch.device,
) -> _StageFacts:
    """Build one stage, or prepare it for further microbatches.

    Raises:
        BatchError: the stage cannot take a microbatch; the cause of the error says why.
    """
    reached = [
        row for row in rows if built.argument_sizes(index, row.sizes, row.outputs) is not None
    ]
    examples = [
        row.example_arguments(index, built, device, blank=row is not rows[0]) for row in reached
    ]
    rules, new_rules = built.rules[index], list[StageRule]()
    stage: Any = built.stages.get(index)
    for number, row in enumerate(reached):
        sizes = built.argument_sizes(index, row.sizes, row.outputs) or ()
        if rules is None or any(rule.sizes.output_sizes(sizes) for rule in (*rules, *new_rules)):
            continue
        try:
            if stage is None:
                stage = built.stages[index] = make(examples[0], examples[1:])
            elif not hasattr(stage, "prepare"):
                rules = None
                continue
            elif isinstance(stage, Stage):
                stage.prepare(examples[number], examples)
            else:  # a stage that runs as several graphs runs on the example
                stage.prepare(row.example_arguments(index, built, device, blank=False))
        except AutosplitError as error:
            raise BatchError(
                f"microbatch {row.number} does not fit stage {index}: {error}"
            ) from error
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            if all(isinstance(value, Tensor) for value in examples[number]):
                raise
            raise BatchError(_objects_text(index, row, examples[number], error)) from error
        new_rules.append(_rule_of(stage, sizes, [*rules, *new_rules]))
    if len(new_rules) > 1:
        stage.prepare(examples[0])  # memory is predicted for the largest microbatch
    metas = tuple([TensorMeta(*spec) for spec in stage.output_specs])
    built.dataflow.check_outputs(index, len(metas))
    names = _part_names(stage)
    if index == built.count - 1:
        check_loss(metas, names)
        _check_later_losses(stage)
    dependence = dependence_of(stage, len(metas))
    return _StageFacts(metas, dependence, names, None if rules is None else new_rules)


def _rule_of(stage: Any, sizes: Sequence[Leaf], earlier: Sequence[StageRule]) -> StageRule:
    """The rule of the capture that a stage has prepared last."""
    shapes = [shape for shape, *_ in stage.output_specs]
    dependence = dependence_of(stage, len(shapes))
    if not isinstance(stage, Stage):
        return StageRule(SizeRule.fixed(sizes, shapes), dependence)
    if not stage.is_unchanged:
        # The module may change back, and read again what it has read before.
        dependence = _union([dependence, *(rule.dependence for rule in earlier)])
    return StageRule(stage.size_rule(), dependence)


def _objects_text(
    index: int, row: MicrobatchExample, arguments: Sequence[Any], error: Exception
) -> str:
    """Say that a stage cannot take a microbatch with arguments that are objects."""
    kinds = ", ".join("a tensor" if isinstance(a, Tensor) else _kind(a) for a in arguments)
    return (
        f"microbatch {row.number} does not fit stage {index}, whose arguments (inputs, then "
        f"targets in the last stage) are {kinds}: {type(error).__name__}: {error}\n  Pass a tensor "
        "where the stage or the loss takes one"
    )


def _kind(value: object) -> str:
    advice = " (torch.from_numpy makes a tensor of it)" if hasattr(value, "__array__") else ""
    return f"an object of class {type(value).__name__}{advice}"


def _use_rules(
    built: StageSet, index: int, facts: _StageFacts, rows: Sequence[MicrobatchExample]
) -> None:
    """Add a stage's new rules to the agreed rules, and set the stage's outputs in each row."""
    rules = built.rules[index]
    if rules is None or facts.rules is None:
        built.rules[index] = None
        rows[0].outputs[index] = facts.outputs
        return
    rules += facts.rules
    for row in rows:
        arguments = built.argument_sizes(index, row.sizes, row.outputs)
        if arguments is not None and (fitting := built.facts_of(index, arguments, rules)):
            row.outputs[index] = fitting[0]


def _part_names(stage: TrainableStage) -> tuple[str, ...]:
    """The names of the parts of a stage's loss, in the order of its outputs after the loss."""
    if not isinstance(stage, Stage):
        names: tuple[str, ...] = getattr(stage, "part_names", ())
        return names
    return _parts_of(stage.functions)


def _parts_of(functions: SplitFunctions) -> tuple[str, ...]:
    spec = functions.capture.output_spec
    positions = tree_unflatten([*range(spec.num_leaves)], spec)
    if not isinstance(positions, NamedLoss):
        return ()
    return tuple(sorted(positions.parts, key=positions.parts.__getitem__))


def dependence_of(stage: TrainableStage, outputs: int) -> Dependence | None:
    """See ``Dependence``; None for a stage without graphs."""
    inputs_given = getattr(stage, "inputs_given", None)
    if inputs_given is None:
        return None
    return [inputs_given([at == one for at in range(outputs)]) for one in range(outputs + 1)]


def _union(dependences: Sequence[Any]) -> Dependence:
    """For each output and each input, whether the input gets a gradient in any capture."""
    return [[*map(any, zip(*rows, strict=False))] for rows in zip(*dependences, strict=True)]


_NO_TENSOR = "no tensor: return it as it is, without .item() or float()"


def compile_stages(stages: Mapping[int, TrainableStage], schedule: Schedule) -> None:
    """Compile the graphs that the schedule runs, before the step, in which other ranks would wait
    for the compilation.
    """
    for index, stage in traced(stages).items():
        row = schedule.ranks[schedule.placement[index]]
        # Moves between two Ws keep them apart, as in the executor.
        stage.compile(calls_of(row, index))


def _example(meta: TensorMeta, device: torch.device, *, blank: bool) -> Tensor:
    example = torch.empty(meta.shape, dtype=meta.dtype, device=device)
    if not blank:
        return example.zero_().requires_grad_(meta.requires_grad)
    if meta.shape:
        example.untyped_storage().resize_(0)
    return example.requires_grad_(meta.requires_grad)


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


def _check_later_losses(stage: object) -> None:
    """Let the last stage refuse a loss that changes after the stage was built, as ``check_loss``
    refuses the first one: without a gradient, the step would train nothing and say nothing.
    """
    if isinstance(stage, Stage):
        stage.check_captures(_check_captured_loss)
    elif isinstance(stage, PartialStage):
        stage.check_outputs = check_loss


def _check_captured_loss(functions: SplitFunctions) -> None:
    specs, trained = functions.specs_by_path, functions.tangent_specs
    paths = [path for path in functions.capture.outputs if path in specs]
    metas = [TensorMeta(specs[path].shape, specs[path].dtype, path in trained) for path in paths]
    check_loss(metas, _parts_of(functions))


def _is_real_scalar(meta: TensorMeta) -> bool:
    return not (meta.shape or meta.dtype.is_complex)
