"""Call a user's factory, named as `MODULE:FACTORY`, for a model with example inputs.

A factory takes keyword settings (`--set dim=256`) and returns `(model, args)`, see `example_of`.
Errors of the factory name the user's line. `resized` makes batches of the example inputs.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.errors import AutosplitError, FactoryError, PipelineError, PlanError, with_code
from autosplit.text.figures import size_text
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

_NOT_USERS = ("/torch/", "/importlib/", "/pkgutil.py", "/inspect.py", Path(__file__).as_posix())


def call_factory(spec: str, settings: Mapping[str, object]) -> Any:
    """Call the function that `spec` names, as in "examples.models:llama", and return its result.

    Raises:
        FactoryError: the function does not exist, does not accept the settings, or raises.
    """
    module, _, attribute = spec.partition(":")
    if not (module and attribute):
        raise FactoryError(
            f"expected MODULE:FACTORY, for example examples.models:llama, got {spec!r}"
        )
    search_working_directory()
    with failures_of(
        f"looking for {spec} in {os.getcwd()} and the installed packages", FactoryError
    ):
        factory = pkgutil.resolve_name(spec)
        signature = inspect.signature(factory)
    try:
        signature.bind(**settings)
    except TypeError as error:
        listed = ", ".join(f"{name}={value}" for name, value in settings.items()) or "no settings"
        raise FactoryError(f"{spec}{signature} cannot be called with {listed}: {error}") from None
    with failures_of(spec, FactoryError):
        return factory(**settings)


def search_working_directory() -> None:
    """Put the working directory first on `sys.path`, where it stays, as under `python -m`. So a
    model's file needs no installation, and its late imports work too.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@contextlib.contextmanager
def failures_of(code: str, kind: type[PipelineError] = PipelineError) -> Iterator[None]:
    """Context that raises an exception of the user's code as an error of autosplit that names the
    user's line.

    Args:
        code: the name of the code for error texts.
        kind: the type of the error that is raised.

    Raises:
        PipelineError: the code raised an error that is not autosplit's.
    """
    try:
        yield
    except AutosplitError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise kind(f"{code} raised {type(error).__name__}: {error}{_user_line(error)}") from error


def _user_line(error: Exception) -> str:
    """The user's line in parentheses: the last one outside torch and the search for the factory;
    empty if there is none.
    """
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    names = [(frame, Path(frame.filename).as_posix()) for frame in frames]
    user_frames = [
        frame for frame, name in names if name[0] != "<" and not any(p in name for p in _NOT_USERS)
    ]
    return f" ({user_frames[-1].filename}:{user_frames[-1].lineno})" if user_frames else ""


class Example(NamedTuple):
    """A model with the inputs and the target of a microbatch.

    Attributes:
        model: the model.
        args: positional inputs.
        kwargs: keyword inputs.
        target: a tensor or a tuple of tensors, for a loss of the user; () without a target.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = ()


def example_of(spec: str, settings: Mapping[str, object]) -> Example:
    """A model with its inputs, and with a target if the factory returns one.

    Args:
        spec: a function that returns `(model, args)`, `(model, args, kwargs)`, `(model, args,
            target)` or `(model, args, kwargs, target)`, where a dictionary as `args` stands for
            keyword inputs; or a model that has `dummy_inputs`, as models of transformers do.
        settings: the function's keyword arguments.

    Raises:
        FactoryError: as `call_factory`; or the function returns something else.
    """
    result = call_factory(spec, settings)
    if isinstance(result, tuple) and len(result) in (2, 3, 4) and isinstance(result[0], nn.Module):
        model, args, *rest = result
        kwargs = rest.pop(0) if rest and isinstance(rest[0], Mapping) else {}
        target = rest.pop(0) if rest and isinstance(rest[0], Tensor | tuple) else ()
        if isinstance(args, Mapping) and not kwargs:
            args, kwargs = (), args
        if not rest and all(isinstance(name, str) for name in kwargs):
            return Example(
                model, args if isinstance(args, tuple) else (args,), dict(kwargs), target
            )
    dummy = getattr(result, "dummy_inputs", None)
    if isinstance(result, nn.Module) and isinstance(dummy, Mapping):
        return Example(result, (), dict(dummy))
    came = f"a {type(result).__name__}"
    if isinstance(result, nn.Module):
        came += " without example inputs"
    elif isinstance(result, tuple):
        came += f" of {', '.join(type(item).__name__ for item in result)}"
    raise FactoryError(
        with_code(
            f"{spec} returned {came}; return (model, args) or (model, args, kwargs), a tuple of "
            "inputs and a dictionary of keyword inputs, with which the model is traced. A target "
            "for --loss, a tensor or a tuple of tensors, may follow as the last item",
            wrong="def factory():\n    return Model()",
            right="def factory():\n    return Model(), (torch.randn(8, 16),)",
        )
    )


class TrainedExample(NamedTuple):
    """A model, the inputs and the target of a microbatch as a trainer accepts them, and the loss of
    its output.
    """

    model: nn.Module
    inputs: Any
    target: Any
    loss: Callable[[Any, Any], Tensor]


def trained_example(spec: str, settings: Mapping[str, object], loss: str | None) -> TrainedExample:
    """The model that the factory `spec` returns for these settings, with a loss. Weights are always
    drawn from the same seed.

    Raises:
        PipelineError: as `example_of` and `_loss_named`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, args, kwargs, target = example_of(spec, settings)
    names = inspect.signature(model.forward).parameters
    inputs = {**dict(zip(names, args, strict=False)), **kwargs} if kwargs else args
    return TrainedExample(model, inputs, target, _loss_named(loss, target))


def _loss_named(spec: str | None, target: Any) -> Callable[[Any, Any], Tensor]:
    """The loss that a command trains.

    Args:
        spec: ``MODULE:NAME`` of a function ``loss(output, target)``, or of a class such as
            ``torch.nn:CrossEntropyLoss``, whose instances are such functions; None: ``own_loss``.
        target: the target of a microbatch, which the factory returned.

    Raises:
        FactoryError: ``spec`` does not exist or is not a function; or there is a target but no
            loss.
    """
    if spec is None:
        if isinstance(target, Tensor) or target:
            raise FactoryError(
                "the factory returns a target, which the output's own loss does not use: name the "
                "loss, as in --loss torch.nn.functional:cross_entropy, or return no target"
            )
        return own_loss
    with failures_of(f"looking for the loss {spec}", FactoryError):
        loss = pkgutil.resolve_name(spec)
        loss = loss() if isinstance(loss, type) else loss
    if not callable(loss):
        raise FactoryError(f"expected a function loss(output, target) as {spec}, got {loss!r}")
    return loss  # type: ignore[no-any-return]


def own_loss(output: Any, targets: Any) -> Tensor:
    """The loss of a model that computes one: the output's attribute `loss`, or the output if it is
    a number. Otherwise the mean square of the output's first floating-point tensor.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = tree_flatten(output)[0]
    floating = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
    first = next(floating)
    return first if first.dim() == 0 else first.float().square().mean()


def resized(inputs: Any, size: int) -> Any:
    """Example inputs with ``size`` samples: cut along dimension 0, or repeated. Each repetition is
    rolled along dimension 1, so that microbatches differ.

    Only tensors with as many samples as the first tensor are resized. Others, such as a mask that
    all samples share, are not changed.

    Raises:
        PlanError: no tensor has samples, or this machine has no memory for so many.
    """
    leaves, spec = tree_flatten(inputs)
    count = samples_of(inputs)

    def has(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count

    needed = size * (8 + sum(leaf.nbytes // count for leaf in leaves if has(leaf)))
    if 0.0 < _half_of_memory() < needed:
        raise PlanError(
            f"the inputs of a microbatch of {size:,} samples take {size_text(needed)}, more than "
            f"half of this machine's memory: take a smaller batch, or more microbatches"
        )
    times = range(math.ceil(size / count))

    def repeated(leaf: Tensor) -> Tensor:
        return torch.cat([leaf.roll(by, 1) if leaf.dim() > 1 else leaf for by in times])[:size]

    return tree_unflatten([repeated(leaf) if has(leaf) else leaf for leaf in leaves], spec)


def samples_of(inputs: Any) -> int:
    """The number of samples in example inputs, which is the size of the first tensor along
    dimension 0.

    Raises:
        PlanError: no tensor has samples.
    """
    leaves = tree_flatten(inputs)[0]
    counts = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not counts or not counts[0]:
        raise PlanError(
            "the example inputs have no tensor with samples along dimension 0, from which a batch "
            "could be made: return such a tensor from the factory"
        )
    return counts[0]


def tokens_of(inputs: Any) -> int | None:
    """The number of tokens in inputs, which is the number of elements of the first integer tensor;
    None if there is none.
    """
    for leaf in tree_flatten(inputs)[0]:
        if (
            isinstance(leaf, Tensor)
            and not leaf.is_floating_point()
            and leaf.dtype is not torch.bool
        ):
            return leaf.numel()
    return None


def _half_of_memory() -> float:
    """Half of the memory of all CUDA devices, or without any, of this machine, in bytes."""
    if torch.cuda.device_count():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return sum(device.total_memory for device in devices) / 2
    if not hasattr(os, "sysconf"):
        return 0.0
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2
