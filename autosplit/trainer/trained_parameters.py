"""The parameters that one rank trains: norms of their gradients, clipping, and their optimizer."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.torch_internals.dtensor import local_tensor, real_numbers
from autosplit.torch_internals.gradients import flatten_together, norms_of
from autosplit.torch_internals.state import StateReader

OptimizerFunction: TypeAlias = "Callable[[list[Any]], torch.optim.Optimizer]"
"""Builds an optimizer of a list of parameters, or of a list of (name, parameter) if its argument is
called ``named`` or ``named_parameters``.
"""
_NAMED_ARGUMENTS = ("named", "named_parameters")
_NEEDS_GRAD = attrgetter("requires_grad")


class TrainedParameters:
    """The parameters that this rank trains, with their gradients and their optimizer.

    A step calls, in this order:

        check_parameters  the user has not changed which parameters are trained
        gradient_norms    of the gradients after their reduction
        step              gradients are clipped, the optimizer updates parameters

    Args:
        modules: this rank's modules by stage.
        is_counted: whether the norm of the model's gradient counts a parameter on this rank.

    Attributes:
        parameters: the parameters that need a gradient, each once.
        optimizer: updates ``parameters``; None before ``build_optimizer``, and on a rank without
            parameters to train.
        counts_all: whether the norm of the model's gradient counts all parameters of this rank.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], is_counted: Callable[[nn.Parameter], bool]
    ) -> None:
        trained = {id(p): p for m in modules.values() for p in m.parameters() if p.requires_grad}
        self._modules, self.parameters = modules, list(trained.values())
        self._has_small_gradients = are_small(self.parameters)
        self._counted = [p for p in self.parameters if is_counted(p)]
        self.counts_all = len(self._counted) == len(self.parameters)
        self._ids = frozenset(trained)
        self._state_readers = {stage: StateReader(module) for stage, module in modules.items()}
        self._states = {stage: reader.read() for stage, reader in self._state_readers.items()}
        self._untrained = {
            stage: self._untrained_in(state) for stage, state in self._states.items()
        }
        self.optimizer: torch.optim.Optimizer | None = None

    def build_optimizer(
        self, optimizer_fn: OptimizerFunction, names: Callable[[], Mapping[int, str]]
    ) -> None:
        """Build the optimizer, if the rank has parameters to train.

        Args:
            optimizer_fn: builds the optimizer.
            names: a function that returns the names of parameters in the whole model, by ``id``.

        Raises:
            PipelineError: ``optimizer_fn`` returns no optimizer; or the optimizer has other
                parameters, or needs a closure.
        """
        if not self.parameters:
            return
        parameters: list[Any] = self.parameters
        if _takes_names(optimizer_fn):
            named = names()
            parameters = [(named[id(parameter)], parameter) for parameter in parameters]
        self.optimizer = optimizer_fn(parameters)
        _check_optimizer(self.optimizer, self.parameters)

    @property
    def optimizer_state(self) -> list[Tensor]:
        """The tensors of the optimizer's state."""
        states = {} if self.optimizer is None else self.optimizer.state
        values = (value for state in states.values() for value in state.values())
        return [value for value in values if isinstance(value, Tensor)]

    def check_parameters(self) -> None:
        """Check that each trained parameter was trained when the trainer was built, and is tied to
        no others than then.

        No optimizer would update a newly trained parameter, no norm would count it, and its copies
        would become different. A parameter that another name got since has one place for the sum of
        its gradients, into which two stages would write.

        Raises:
            PipelineError: names a parameter that was newly trained, or tied.
        """
        for stage, reader in self._state_readers.items():
            state = reader.read()
            if state is not self._states[stage]:
                self._refuse_tied(stage, state)
                self._untrained[stage] = self._untrained_in(state)
            if any(map(_NEEDS_GRAD, self._untrained[stage])):
                self._refuse_new(stage, state)

    def _untrained_in(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """The buffers and parameters of a stage that are not trained."""
        return [tensor for tensor in state.values() if id(tensor) not in self._ids]

    def _refuse_tied(self, stage: int, state: Mapping[str, Tensor]) -> None:
        """Raise PipelineError if a parameter has got one more name in a stage."""
        earlier, latest = self._states, self._states | {stage: state}
        counts, earlier_counts = (
            Counter(id(tensor) for tensors in states.values() for tensor in tensors.values())
            for states in (latest, earlier)
        )
        for name, tensor in state.items():
            is_tied = id(tensor) in self._ids and counts[id(tensor)] > earlier_counts[id(tensor)]
            if is_tied and earlier[stage].get(name) is not tensor:
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} was tied to another parameter after the "
                    "trainer was built, which keeps one place for each parameter's gradient: tie "
                    "weights before you build the trainer, or build a new one"
                )
        self._states = latest

    def _refuse_new(self, stage: int, state: Mapping[str, Tensor]) -> None:
        """Raise PipelineError if a stage has a newly trained parameter, not only such a buffer."""
        for name, tensor in state.items():
            is_new = tensor.requires_grad and id(tensor) not in self._ids
            if is_new and isinstance(tensor, nn.Parameter):
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} was unfrozen, added or replaced "
                    "after the trainer was built, and is not in its optimizer: build a new "
                    "trainer, freeze parameters after the first step only, or copy values into "
                    "the existing parameters (load_state_dict without assign=True)"
                )

    def gradient_norms(self, *, squares: bool) -> GradientNorms:
        """Start computing the norms of this rank's gradients; see ``GradientNorms``.

        Args:
            squares: whether to compute the sum of squares, which counts each parameter of the model
                on one rank only. Without it, all parameters of this rank are included.
        """
        counted = self._counted if squares else self.parameters
        return GradientNorms(counted, squares=squares, small=self._has_small_gradients)

    def nonfinite_stage(self, norms: GradientNorms) -> int | None:
        """Return the last of this rank's stages with a gradient that is not finite; None if all are
        finite.
        """
        nonfinite = {*map(id, norms.nonfinite())}
        for stage, module in sorted(self._modules.items(), reverse=True) if nonfinite else ():
            if any(id(parameter) in nonfinite for parameter in module.parameters()):
                return stage
        return None

    def step(
        self, max_norm: float | None, norm: float | None, barrier: Callable[[], None] | None = None
    ) -> None:
        """Clip the gradients, call the optimizer, wait for all ranks, and drop the gradients.

        Args:
            max_norm: the norm to which the gradient of the whole model is clipped; None does not
                clip.
            norm: the norm of the whole model's gradient before clipping.
            barrier: a function that returns when every rank has called it, and raises if a rank
                fails; None: do not wait for other ranks.
        """
        if max_norm is not None and norm is not None:
            _clip(self.parameters, max_norm, norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if barrier is not None:
            barrier()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop all gradients, including gradients of parameters that are not in the optimizer.

        Gradients outside of the optimizer would grow with every step, and count in the norm.
        """
        optimizer = self.optimizer
        if (
            optimizer is not None
            and type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        ):
            optimizer.zero_grad(set_to_none=True)  # it may do more
        for parameter in self.parameters:
            parameter.grad = None


_GRAD = attrgetter("grad")
_IS_SPARSE = attrgetter("is_sparse")
_SMALL = 2**18
"""The most bytes of gradients that are copied together: up to here, an operator's call takes longer
than its numbers."""


def are_small(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the gradients of parameters are real numbers, and small enough to be copied."""
    kinds = {*map(type, parameters)} <= {nn.Parameter}
    are_real = kinds and all(parameter.is_floating_point() for parameter in parameters)
    return are_real and sum(parameter.nbytes for parameter in parameters) <= _SMALL


class GradientNorms:
    """The 2-norm of each gradient of this rank. If ``squares`` is not needed and gradients are
    small, one sum over all gradients instead, which shows whether all numbers are finite.

    Norms on a GPU are copied to the host asynchronously. Call ``squares`` and ``nonfinite`` only
    after the step has synchronized with the device, which it does once, at its end.

    Args:
        parameters: the parameters; parameters without a gradient are left out.
        squares: whether ``squares`` will be called, which needs norms in float64. Without it, norms
            are in the gradients' dtypes, which on a CPU takes a thirtieth of the time.
        small: whether ``are_small`` holds for the parameters.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, squares: bool, small: bool = False
    ) -> None:
        self._parameters = [*parameters]
        gradients: Any = [*map(_GRAD, self._parameters)]
        if any(map(is_, gradients, repeat(None))):
            self._parameters = [p for p in self._parameters if p.grad is not None]
            gradients = [p.grad for p in self._parameters]
        self._exact = squares
        if small and not squares and gradients and not any(map(_IS_SPARSE, gradients)):
            total = flatten_together(gradients).detach().sum()
        else:
            norms = norms_of([*map(real_numbers, gradients)], torch.float64 if squares else None)
            total = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)
        self._norms = total.to("cpu", non_blocking=total.is_cuda)

    def squares(self) -> Tensor:
        """Return the sum of the squares of all numbers in the gradients, float64 of shape [1]."""
        return self._norms.square().sum().reshape(1)

    def nonfinite(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient has a number that is not finite."""
        total = self._norms if self._norms.dim() == 0 else self._norms.sum()
        if math.isfinite(total.item()):  # then each number is finite
            return []
        if self._exact:
            finite = self._norms.isfinite().tolist()
            pairs = zip(self._parameters, finite, strict=True)
            return [parameter for parameter, is_finite in pairs if not is_finite]
        # In a narrow dtype, sums of finite numbers may overflow: look at the numbers.
        return [p for p in self._parameters if not real_numbers(p.grad).isfinite().all()]


_DOUBLE = (torch.float64, torch.complex128)


def _clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale this rank's gradients in place by max_norm / norm, if ``norm`` is greater.

    This is the rule of ``torch.nn.utils.clip_grad_norm_`` for the norm of the whole model.
    """
    # This rank's part of a DTensor can be scaled by a plain number.
    terms: Any = [
        _NormTerm(local_tensor(parameter.grad))
        for parameter in parameters
        if parameter.grad is not None
    ]
    is_double = any(term.grad.dtype in _DOUBLE for term in terms)
    dtype = torch.float64 if is_double else torch.float32
    total: Tensor = torch.tensor(norm, dtype=dtype, device="cpu")
    torch.nn.utils.clip_grads_with_norm_(terms, max_norm, total)


class _NormTerm(NamedTuple):
    """A gradient as ``.grad`` of an object, which torch's clipping accepts as a parameter."""

    grad: Tensor


def _takes_names(optimizer_fn: Callable[..., object]) -> bool:
    """Whether the function's first argument is called ``named`` or ``named_parameters``."""
    try:
        names = [*inspect.signature(optimizer_fn).parameters]
    except (TypeError, ValueError):  # a builtin has no signature
        return False
    return bool(names) and names[0] in _NAMED_ARGUMENTS


def _needs_closure(optimizer: Any) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _check_optimizer(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Check that an optimizer can run without a closure, and has only this rank's parameters.

    Raises:
        PipelineError: the optimizer needs a closure, or has parameters of other ranks.
    """
    if not hasattr(optimizer, "param_groups"):
        raise PipelineError(
            f"optimizer_fn must return a torch.optim.Optimizer; got a {type(optimizer).__name__}"
        )
    if _needs_closure(optimizer):
        raise PipelineError(
            f"{type(optimizer).__name__} runs the model again in its step(closure), which a "
            "pipeline cannot do within a step: use an optimizer with step(), such as "
            "torch.optim.AdamW"
        )
    expected = set(map(id, parameters))
    updated = [id(p) for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(parameter not in expected for parameter in updated)
    if foreign:
        raise PipelineError(
            f"optimizer_fn built an optimizer of {len(updated)} parameters, {foreign} of which are "
            "not this rank's: build it from the list that optimizer_fn is called with"
        )
