"""``StageSpecializations``: the graphs of one pipeline stage, for microbatches of any size."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autosplit.capture.size_rule import SizeRule, leaf_text
from autosplit.errors import CaptureError, FailingCallError, SplitError, reworded
from autosplit.passes.analysis.aliasing import overlaps_itself
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.options import SplitOptions
from autosplit.runtime.tensor_spec import TensorSpec
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

from .call_cache import CallCache
from .refusals import refuse_dtensors
from .specializations import ModuleCall, Specializations

if TYPE_CHECKING:
    from autosplit.capture.guards import Guards
    from autosplit.sharded import ShardedModule

_SHAPE = attrgetter("shape")

# Dtypes of CPU tensors without dimensions whose values fake tensors read.
_VALUE_DTYPES = {torch.int64, torch.int32, torch.int16, torch.int8, torch.float64}

OutputSpec = tuple[torch.Size, torch.dtype, bool]


@dataclasses.dataclass(frozen=True, eq=False)
class _InputLayout:
    """The layout of a stage's inputs for one combination of sizes.

    Attributes:
        specs: the specs with which graphs are captured.
        blanks: tensors without memory of these specs, for guards, which read only the metadata of
            inputs.
        outputs: specs of the outputs in the first capture for these sizes; empty before it.
        valued: positions of scalar inputs on the CPU, whose values a capture and its guards may
            read.
    """

    specs: tuple[TensorSpec, ...]
    blanks: tuple[Tensor, ...]
    outputs: list[OutputSpec] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def valued(self) -> tuple[int, ...]:
        specs = enumerate(self.specs)
        return tuple(
            at
            for at, spec in specs
            if not spec.shape and spec.device.type == "cpu" and spec.dtype in _VALUE_DTYPES
        )

    @functools.cached_property
    def module_call(self) -> ModuleCall:
        """The call of the module with ``blanks``, in the grad mode of the first use."""
        return ModuleCall.of(self.blanks, {})

    def with_values(self, inputs: Sequence[Tensor]) -> _InputLayout:
        """The layout with the values of the scalar inputs at ``valued``. The inputs must have the
        sizes of the layout.
        """
        blanks = [*self.blanks]
        for at in self.valued:
            blanks[at] = inputs[at].detach().requires_grad_(blanks[at].requires_grad)
        return dataclasses.replace(self, blanks=tuple(blanks))


class StageSpecializations(Specializations):
    """Captures a stage's module for each combination of input sizes, and again if something that
    the forward reads has changed.

    Args:
        name: the stage's name, for messages.
        module: the stage's module.
        args: example arguments: tensors, or objects that contain tensors.
        options: how the module is split.
        sharding: see ``Specializations``.
        varying: further example arguments, whose sizes the first capture leaves open.

    Attributes:
        check: a function that later captures must pass; None: there is none.
        outputs: paths of the module's outputs.
        current: the graphs of the latest forward.

    Raises:
        CaptureError: the module cannot be captured, or returns something other than tensors.
        SplitError: the graph cannot be split.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: Sequence[Any],
        options: SplitOptions,
        sharding: ShardedModule | None = None,
        varying: Sequence[Sequence[Any]] = (),
    ) -> None:
        super().__init__(
            module, options, computed=True, sharding=sharding, warned=True, values="constant"
        )
        self._name = name
        self._leaves, spec = tree_flatten(tuple(args))
        self._spec = None if all(isinstance(arg, Tensor) for arg in args) else spec
        tensors = tuple([_own_example(leaf) for leaf in self._leaves if isinstance(leaf, Tensor)])
        self._checked = _InputLayout(
            tuple(map(TensorSpec.of, tensors)), tuple(map(_memoryless, tensors))
        )
        self._layouts = CallCache[tuple[torch.Size, ...], _InputLayout]()
        self._layouts.remember(tuple(spec.shape for spec in self._checked.specs), self._checked)
        self._example_layout = self._checked
        self._grad_mode = torch.is_grad_enabled()
        self.check: Callable[[SplitFunctions], None] | None = None
        self.outputs: Sequence[str] = ()
        self.expect_sizes([args, *varying])
        self.current = self.for_inputs(tensors)
        self.outputs = self.current.capture.outputs
        refuse_dtensors(name, module, self.current)
        missing = [path for path in self.outputs if path not in self.current.specs_by_path]
        if missing:
            raise CaptureError(
                f"{name} ({type(module).__name__}) returns {missing[0]}, which is not a "
                "tensor; a stage can send only tensors to the next one: return tensors only"
            )
        self._example_layout.outputs.extend(self.output_specs)

    @property
    def output_specs(self) -> list[OutputSpec]:
        """(shape, dtype, whether a gradient is expected) of each output.

        An output that was frozen since the first forward still expects a gradient, which has no
        effect.
        """
        return self._specs_of(self.current, self.outputs)

    def expect_sizes(self, rows: Sequence[Sequence[Any]]) -> None:
        """Make later captures leave open the sizes that differ between these rows of arguments."""
        for args in rows:
            call = ModuleCall.of(tuple(args), {})
            self._sizes.of(call.signature.structure, call.leaves)

    def size_rule(self) -> SizeRule:
        """The sizes of the outputs as expressions of the sizes of the inputs. The rule holds for
        the inputs that were checked last, and for all inputs that fit the same graphs.
        """
        leaves = self._leaves_with(self._checked.blanks)
        if (rule := self.current.size_rule(leaves)) is not None:
            return rule
        sizes = [tuple(x.shape) if isinstance(x, Tensor) else leaf_text(x) for x in leaves]
        return SizeRule.fixed(sizes, [shape for shape, *_ in self.output_specs])

    @property
    def is_unchanged(self) -> bool:
        """Whether the module is known to be as it was in all captures: the guards of each capture
        hold for inputs like its own.
        """
        if self._spec is not None:
            return False  # guards read the objects, which are not kept

        def holds(guards: Guards, leaves: Any) -> bool:
            layout = self._layouts.get(tuple([shape for shape, *_ in leaves]))
            return layout is not None and not layout.valued and guards.hold(layout.blanks, {})

        captures = self._captured.items()
        sharding = self.sharding
        plain = sharding.plain() if sharding is not None and sharding.groups else nullcontext()
        with torch.set_grad_enabled(self._grad_mode), plain:
            return all(holds(graphs.capture.guards, call.leaves) for graphs, call in captures)

    def for_inputs(self, examples: Sequence[Tensor] = ()) -> SplitFunctions:
        """The graphs for the inputs of the last ``check_inputs`` and the module's present state.

        Args:
            examples: the inputs with memory, for the first capture.

        Raises:
            CaptureError: the module cannot be captured for these sizes, or can no longer be
                captured.
            SplitError: the module changed, and its outputs with it.
        """
        try:
            with torch.set_grad_enabled(self._grad_mode):
                functions = self.fitting(self._call(examples))
                if self.check is not None and functions is not self.current:
                    self.check(functions)
        except (CaptureError, SplitError) as error:
            text = self._name
            if isinstance(error, FailingCallError):
                received = [(s.shape, s.dtype, True) for s in self._checked.specs]
                text += f" cannot take its inputs, {_described(received)}"
            raise reworded(error, f"{text}: {error}") from error
        if self.outputs and functions is not self.current:
            self._check_outputs(functions)
        self.current = functions
        return functions

    def _call(self, examples: Sequence[Tensor]) -> ModuleCall:
        """The call of the module with the examples; without examples, with tensors without memory
        like the inputs of the last ``check_inputs``.
        """
        if self._spec is None and not examples and not torch.is_inference_mode_enabled():
            return self._checked.module_call
        args: tuple[Any, ...] = tuple(examples) or self._checked.blanks
        if self._spec is not None:
            args = tree_unflatten(self._leaves_with(args), self._spec)
        return ModuleCall.of(args, {})

    def _leaves_with(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The leaves of the latest arguments, with these tensors in place of the arguments'
        tensors.
        """
        replacements = iter(tensors)
        return [next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]

    def check_inputs(self, inputs: list[Any]) -> object:
        """Check dtypes, devices and numbers of dimensions of inputs. In place, flatten arguments
        that are objects, and give tensors the strides of the examples.

        Returns:
            the key of ``steady`` for such inputs: the same object for the same sizes, unless graphs
            depend on values; None if an argument is an object.

        Raises:
            SplitError: an input differs from the examples in more than its sizes.
        """
        if self._spec is not None:
            leaves, self._spec = tree_flatten(tuple(inputs))
            inputs[:] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            place = torch.empty(0)
            self._leaves = [place if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        layout = self._layouts.get(tuple(map(_SHAPE, inputs))) or self._layout_for(inputs)
        for position, (tensor, spec) in enumerate(zip(inputs, layout.specs, strict=True)):
            if tensor.dtype is not spec.dtype or tensor.device != spec.device:
                raise self._unlike(position, tensor, spec)
            if tensor.stride() != spec.stride:
                inputs[position] = spec.conform(tensor)
        self._checked = layout = layout.with_values(inputs) if layout.valued else layout
        if self._spec is None:
            return layout
        inputs[:] = self._leaves_with(inputs)
        return None  # graphs depend on what the objects contain

    def accepts(self, args: Sequence[Tensor]) -> bool:
        """Whether these inputs equal the examples in everything except sizes."""
        first = self._example_layout
        return len(args) == len(first.specs) and all(
            _kind(tensor, TensorSpec.of(tensor)) == _kind(blank, spec)
            for tensor, blank, spec in zip(args, first.blanks, first.specs, strict=True)
        )

    def _layout_for(self, inputs: Sequence[Tensor]) -> _InputLayout:
        """The layout for inputs of these sizes, made if the sizes are new.

        Raises:
            SplitError: the inputs differ from the examples in more than sizes.
        """
        first = self._example_layout
        if len(inputs) != len(first.specs):
            raise SplitError(
                f"{self._name} takes {len(first.specs)} inputs, as in its examples; got "
                f"{len(inputs)}: pass as many inputs as the examples have"
            )
        for position, (tensor, spec) in enumerate(zip(inputs, first.specs, strict=True)):
            if (tensor.dim(), tensor.dtype, tensor.device) != (
                len(spec.shape),
                spec.dtype,
                spec.device,
            ):
                raise self._unlike(position, tensor, spec)
        specs = tuple(
            s.resized(tensor.shape) for s, tensor in zip(first.specs, inputs, strict=True)
        )
        blanks = [spec.memoryless() for spec in specs]
        for blank, example in zip(blanks, first.blanks, strict=True):
            blank.requires_grad_(example.requires_grad)
        shapes = tuple(spec.shape for spec in specs)
        return self._layouts.remember(shapes, _InputLayout(specs, tuple(blanks)))

    def _unlike(self, position: int, tensor: Tensor, spec: TensorSpec) -> SplitError:
        return SplitError(
            f"{self._name}: input {position} must be {spec.dtype} like {list(spec.shape)} (any "
            f"sizes of {len(spec.shape)} dimensions) on {spec.device}, got {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )

    def _specs_of(self, functions: SplitFunctions, names: Sequence[str]) -> list[OutputSpec]:
        specs, trained = functions.specs_by_path, functions.tangent_specs
        first = {
            name: spec[2] for name, spec in zip(names, self._example_layout.outputs, strict=False)
        }
        return [
            (specs[name].shape, specs[name].dtype, name in trained or first.get(name, False))
            for name in names
        ]

    def _check_outputs(self, functions: SplitFunctions) -> None:
        """Refuse outputs that differ from those of earlier captures.

        For inputs of earlier sizes, shapes must be equal; for new sizes, only dtypes and numbers of
        dimensions. An output may become frozen, and trained again if it was trained at first.

        Raises:
            SplitError: says what was expected and what the module returns now.
        """
        expected, first = self._checked.outputs, self._example_layout.outputs
        same = functions.capture.outputs == self.outputs
        now = self._specs_of(functions, self.outputs if same else list(functions.specs_by_path))
        alike = expected == now if expected else [*map(_any_size, now)] == [*map(_any_size, first)]
        if same and alike:
            expected[:] = now
            return
        raise SplitError(
            f"{self._name} ({type(self._model).__name__}) returned "
            f"{_described(expected or first)} "
            f"when it was set up, and would now return {_described(now)}: something that its "
            "forward reads was changed, such as parameters, their dtype or requires_grad, or "
            "autocast; build a new Stage, or a new trainer. If the forward detaches an output at "
            "some sizes only, let the first inputs have a size at which it detaches none"
        )


def _kind(tensor: Tensor, spec: TensorSpec) -> tuple[Any, ...]:
    return len(spec.shape), spec.dtype, spec.device, tensor.requires_grad


def _any_size(spec: OutputSpec) -> tuple[int, torch.dtype, bool]:
    shape, dtype, trained = spec
    return len(shape), dtype, trained


def _described(specs: Sequence[OutputSpec]) -> str:
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')}{list(shape)}{'' if trained else ' without gradient'}"
        for shape, dtype, trained in specs
    )


def _own_example(tensor: Tensor) -> Tensor:
    """A leaf of autograd with the memory of ``tensor``. If the tensor overlaps itself, a contiguous
    copy, because other microbatches cannot be copied to such a layout.
    """
    example = tensor.detach()
    if overlaps_itself(tensor):
        example = example.clone(memory_format=torch.contiguous_format)
    return example.requires_grad_(tensor.requires_grad)


def _memoryless(example: Tensor) -> Tensor:
    return TensorSpec.of(example).memoryless().requires_grad_(example.requires_grad)
