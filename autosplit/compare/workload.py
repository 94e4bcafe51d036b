"""What `autosplit compare MODULE:FACTORY` trains.

A factory is a function that takes keyword settings (`--set dim=256`) and returns a
`Workload`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosplit.errors import PipelineError

from .factory import prepared

if TYPE_CHECKING:
    from torch import Tensor, nn


def _nothing_shared(stages: int) -> Sequence[Sequence[tuple[int, str]]]:
    return ()


@dataclass(frozen=True)
class Workload:
    """A model cut into stages, its loss and its data.

    Attributes:
        stage_fn: `stage_fn(index, stages)` builds stage `index` of `stages`. Deterministic:
            a stage built alone has the weights that it has in the whole, `stage_fn(0, 1)`.
        loss_fn: `loss_fn(output, target)` gives a scalar, the mean over the microbatch.
        batch_fn: `batch_fn(step, size)` gives (inputs, targets) of `size` samples along the
            first dimension, the same on every call and every rank.
        microbatch_size: samples in one microbatch.
        tokens_per_sample: what a sample counts for in tokens/s; 1 where there are no tokens.
        shared_parameters: `shared_parameters(stages)` gives groups of (stage, parameter name)
            that are one parameter of the model, so their gradients must be summed and their
            values kept equal.
        model_fn: builds the whole model, the same weights each time. A comparison then trains
            this one, cut by measured cost, and takes `stage_fn(0, 1)` to check gradients by.
    """

    stage_fn: Callable[[int, int], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch_fn: Callable[[int, int], tuple[Tensor, Tensor]]
    microbatch_size: int
    tokens_per_sample: int
    shared_parameters: Callable[[int], Sequence[Sequence[tuple[int, str]]]] = _nothing_shared
    model_fn: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        for name in ("microbatch_size", "tokens_per_sample"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PipelineError(f"Workload needs {name} >= 1, got {value!r}")
        for name in ("stage_fn", "loss_fn", "batch_fn"):
            value = getattr(self, name)
            if not callable(value):
                raise PipelineError(
                    f"Workload needs a function as {name}, got a {type(value).__name__}"
                )


def load_workload(spec: str, overrides: Mapping[str, object]) -> Workload:
    """What the factory `spec` returns for these settings.

    Raises:
        PipelineError: as `prepared`, or the factory does not return a Workload.
    """
    made = prepared(spec, overrides)()
    if not isinstance(made, Workload):
        raise PipelineError(
            f"{spec} returned a {type(made).__name__}; expected a factory that returns an "
            "autosplit.compare.Workload"
        )
    return made


def example_of(made: Any, spec: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model with its positional and keyword inputs.

    Args:
        made: what the factory `spec` returned: `(model, args)`, `(model, args, kwargs)`, where a
            dictionary as `args` is keyword inputs, or a model that has `dummy_inputs`, as those of
            transformers do.
        spec: for messages.

    Raises:
        PipelineError: `made` is something else.
    """
    from torch import nn

    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        model, args, kwargs = *made[:2], made[2] if len(made) == 3 else {}
        if isinstance(args, Mapping) and not kwargs:
            args, kwargs = (), args
        if isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs):
            return model, args if isinstance(args, tuple) else (args,), dict(kwargs)
    dummy = getattr(made, "dummy_inputs", None)
    if isinstance(made, nn.Module) and isinstance(dummy, Mapping):
        return made, (), dict(dummy)
    came = f"a {type(made).__name__}"
    if isinstance(made, nn.Module):
        came += " without example inputs"
    elif isinstance(made, tuple):
        came += f" of {', '.join(type(each).__name__ for each in made)}"
    raise PipelineError(
        f"{spec} returned {came}; return (model, args) or (model, args, kwargs), a tuple of inputs "
        "and a dictionary of keyword inputs, so that there is something to trace the model with"
    )
