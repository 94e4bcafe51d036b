"""The stages that a trainer is given, and their modules completed with loss and autocast."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from autosplit.capture.diagnosis import Wrapper, is_library_file
from autosplit.errors import PipelineError
from autosplit.pipeline.engine.autocast import WithAutocast
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.pipeline.schedule.routes import Wiring
from autosplit.ranks.fault_store import describe_error
from autosplit.runtime.refusals import misfit
from autosplit.torch_internals.dtensor import dtensor_class

Holder: TypeAlias = "tuple[int, str]"
"""A stage and the name of the parameter within it."""
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
Observer: TypeAlias = Callable[[Any, Any], None]
_NUMBERS = (Number, torch.SymInt, torch.SymFloat, torch.SymBool)  # the latter in a capture
StageList: TypeAlias = "Sequence[nn.Module] | Callable[[int], nn.Module] | Partitioned"


@runtime_checkable
class Partitioned(Protocol):
    """A model that is cut into stages, as ``autosplit.partition`` returns one."""

    @property
    def wiring(self) -> Wiring:
        """The dataflow between stages."""
        ...

    @property
    def shared(self) -> Sequence[Sequence[Holder]]:
        """Parameters that several stages hold: groups of (stage, name)."""
        ...

    @property
    def stages(self) -> int:
        """How many stages there are."""
        ...

    def build(self, index: int) -> nn.Module:
        """The module of one stage."""
        ...


@dataclass(frozen=True)
class StageSource:
    """The stages that a trainer trains, none of them built yet.

    Attributes:
        count: how many there are.
        build: makes stage ``index``.
        wiring: the dataflow between stages; None: a chain.
        shared: parameters that several stages hold.
        shared_buffers: likewise.
        cut: whether they were cut from a whole model by the trainer itself.
    """

    count: int
    build: Callable[[int], nn.Module]
    wiring: Wiring | None = None
    shared: Sequence[Sequence[Holder]] = ()
    shared_buffers: Sequence[Sequence[Holder]] = ()
    cut: bool = False

    @classmethod
    def of(cls, model: StageList, count: int | None = None) -> StageSource:
        """The stages of whatever was given.

        Raises:
            PipelineError: nothing says how many stages there are, or two things say different.
        """
        stages = _stages_of(model, count)
        if count not in (None, stages.count):
            raise PipelineError(f"got {stages.count} stages, but stages={count}")
        if stages.count < 1:
            raise PipelineError(f"a pipeline needs at least one stage; got {stages.count}")
        return stages


def _stages_of(model: Any, count: int | None) -> StageSource:
    if isinstance(model, Partitioned):
        return StageSource(model.stages, model.build, model.wiring, model.shared)
    if not callable(model) or isinstance(model, nn.ModuleList):
        modules = list(model)
        tied = _tied(modules, nn.Module.named_parameters), _tied(modules, nn.Module.named_buffers)
        return StageSource(len(modules), modules.__getitem__, None, *tied)
    if count is None:
        raise PipelineError("with a function for stages, say how many: stages=N")
    return StageSource(count, model)


def _tied(
    modules: Sequence[Any], named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
) -> Sequence[Sequence[Holder]]:
    """Tensors that several of the modules hold, each of which may go to a rank of its own."""
    holders: dict[int, list[Holder]] = {}
    for stage, module in enumerate(modules):
        if isinstance(module, nn.Module):
            for name, tensor in named(module):
                holders.setdefault(id(tensor), []).append((stage, name))
    return [held for held in holders.values() if len(held) > 1]


def union_of_groups(
    found: Sequence[Sequence[Holder]], given: Sequence[Sequence[Holder]]
) -> tuple[Sequence[Holder], ...]:
    """The groups that were found in the model and those that the user gave, equal ones once."""
    said = [set(map(tuple, holders)) for holders in given]
    return (*(holders for holders in found if set(holders) not in said), *given)


def check_trained(loss_fn: LossFunction, module: nn.Module) -> None:
    """Refuse a loss with parameters of its own, which nobody would train.

    Raises:
        PipelineError: names one.
    """
    if not isinstance(loss_fn, nn.Module):
        return
    known = set(map(id, module.parameters()))
    for name, parameter in loss_fn.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise PipelineError(
                f"loss_fn ({type(loss_fn).__name__}) has a parameter {name!r}, which no optimizer "
                "of the trainer moves: let the last stage hold it and put it out beside the "
                "output, or freeze it (requires_grad_(False))"
            )


class WithLoss(Wrapper):
    """The last stage with the loss: takes its inputs, then the targets, and returns the loss.

    Args:
        targets: how many of the arguments are targets; None if the target is one plain tensor,
            which ``loss_fn`` then gets as it is rather than in a tuple.
        observer: is shown what ``loss_fn`` is given.
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

    def outputs(self, args: Sequence[Tensor]) -> tuple[Any, Any]:
        """What the loss is given: the module's output, and the targets."""
        targets = args[len(args) - self._targets :]
        return self.module(*self.taken(args)), targets[0] if self._plain else targets

    def taken(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the module is given of the arguments."""
        return args[: len(args) - self._targets]

    def forward(self, *args: Tensor) -> Any:
        output, targets = self.outputs(args)
        if self._observer is not None:
            self._observer(output, targets)
        loss: Any = self.loss_fn(output, targets)
        if self._dtensor is not None and isinstance(loss, self._dtensor):  # of loss_parallel
            loss = loss.full_tensor()
        # An error raised here would come out as one of tracing: ``check_loss`` sees no tensor.
        if torch.compiler.is_compiling() and (loss is None or isinstance(loss, _NUMBERS)):
            return ()
        return loss


def explain(index: int, module: nn.Module, args: Sequence[Tensor], *, called: bool) -> None:
    """Where a stage cannot be captured because it takes another number of inputs, or because its
    loss fails in eager mode too, say so.

    Args:
        index: of the stage.
        module: that could not be captured.
        args: for these.
        called: whether the loss may be called.

    Raises:
        PipelineError: it is so; of a loss that fails, names its line, and what it was given.
    """
    module = module.module if isinstance(module, WithAutocast) else module
    last = module if isinstance(module, WithLoss) else None
    own, given = (last.module, last.taken(args)) if last else (module, args)
    if text := misfit(own, given):
        raise PipelineError(
            f"stage {index} ({type(own).__name__}) {text}; the stage before it puts out "
            f"{len(given)} tensor(s)"
        )
    if last is None or not called:
        return
    try:
        output, targets = last.outputs(tuple(args))
    except Exception:  # not of the loss, and told by capture
        return
    try:
        last.loss_fn(output, targets)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        lines = [f"{at.filename}:{at.lineno}" for at in frames if not is_library_file(at.filename)]
        raise PipelineError(
            f"loss_fn(output, targets) raised {describe_error(error)}\n  "
            f"{f'at {lines[-1]}, ' if lines else ''}output: {_told(output)}, "
            f"targets: {_told(targets)}"
        ) from error


def _told(value: object) -> str:
    if isinstance(value, Tensor):
        return str(TensorMeta.of(value))
    if isinstance(value, tuple):
        return f"({', '.join(map(_told, value))})"
    return f"a {type(value).__name__}"
