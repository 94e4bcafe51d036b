"""Checks that ``AUTOSPLIT_CHECK=1`` turns on: gradients, writes into memory, and hooks are compared
with plain autograd.

``checked`` is called for each capture and returns the class of the graphs' functions. Without the
variable it returns its argument, and nothing else of this file runs.

Contract: the checks change no bit of a result, and leave modules, buffers, generators and ``.grad``
unchanged. Three things raise ``CheckError``:

- outputs, buffers or gradients of the graphs and of plain autograd differ by more than rounding.
  Before the first microbatch of a capture, both run on copies of it, with random output gradients;
- a tensor that W reads was written between I and W without raising its version counter. Of each
  tensor that code outside of the graphs can reach, some elements are copied at I and compared at W.
  On a machine with an accelerator, the results of the comparison are read after the optimizer's
  step, so that the host does not wait earlier;
- hooks on a parameter did not fire exactly once a backward, as autograd fires them.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_post_hook

from autosplit.device import generators_kept, has_accelerator
from autosplit.errors import CheckError
from autosplit.passes import Kind, Role
from autosplit.passes.analysis.operators import is_random
from autosplit.passes.graph import inputs, outputs, source_line, tensor_of
from autosplit.torch_internals.autograd import (
    at_end_of_backward,
    current_backward,
    hook_tables,
    is_requested,
    without_autocast,
)
from autosplit.torch_internals.pytree import TreeSpec, tree_flatten, tree_unflatten
from autosplit.torch_internals.state import allows_other_memory

from .functions import ForwardResult, SplitFunctions
from .residuals import Residuals, State, StateRecord
from .storages import is_plain

if TYPE_CHECKING:
    from autosplit.capture.attribute_values import AttributeValue

CHECK_VARIABLE = "AUTOSPLIT_CHECK"

Plain = Callable[[State, Sequence[Any]], Sequence[Any]]
"""A forward under plain autograd: its parameters and buffers by name, and the leaves of its inputs,
to the leaves of its outputs.
"""

F = TypeVar("F", bound=SplitFunctions)


def checked(kind: type[F], plain: Plain) -> Callable[..., F]:
    """The class ``kind``, with checks added if ``AUTOSPLIT_CHECK=1``.

    Args:
        kind: the class of F, I, W and B without checks.
        plain: the call of plain autograd from which the graph was captured.
    """
    if os.environ.get(CHECK_VARIABLE, "") in ("", "0"):
        return kind
    checking = type(f"Checked{kind.__name__}", (CheckedFunctions, kind), {})
    return cast("Callable[..., F]", partial(checking, plain))


def plain_call(
    module: nn.Module,
    spec: TreeSpec,
    values: Sequence[AttributeValue],
    state: State,
    leaves: Sequence[Any],
) -> Sequence[Any]:
    """Call a module by plain autograd; return the leaves of its result, then the tensors that it
    set as attributes.
    """
    from autosplit.capture.joint_graph import same_tensors  # imports Dynamo

    with same_tensors(module):  # functional_call leaves its own in a module of two names
        result = functional_call(module, {**state}, *tree_unflatten(leaves, spec))
        return [*tree_flatten(result)[0], *(value.get(module) for value in values)]


class HookCount:
    """A hook that checks how often the hooks of a parameter fire in one backward.

    Args:
        name: the name of the parameter.
        table: the dictionary of the parameter's hooks.
    """

    def __init__(self, name: str, table: dict[int, Any]) -> None:
        self._name, self._table, self._fired = name, table, 0

    def __call__(self, *args: Any) -> None:
        grads = args[-1]  # one, or a tuple where a node has the hook
        self._fired += (grads[0] if isinstance(grads, tuple) else grads) is not None

    def check_count(self) -> None:
        """Raise ``CheckError`` unless the hooks fired exactly once."""
        if self._table.get(_COUNT) is not self:  # another graph of this backward counts
            return
        del self._table[_COUNT]
        if self._fired != 1:
            raise CheckError(
                f"hooks on parameter {self._name} fired {self._fired} times with a gradient in one "
                "backward(), where autograd fires them once; use the unsplit model, and report this"
            )


_COUNT = -1  # the key of a count among the user's hooks, which torch numbers from 0


def count_hooks(name: str, parameter: Tensor) -> None:
    """Check a parameter's hooks in the running backward, if this backward computes the parameter's
    gradient.
    """
    for table in hook_tables([parameter]):
        if parameter.requires_grad and is_requested(get_gradient_edge(parameter).node):
            count = table[_COUNT] = HookCount(name, table)
            at_end_of_backward(count.check_count)


class CheckedResiduals(Residuals):
    """Residuals that detect writes which no version counter counts.

    Attributes:
        parameters: the parameters that get a gradient, by name.
        samples: the result of ``sample`` directly after I.
    """

    parameters: Sequence[tuple[str, Tensor]] = ()
    samples: Sequence[Tensor] = ()

    def sample(self) -> list[Tensor]:
        """Copies of some elements, as bytes, of each tensor that code outside of the graphs can
        reach.
        """
        exposed = map(self._tensors.__getitem__, self._layout.exposed)
        return [*map(_sample, (*exposed, *self.record.protected))]

    def written(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name of a sampled tensor, tensor that is True if its sampled elements have
        changed).
        """
        names = self._layout.protected_names(len(self._tensors))
        for name, sampled, now in zip(names, self.samples, self.sample(), strict=True):
            yield name, (sampled != now).any()


_SAMPLED = 1024  # elements of a tensor


@torch.no_grad()
def _sample(value: Any) -> Tensor:
    if not is_plain(value) or allows_other_memory(value):
        return torch.empty(0)
    share = round(_SAMPLED ** (1 / max(1, value.dim())))
    part: Tensor = value[tuple([slice(None, None, size // share + 1) for size in value.shape])]
    part = part.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return part.view(-1).view(torch.uint8)


class CheckedFunctions(SplitFunctions):
    """Mixin that adds the checks to a class of F, I, W and B.

    Args:
        plain: the call of plain autograd from which the graphs were captured.
        args: arguments of the checked class.
    """

    residuals = CheckedResiduals
    joins = False  # each W compares what was written between it and its I

    def __init__(self, plain: Plain, *args: Any) -> None:
        super().__init__(*args)
        # Both are shared with the same graphs for other sizes.
        self._due = [plain]
        self._unread: list[tuple[str, Tensor]] = []
        read = weakref.WeakMethod(self._read_written)
        hook = register_optimizer_step_post_hook(lambda *_: (method := read()) and method())
        weakref.finalize(self, hook.remove)

    @staticmethod
    def sentinel_parameters(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        return parameters

    def run(
        self, state: State, leaves: list[Any], record: StateRecord | None = None
    ) -> ForwardResult:
        if self._due:
            self._compare(self._due.pop(), state, leaves)
        result = super().run(state, leaves, record)
        saved = cast(CheckedResiduals, result.saved)
        saved.parameters = [(name, state[name]) for name in self.parameter_names]
        return result

    def backward_input(self, saved: Any, output_grads: Any, *sums: Any) -> Any:
        missing = self.dependence.missing(output_grads).parameters
        for name, parameter in saved.parameters:
            if name not in missing and current_backward() >= 0:
                count_hooks(name, parameter)
        results = super().backward_input(saved, output_grads, *sums)
        deferred = cast(CheckedResiduals, results[1])
        deferred.samples = deferred.sample()
        return results

    def backward_weight(self, deferred: Any, *sums: Any) -> Sequence[Tensor]:
        written = [*deferred.written()]
        gradients = super().backward_weight(deferred, *sums)
        self._unread += written
        if not has_accelerator():
            self._read_written()
        return gradients

    def _read_written(self) -> None:
        """Read the pending comparisons. Raise ``CheckError`` if a tensor was written without
        raising its version counter.
        """
        names = [name for name, written in self._unread if written]
        self._unread.clear()
        if names:
            raise CheckError(
                "tensors were written between backward() and backward_weight(), unseen by autograd "
                "(through NumPy, DLPack, shared memory or .data): "
                f"{', '.join(map(self._reader, names))}. "
                "Call backward_weight() before writing, or write into a clone"
            )

    def _reader(self, name: str) -> str:
        """The name of a tensor that W reads, with the user's line whose weight gradient W computes
        from the tensor.
        """
        nodes = inputs(self.graphs.graphs()["backward_weight"].graph).items()
        users = [user for role, node in nodes if role.name == name for user in node.users]
        line = next(filter(None, map(source_line, users)), "")
        return f"{name} (for {line})"

    def _compare(self, plain: Plain, state: State, leaves: Sequence[Any]) -> None:
        """Run a microbatch by the graphs and by plain autograd, and compare the results.

        Raises:
            CheckError: names the result that differs, and by how much.
        """
        joint = self.graphs.joint.graph
        state = {**state, **{name: state[name].clone() for name in self.written}}
        try:
            if self.capture.shardings or self._backend.gathering:
                raise CheckError(
                    "AUTOSPLIT_CHECK=1 cannot check a model with sharded parameters; run the check "
                    "on the model without sharding"
                )
            if self._backend.compiles and any(map(is_random, joint.nodes)):
                raise CheckError(
                    "AUTOSPLIT_CHECK=1 cannot check this model: its compiled graphs draw other "
                    "random numbers than plain autograd. Check it with backend='eager'"
                )
            with generators_kept():
                expected, grads = self._autograds(plain, state, leaves)
            sizes = [*map(_largest, expected)]
            largest = max(sizes, default=0.0)
        except Exception as error:  # the user's forward may raise anything
            text = f"{CHECK_VARIABLE}: not compared with plain autograd: {error}"
            warnings.warn(text, stacklevel=2)
            return
        dtypes = {v.dtype for v in map(tensor_of, joint.nodes) if v is not None}
        rounded = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        eps = max((torch.finfo(dtype).eps for dtype in rounded), default=0.0)
        with generators_kept(), without_autocast(), torch.no_grad():
            for results in self._computed(state, leaves, grads):
                pairs = zip(self._roles(), results, expected, sizes, strict=False)
                for role, value, wanted, size in pairs:
                    if isinstance(value, Tensor) and isinstance(wanted, Tensor):
                        allowed = math.sqrt(eps) * size + 16 * eps * largest
                        _assert_close(value, wanted, allowed, role, joint)

    def _roles(self) -> list[Role]:
        """Roles of all results that are compared with plain autograd."""
        names = {
            Kind.OUTPUT: self.output_names,
            Kind.UPDATE: self.updated_state,
            Kind.INPUT_GRAD: self.capture.inputs,
            Kind.PARAMETER_GRAD: self.parameter_names,
        }
        return [Role(kind, name) for kind, group in names.items() for name in group]

    def _autograds(
        self, plain: Plain, state: State, leaves: Sequence[Any]
    ) -> tuple[list[Any], dict[int, Tensor]]:
        """Return (results of plain autograd in the order of ``_roles``, random output gradients by
        position).
        """
        values = copy.deepcopy({**state})
        for name in self.written:
            owner, _, attribute = name.rpartition(".")
            if isinstance(values.get(owner), Tensor):  # an attribute of a parameter
                setattr(values[owner], attribute, values.pop(name))
        roots = {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)}
        trained = self.dependence.inputs_given(self.output_names)
        pairs = zip(leaves, trained, strict=True)
        wanted = [roots[id(leaf)].requires_grad_() for leaf, is_trained in pairs if is_trained]
        wanted += map(values.__getitem__, self.parameter_names)
        with torch.set_grad_enabled(self.has_backward):
            clones = {key: root.clone() for key, root in roots.items()}
            args = [clones.get(id(leaf), leaf) for leaf in leaves]
            results = [*plain(values, args)]
        results += [args[self.capture.inputs.index(name)] for name in self.updated_inputs]
        updates = [values[name].detach().clone() for name in self.updated_state]
        tangents = {at: torch.randn_like(results[at]) for _, at in self._tangents}
        differentiable = [results[at] for at in tangents]
        gradients: Iterator[Tensor | None] = iter(())
        if tangents and wanted:
            gradients = iter(
                torch.autograd.grad(differentiable, wanted, [*tangents.values()], allow_unused=True)
            )
        inner = [next(gradients, None) if is_trained else None for is_trained in trained]
        return [*results, *updates, *inner, *gradients], tangents

    def _computed(
        self, state: State, leaves: Sequence[Any], tangents: dict[int, Tensor]
    ) -> Iterator[list[Any]]:
        """Yield the results of the graphs in the order of ``_roles``: first by I and W, then by
        B.
        """
        results, updates, saved = self.forward(state, [*leaves])
        if not self.has_backward:
            yield [*results, *updates]
            return
        again, arrived = saved.duplicate(), [tangents.get(at) for at in range(len(results))]
        inner, deferred, early = self.backward_input(saved, [*arrived])
        weights = dict(zip(self.early_parameters, early, strict=True))
        weights |= zip(self.late_parameters, self.backward_weight(deferred), strict=True)
        yield [*results, *updates, *inner, *map(weights.get, self.parameter_names)]
        inner, gradients = self.backward(again, arrived)
        yield [*results, *updates, *inner, *gradients]


def _assert_close(
    value: Tensor, wanted: Tensor, allowed: float, role: Role, joint: fx.Graph
) -> None:
    """Compare a result with that of plain autograd.

    Raises:
        CheckError: names the result, its line and its error.
    """
    try:
        torch.testing.assert_close(
            value, wanted, rtol=0.0, atol=allowed, equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        line = next((source_line(v) for r, v in outputs(joint) if r == role), "")
        raise CheckError(
            f"{role} (of {line}) is not what plain autograd computes. {error}\nIf passes= has "
            "passes of your own, leave them out; AUTOSPLIT_DUMP=dir shows the graphs after each "
            "pass. Otherwise use the unsplit model, and report this"
        ) from None


def _largest(value: Any) -> float:
    if not isinstance(value, Tensor) or not value.numel() or value.dtype is torch.bool:
        return 0.0
    dense = value if value.layout is torch.strided else value.to_dense()
    return float(dense.abs().nan_to_num(0.0, 0.0, 0.0).max())
