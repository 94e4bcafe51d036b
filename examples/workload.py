"""What benchmarks and examples train: stages of a model, a loss and data; and its settings."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from autosplit.errors import PipelineError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Settings = TypeVar("Settings", bound=DataclassInstance)


def configure(kind: type[Settings], overrides: Mapping[str, object]) -> Settings:
    """A dataclass `kind` of settings with some of its fields overridden.

    Values may be the text of a command line (`"256"`, `"true"`) or of the field's own type.
    Fields are int, float, bool or str.

    Raises:
        PipelineError: an unknown name (the known ones are listed) or a value that does not
            fit its field.
    """
    known = {field.name: field.type for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for name in overrides:
        if name not in known:
            raise PipelineError(
                f"unknown setting {name!r} of {kind.__name__}; known: {', '.join(known)}"
            )
    return kind(**{name: convert(name, value, hints[name]) for name, value in overrides.items()})


def convert(name: str, value: object, kind: type) -> object:
    """The value of a setting that is an int, float, bool or str, or the text of one.

    Raises:
        PipelineError: it is something else.
    """
    truths = {"true": True, "1": True, "false": False, "0": False}
    try:
        if isinstance(value, str):
            return truths[value.lower()] if kind is bool else kind(value)
        if kind is float and type(value) is int:
            return float(value)
    except (KeyError, ValueError):
        pass
    # type() and not isinstance(): True is an int, but `dim=True` is a mistake.
    if type(value) is kind:
        return value
    expected = "true or false" if kind is bool else kind.__name__
    raise PipelineError(f"setting {name} expects {expected}, got {value!r}")


def _nothing_shared(stages: int) -> Sequence[Sequence[tuple[int, str]]]:
    return ()


@dataclass(frozen=True)
class Workload:
    """A model cut into stages, its loss and its data.

    Attributes:
        stage_fn: `stage_fn(index, stages)` builds stage `index` of `stages`. Deterministic:
            a stage built alone has the weights that it has in the whole, `stage_fn(0, 1)`,
            and under the same names.
        loss_fn: `loss_fn(output, target)` gives a scalar, the mean over the microbatch.
        batch_fn: `batch_fn(step, size)` gives (inputs, targets) of `size` samples along the
            first dimension, the same on every call and every rank.
        microbatch_size: samples in one microbatch.
        shared_parameters: `shared_parameters(stages)` gives groups of (stage, parameter name)
            that are one parameter of the model.
    """

    stage_fn: Callable[[int, int], nn.Module]
    loss_fn: Callable[[Any, Any], Tensor]
    batch_fn: Callable[[int, int], tuple[Any, Any]]
    microbatch_size: int
    shared_parameters: Callable[[int], Sequence[Sequence[tuple[int, str]]]] = _nothing_shared


class WithLoss(nn.Module):
    """A model that takes its targets as well and puts out its loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss_fn(self.model(inputs), targets)


def whole(workload: Workload) -> tuple[WithLoss, tuple[Tensor, Tensor]]:
    """The model in one piece with its loss, and a microbatch: what `autosplit compare` takes."""
    model = WithLoss(workload.stage_fn(0, 1), workload.loss_fn)
    return model, workload.batch_fn(0, workload.microbatch_size)
