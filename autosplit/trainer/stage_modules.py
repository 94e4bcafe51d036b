"""The source of a trainer's stages, and the wrapper that adds the loss to the last stage."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from autosplit.capture.diagnosis import Wrapper, is_library_file
from autosplit.capture.size_rule import Leaf
from autosplit.errors import PipelineError
from autosplit.pipeline.engine.autocast import WithAutocast
from autosplit.pipeline.engine.boundaries import Boundary, NamedLoss, TensorMeta
from autosplit.pipeline.schedule.routes import Wiring
from autosplit.ranks.fault_store import describe_error
from autosplit.runtime.refusals import misfit
from autosplit.torch_internals.dtensor import dtensor_class
from autosplit.trainer.aux_losses import WithAuxLosses

Holder: TypeAlias = "tuple[int, str]"
"""A stage and the name of a parameter within it."""
LossFunction: TypeAlias = "Callable[[Any, Any], Tensor | tuple[Tensor, Mapping[str, Tensor]]]"
"""Returns the loss, or the loss and its named parts."""
Observer: TypeAlias = Callable[[Any, Any], None]
_NUMBERS = (
    Number,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)  # a capture has symbolic ones
StageList: TypeAlias = "Sequence[nn.Module] | Callable[[int], nn.Module] | Partitioned"


@runtime_checkable
class Partitioned(Protocol):
    """A model that is cut into stages, such as the ``Plan`` of ``autosplit.partition``."""

    @property
    def wiring(self) -> Wiring:
        """The dataflow between stages."""
        ...

    @property
    def shared(self) -> Sequence[Sequence[Holder]]:
        """Parameters of which several stages hold a copy: groups of (stage, name)."""
        ...

    @property
    def stages(self) -> int:
        """The number of stages."""
        ...

    def build(self, index: int) -> nn.Module:
        """The module of one stage."""
        ...


def _unknown(sizes: Sequence[Leaf]) -> Sequence[Boundary]:
    """No boundaries, for stages whose outputs are known only after they are built."""
    return ()


@dataclass(frozen=True)
class StageSource:
    """The stages of a trainer, before any of them is built.

    Attributes:
        count: the number of stages.
        build: ``build(index)`` returns the module of stage ``index``.
        wiring: the dataflow between stages; None: a chain.
        shared: parameters of which several stages hold a copy, as groups of (stage, name).
        shared_buffers: buffers of which several stages hold a copy.
        planning: options for ``StageOptions.planning`` that cut the model in the same way without
            measuring; None if the trainer has not cut the model.
        groups: names of modules that are parameter groups of ``fully_shard``, inner ones first;
            None: groups are chosen for each stage.
        model: the whole model that the trainer has cut; None if the user has passed stages.
        boundaries: a function from the sizes of a microbatch's inputs to the tensors that each
            stage but the last sends; empty if they are not known before stages are built.
    """

    count: int
    build: Callable[[int], nn.Module]
    wiring: Wiring | None = None
    shared: Sequence[Sequence[Holder]] = ()
    shared_buffers: Sequence[Sequence[Holder]] = ()
    planning: Mapping[str, Any] | None = None
    groups: tuple[str, ...] | None = None
    model: nn.Module | None = None
    boundaries: Callable[[Sequence[Leaf]], Sequence[Boundary]] = _unknown

    @property
    def cut(self) -> bool:
        """Whether the trainer itself has cut the stages from a whole model."""
        return self.model is not None

    @classmethod
    def of(cls, model: StageList, count: int | None = None) -> StageSource:
        """Return the source of the stages of a list, a function, or a model that is cut.

        Raises:
            PipelineError: a function has no ``count``, there is no stage, or a list has not
                ``count`` stages.
        """
        stages = _stages_of(model, count)
        if count not in (None, stages.count):
            raise PipelineError(
                f"the model has {stages.count} stages, but stages={count}: leave stages= out"
            )
        if stages.count < 1:
            raise PipelineError(f"a pipeline needs at least one stage; got {stages.count}")
        return stages


def _stages_of(model: Any, count: int | None) -> StageSource:
    if isinstance(model, Partitioned):
        boundaries = getattr(model, "boundaries", _unknown)
        return StageSource(
            model.stages, model.build, model.wiring, model.shared, boundaries=boundaries
        )
    if not callable(model) or isinstance(model, nn.ModuleList):
        modules = list(model)
        tied = _tied(modules, nn.Module.named_parameters), _tied(modules, nn.Module.named_buffers)
        return StageSource(len(modules), modules.__getitem__, None, *tied)
    if count is None:
        raise PipelineError("a function that builds stages needs their number: pass stages=N")
    return StageSource(count, model)


def _tied(
    modules: Sequence[Any], named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
) -> Sequence[Sequence[Holder]]:
    """Groups of (stage, name) that are one tensor; the stages may be on different ranks."""
    holders: dict[int, list[Holder]] = {}
    for stage, module in enumerate(modules):
        if isinstance(module, nn.Module):
            for name, tensor in named(module):
                holders.setdefault(id(tensor), []).append((stage, name))
    return [group for group in holders.values() if len(group) > 1]


def union_of_groups(
    detected: Sequence[Sequence[Holder]], declared: Sequence[Sequence[Holder]]
) -> tuple[Sequence[Holder], ...]:
    """The groups of shared parameters that were detected in the model, and the groups that the user
    has declared, without duplicates.
    """
    declared_sets = [set(map(tuple, holders)) for holders in declared]
    return (*(holders for holders in detected if set(holders) not in declared_sets), *declared)


def check_trained(loss_fn: LossFunction, module: nn.Module) -> None:
    """Refuse a loss with trained parameters that ``module`` does not have, because no optimizer
    would train them.

    Raises:
        PipelineError: names a trained parameter of the loss that no optimizer would train.
    """
    if not isinstance(loss_fn, nn.Module):
        return
    module_parameters = set(map(id, module.parameters()))
    for name, parameter in loss_fn.named_parameters():
        if parameter.requires_grad and id(parameter) not in module_parameters:
            raise PipelineError(
                f"loss_fn ({type(loss_fn).__name__}) has a parameter {name!r}, which no optimizer "
                "of the trainer updates: move it into the last stage, which returns it with its "
                "output, or freeze it (requires_grad_(False))"
            )


class WithLoss(Wrapper):
    """The last stage with the loss: takes the stage's inputs, then the targets; returns the loss.

    Args:
        module: the last stage.
        loss_fn: ``loss_fn(output, targets)`` returns the loss.
        targets: the number of arguments that are targets; None for a single target, which
            ``loss_fn`` gets as a tensor instead of a tuple.
        observer: ``observer(output, targets)`` is called before each call of ``loss_fn``.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFunction,
        targets: int | None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(module)
        self.loss_fn = loss_fn
        self._plain = targets is None
        self._targets = 1 if targets is None else targets
        self._dtensor = dtensor_class()
        self._observer = observer

    def loss_inputs(self, args: Sequence[Tensor]) -> tuple[Any, Any]:
        """Run the module on the stage's inputs among ``args``.

        Returns:
            the arguments of the loss: (the module's output, the targets among ``args``).
        """
        targets = args[len(args) - self._targets :]
        return self.module(*self.module_inputs(args)), targets[0] if self._plain else targets

    def module_inputs(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        """The arguments of the module: all but the targets."""
        return args[: len(args) - self._targets]

    def forward(self, *args: Tensor) -> Any:
        """Return the loss and any parts of it; () if the loss is None or a number."""
        output, targets = self.loss_inputs(args)
        if self._observer is not None:
            self._observer(output, targets)
        result: Any = self.loss_fn(output, targets)
        # An error raised here would be reported as one of tracing; ``check_loss`` refuses
        # the empty result.
        if result is None or isinstance(result, _NUMBERS):
            return ()
        if not _has_parts(result):
            return self._whole(result)
        loss, parts = result
        _check_parts(parts)
        names = sorted(parts)
        return NamedLoss(
            self._whole(loss), {name: self._whole(parts[name]).detach() for name in names}
        )

    def _whole(self, value: Any) -> Any:
        """Return the value. For a DTensor, such as a loss under loss_parallel, return the whole
        tensor.
        """
        is_dtensor = self._dtensor is not None and isinstance(value, self._dtensor)
        return value.full_tensor() if is_dtensor else value


def _has_parts(result: object) -> bool:
    """Whether a loss function returned ``(loss, {name: part})``."""
    return isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)


def _check_parts(parts: Mapping[Any, object]) -> None:
    """Check that the parts of a loss are named tensors.

    Raises:
        PipelineError: names a part that is not a tensor.
    """
    for name, part in parts.items():
        if not isinstance(name, str) or not isinstance(part, Tensor):
            raise PipelineError(
                f"loss_fn returned (loss, parts), and the part {name!r} is a "
                f"{type(part).__name__}: return a dictionary of names and scalar tensors, such as "
                '{"z": z.detach()}, without .item() or float()'
            )


def explain_failed_capture(
    index: int, module: nn.Module, args: Sequence[Tensor], *, called: bool
) -> None:
    """Raise a clearer error for a failed capture, if the number of inputs is wrong or the loss
    fails.

    Args:
        index: the index of the stage.
        module: the module of the stage.
        args: the arguments of the capture.
        called: whether module and loss may be called in eager mode.

    Raises:
        PipelineError: the stage takes another number of inputs; or its loss fails in eager mode
            too, and the message names the loss's line and arguments.
    """
    while isinstance(module, WithAutocast | WithAuxLosses):
        module = module.module
    last = module if isinstance(module, WithLoss) else None
    stage, inputs = (last.module, last.module_inputs(args)) if last else (module, args)
    if text := misfit(stage, inputs):
        raise PipelineError(
            f"stage {index} ({type(stage).__name__}) {text}; the previous stage returns "
            f"{len(inputs)} tensor(s)"
        )
    if last is None or not called:
        return
    try:
        output, targets = last.loss_inputs(tuple(args))
    except Exception:  # the module fails, which the error of the capture reports
        return
    try:
        result: Any = last.loss_fn(output, targets)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        user_frames = [frame for frame in frames if not is_library_file(frame.filename)]
        lines = [f"{frame.filename}:{frame.lineno}" for frame in user_frames]
        raise PipelineError(
            f"loss_fn(output, targets) raised {describe_error(error)}\n  "
            f"{f'at {lines[-1]}, ' if lines else ''}output: {_describe(output)}, "
            f"targets: {_describe(targets)}"
        ) from error
    if _has_parts(result):
        _check_parts(result[1])


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return str(TensorMeta.of(value))
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return f"a {type(value).__name__}"
