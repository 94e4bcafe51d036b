"""Graphs of one pipeline stage, for microbatches of any size; again if the module changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autosplit.errors import CaptureError, SplitError
from autosplit.passes.analysis.aliasing import overlaps_itself
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import TensorSpec
from autosplit.runtime.split_options import SplitOptions
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten
from autosplit.torch_internals.state import StateReader

from .refusals import refuse_dtensors
from .specializations import CallFlattening, Specializations

if TYPE_CHECKING:
    from autosplit.sharded.module import ShardedModule

_SHAPE = attrgetter("shape")
_MAX_GRAPHS = 64
_MAX_SIZES = 1024  # combinations of sizes whose inputs need no second look

OutputSpec = tuple[torch.Size, torch.dtype, bool]


@dataclasses.dataclass(frozen=True, eq=False)
class _Inputs:
    """A stage's inputs of certain sizes.

    Attributes:
        specs: as its graphs are captured for them.
        blanks: tensors like them without memory, as guards look only at an input's metadata.
        outputs: what came of them first; empty before.
    """

    specs: tuple[TensorSpec, ...]
    blanks: tuple[Tensor, ...]
    outputs: list[OutputSpec] = dataclasses.field(default_factory=list)


class StageSpecializations:
    """Traces a stage's module: for other sizes of inputs, and again where anything that its forward
    reads has changed.

    Args:
        name: of the stage, for messages.
        module: the stage's module.
        args: example inputs.
        options: how it is split.
        sharding: as for ``Specializations``.

    Attributes:
        outputs: paths of the module's outputs.

    Raises:
        CaptureError: the module cannot be traced, or returns something besides tensors.
        SplitError: the graph cannot be split.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: Sequence[Any],
        options: SplitOptions,
        sharding: ShardedModule | None = None,
    ) -> None:
        self._name = name
        self._module = module
        self._arguments = _Arguments(name, args)
        args = tuple(map(_example, self._arguments.tensors))
        self._first = _Inputs(tuple(map(TensorSpec.of, args)), tuple(map(_memoryless, args)))
        self._known = {tuple(spec.shape for spec in self._first.specs): self._first}
        self._now = self._first
        self._grad_mode = torch.is_grad_enabled()
        self._flatten = CallFlattening()
        self._graphs = Specializations(
            module,
            options,
            _MAX_GRAPHS,
            True,
            lambda _: nullcontext(),
            computed=True,
            sharding=sharding,
            warned=True,
        )
        self._latest = self._find(args)
        self.outputs = self._latest.capture.outputs
        refuse_dtensors(name, module, self._latest)
        missing = [path for path in self.outputs if path not in self._latest.output_specs]
        if missing:
            raise CaptureError(
                f"{name} ({type(module).__name__}) returns {missing[0]}, which is not a "
                "tensor; a stage hands only tensors to the next"
            )
        self._first.outputs.extend(self.output_specs)

    @property
    def captured(self) -> tuple[SplitFunctions, ...]:
        """All graphs that are kept, oldest first."""
        return self._graphs.captured

    @property
    def state(self) -> StateReader:
        """Reads the module's parameters and buffers."""
        return self._graphs.state

    @property
    def latest(self) -> SplitFunctions:
        """The graphs of the latest forward."""
        return self._latest

    @property
    def output_specs(self) -> list[OutputSpec]:
        """Shape, dtype and whether a gradient comes back, of every output: also of one that has
        been frozen since, whose gradient is then of no use.
        """
        return self._specs_of(self._latest, self.outputs)

    def fitting(self) -> SplitFunctions:
        """The graphs for the inputs that were checked last and the module as it is now.

        Raises:
            CaptureError: the module cannot be traced for these sizes, or not any more.
            SplitError: it changed so that its outputs did.
        """
        found = self._find(self._now.blanks)
        if found is not self._latest:
            self._check_outputs(found)
            self._latest = found
        return found

    def _find(self, args: tuple[Tensor, ...]) -> SplitFunctions:
        given = self._arguments.given(args)
        with torch.set_grad_enabled(self._grad_mode):
            return self._graphs.fitting(given, {}, *self._flatten(given, {}))

    def check_inputs(self, inputs: list[Any]) -> object:
        """Check dtypes, devices and numbers of dimensions; lay inputs out as the examples were, and
        take objects apart. Returns the same for inputs of the same sizes.

        Raises:
            SplitError: an input is not as the stage was traced with it.
        """
        objects = self._arguments.spec is not None
        if objects:
            inputs[:] = self._arguments.taken_apart(inputs)
        known = self._known.get(tuple(map(_SHAPE, inputs)))
        if known is None:
            known = self._resized(inputs)
        for position, (given, spec) in enumerate(zip(inputs, known.specs, strict=True)):
            if (given.dtype, given.device) != (spec.dtype, spec.device):
                raise self._unlike(position, given, spec)
            if given.stride() != spec.stride:
                inputs[position] = spec.conform(given)
        self._now = known
        if objects:
            inputs[:] = self._arguments.leaves(inputs)
        return known

    def takes(self, args: Sequence[Tensor]) -> bool:
        """Whether these are inputs like the first ones, whatever their sizes."""
        first = self._first
        return len(args) == len(first.specs) and all(
            _kind(given, TensorSpec.of(given)) == _kind(blank, spec)
            for given, blank, spec in zip(args, first.blanks, first.specs, strict=True)
        )

    def _resized(self, inputs: Sequence[Tensor]) -> _Inputs:
        """Inputs like the first ones, of other sizes."""
        first = self._first
        if len(inputs) != len(first.specs):
            raise SplitError(f"{self._name} takes {len(first.specs)} inputs, got {len(inputs)}")
        for position, (given, spec) in enumerate(zip(inputs, first.specs, strict=True)):
            if (given.dim(), given.dtype, given.device) != (
                len(spec.shape),
                spec.dtype,
                spec.device,
            ):
                raise self._unlike(position, given, spec)
        specs = tuple(s.resized(given.shape) for s, given in zip(first.specs, inputs, strict=True))
        blanks = [spec.memoryless() for spec in specs]
        for blank, example in zip(blanks, first.blanks, strict=True):
            blank.requires_grad_(example.requires_grad)
        if len(self._known) >= _MAX_SIZES:
            del self._known[next(iter(self._known))]
        return self._known.setdefault(tuple(s.shape for s in specs), _Inputs(specs, tuple(blanks)))

    def _unlike(self, position: int, given: Tensor, spec: TensorSpec) -> SplitError:
        return SplitError(
            f"{self._name}: input {position} must be {spec.dtype} like {list(spec.shape)} (any "
            f"sizes of {len(spec.shape)} dimensions) on {spec.device}, got {given.dtype} "
            f"{list(given.shape)} on {given.device}"
        )

    def _specs_of(self, functions: SplitFunctions, names: Sequence[str]) -> list[OutputSpec]:
        specs, trained = functions.output_specs, functions.tangent_specs
        first = {name: spec[2] for name, spec in zip(names, self._first.outputs, strict=False)}
        return [
            (specs[name].shape, specs[name].dtype, name in trained or first.get(name, False))
            for name in names
        ]

    def _check_outputs(self, found: SplitFunctions) -> None:
        """Hold the outputs against those that came before of inputs of these sizes; of other sizes,
        all but their sizes. Outputs may be frozen, and be trained again that were at first.
        """
        before, first = self._now.outputs, self._first.outputs
        same = found.capture.outputs == self.outputs
        now = self._specs_of(found, self.outputs if same else list(found.output_specs))
        alike = before == now if before else [*map(_any_size, now)] == [*map(_any_size, first)]
        if same and alike:
            before[:] = now
            return
        raise SplitError(
            f"{self._name} ({type(self._module).__name__}) returned "
            f"{_described(before or first)} "
            f"when it was set up, and would now return {_described(now)}: what its forward "
            "reads was changed, such as parameters, their dtype or whether they are trained, "
            "or autocast; build a new Stage, or a new trainer"
        )


class _Arguments:
    """Example arguments of a stage, of which some may be objects that hold tensors.

    Attributes:
        tensors: those in them.
        spec: how they make up the arguments; None where they are the arguments.
    """

    def __init__(self, name: str, args: Sequence[Any]) -> None:
        self._name = name
        self._leaves, spec = tree_flatten(tuple(args))
        self.tensors = [each for each in self._leaves if isinstance(each, Tensor)]
        self.spec = None if all(isinstance(each, Tensor) for each in args) else spec

    def given(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments with these tensors."""
        if self.spec is None:
            return tuple(tensors)
        found: tuple[Any, ...] = tree_unflatten(self.leaves(tensors), self.spec)
        return found

    def leaves(self, tensors: Sequence[Tensor]) -> list[Any]:
        """All leaves of the arguments, with these tensors."""
        left = iter(tensors)
        return [next(left) if isinstance(each, Tensor) else each for each in self._leaves]

    def taken_apart(self, args: Sequence[Any]) -> list[Tensor]:
        """The tensors in other arguments.

        Raises:
            SplitError: they differ in more than their tensors.
        """
        leaves, spec = tree_flatten(tuple(args))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if spec != self.spec or [*map(_known, leaves)] != [*map(_known, self._leaves)]:
            raise SplitError(
                f"{self._name}: its arguments differ from those that it was made with in more than "
                "tensors: in their structure, in numbers, or in functions that they hold. Pass "
                "numbers that vary as tensors, or a bound that holds for all microbatches"
            )
        return tensors


def _known(leaf: Any) -> Any:
    """What has to be the same in each microbatch."""
    return Tensor if isinstance(leaf, Tensor) else (type(leaf), leaf)


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


def _example(given: Tensor) -> Tensor:
    """A tensor of its own like this one; contiguous if that overlaps itself, as no other microbatch
    can be laid out so.
    """
    made = given.detach()
    if overlaps_itself(given):
        made = made.clone(memory_format=torch.contiguous_format)
    return made.requires_grad_(given.requires_grad)


def _memoryless(example: Tensor) -> Tensor:
    return TensorSpec.of(example).memoryless().requires_grad_(example.requires_grad)
