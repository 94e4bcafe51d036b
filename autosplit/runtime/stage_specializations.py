"""Graphs of one pipeline stage, for microbatches of any size; again if the module changes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autosplit.errors import CaptureError, FailingCallError, SplitError
from autosplit.passes.analysis.aliasing import overlaps_itself
from autosplit.runtime.build import SplitOptions
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import TensorSpec
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

from .refusals import refuse_dtensors
from .specializations import Specializations, flatten

if TYPE_CHECKING:
    from autosplit.sharded import ShardedModule

_SHAPE = attrgetter("shape")
_MAX_SIZES = 1024  # combinations of sizes whose inputs need no second look

# Of tensors without dimensions on the CPU, as fake tensors read them.
_READ = {torch.int64, torch.int32, torch.int16, torch.int8, torch.float64}

OutputSpec = tuple[torch.Size, torch.dtype, bool]


@dataclasses.dataclass(frozen=True, eq=False)
class _Inputs:
    """A stage's inputs of certain sizes.

    Attributes:
        specs: as its graphs are captured for them.
        blanks: tensors like them without memory, as guards look only at an input's metadata.
        outputs: what came of them first; empty before.
        valued: places of inputs whose value a capture reads, and its guards may ask for.
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
            if not spec.shape and spec.device.type == "cpu" and spec.dtype in _READ
        )

    def with_values(self, inputs: Sequence[Tensor]) -> _Inputs:
        """The same, with the values of these inputs, which are of these sizes."""
        blanks = [*self.blanks]
        for at in self.valued:
            blanks[at] = inputs[at].detach().requires_grad_(blanks[at].requires_grad)
        return dataclasses.replace(self, blanks=tuple(blanks))


class StageSpecializations(Specializations):
    """Traces a stage's module: for other sizes of inputs, and again where anything that its forward
    reads has changed.

    Args:
        name: of the stage, for messages.
        module: the stage's module.
        args: example arguments: tensors, or objects that hold some.
        options: how it is split.
        sharding: as for ``Specializations``.

    Attributes:
        outputs: paths of the module's outputs.
        current: the graphs of the latest forward.

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
        super().__init__(module, options, computed=True, sharding=sharding, warned=True)
        self._name = name
        self._leaves, spec = tree_flatten(tuple(args))
        self._spec = None if all(isinstance(each, Tensor) for each in args) else spec
        tensors = tuple([_example(each) for each in self._leaves if isinstance(each, Tensor)])
        self._now = _Inputs(tuple(map(TensorSpec.of, tensors)), tuple(map(_memoryless, tensors)))
        self._inputs = {tuple(spec.shape for spec in self._now.specs): self._now}
        self._like = self._now
        self._grad_mode = torch.is_grad_enabled()
        self.outputs: Sequence[str] = ()
        self.current = self.for_inputs(tensors)
        self.outputs = self.current.capture.outputs
        refuse_dtensors(name, module, self.current)
        missing = [path for path in self.outputs if path not in self.current.output_specs]
        if missing:
            raise CaptureError(
                f"{name} ({type(module).__name__}) returns {missing[0]}, which is not a "
                "tensor; a stage hands only tensors to the next"
            )
        self._like.outputs.extend(self.output_specs)

    @property
    def output_specs(self) -> list[OutputSpec]:
        """Shape, dtype and whether a gradient comes back, of every output: also of one that has
        been frozen since, whose gradient is then of no use.
        """
        return self._specs_of(self.current, self.outputs)

    def for_inputs(self, examples: Sequence[Tensor] = ()) -> SplitFunctions:
        """The graphs for the inputs that were checked last and the module as it is now.

        Args:
            examples: those inputs, with memory, for the first call.

        Raises:
            CaptureError: the module cannot be traced for these sizes, or not any more.
            SplitError: it changed so that its outputs did.
        """
        args: tuple[Any, ...] = tuple(examples) or self._now.blanks
        if self._spec is not None:
            args = tree_unflatten(self._with(args), self._spec)
        try:
            with torch.set_grad_enabled(self._grad_mode):
                found = self.fitting(args, {}, *flatten(args, {}))
        except (CaptureError, SplitError) as error:
            text = self._name
            if isinstance(error, FailingCallError):
                given = [(s.shape, s.dtype, True) for s in self._now.specs]
                text += f" cannot take what it is given, {_described(given)}"
            raise type(error)(f"{text}: {error}") from error
        if self.outputs and found is not self.current:
            self._check_outputs(found)
        self.current = found
        return found

    def _with(self, tensors: Sequence[Tensor]) -> list[Any]:
        """All leaves of the arguments, with these tensors."""
        left = iter(tensors)
        return [next(left) if isinstance(each, Tensor) else each for each in self._leaves]

    def _tensors_in(self, args: Sequence[Any]) -> list[Tensor]:
        """The tensors in arguments that are objects.

        Raises:
            SplitError: they differ from the examples in more than their tensors.
        """
        leaves, spec = tree_flatten(tuple(args))
        if spec != self._spec or [*map(_known, leaves)] != [*map(_known, self._leaves)]:
            raise SplitError(
                f"{self._name}: its arguments differ from those that it was made with in more than "
                "tensors: in their structure, in numbers, or in functions that they hold. Pass "
                "numbers that vary as tensors, or a bound that holds for all microbatches"
            )
        return [each for each in leaves if isinstance(each, Tensor)]

    def check_inputs(self, inputs: list[Any]) -> object:
        """Check dtypes, devices and numbers of dimensions; lay inputs out as the examples were, and
        take objects apart. Returns the same for inputs of the same sizes, unless values count.

        Raises:
            SplitError: an input is not as the stage was traced with it.
        """
        if self._spec is not None:
            inputs[:] = self._tensors_in(inputs)
        known = self._inputs.get(tuple(map(_SHAPE, inputs))) or self._of_other_sizes(inputs)
        for position, (given, spec) in enumerate(zip(inputs, known.specs, strict=True)):
            if (given.dtype, given.device) != (spec.dtype, spec.device):
                raise self._unlike(position, given, spec)
            if given.stride() != spec.stride:
                inputs[position] = spec.conform(given)
        self._now = known = known.with_values(inputs) if known.valued else known
        if self._spec is not None:
            inputs[:] = self._with(inputs)
        return known

    def accepts(self, args: Sequence[Tensor]) -> bool:
        """Whether these are inputs like the first ones, whatever their sizes."""
        first = self._like
        return len(args) == len(first.specs) and all(
            _kind(given, TensorSpec.of(given)) == _kind(blank, spec)
            for given, blank, spec in zip(args, first.blanks, first.specs, strict=True)
        )

    def _of_other_sizes(self, inputs: Sequence[Tensor]) -> _Inputs:
        """Inputs like the first ones, of other sizes."""
        first = self._like
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
        if len(self._inputs) >= _MAX_SIZES:
            del self._inputs[next(iter(self._inputs))]
        return self._inputs.setdefault(tuple(s.shape for s in specs), _Inputs(specs, tuple(blanks)))

    def _unlike(self, position: int, given: Tensor, spec: TensorSpec) -> SplitError:
        return SplitError(
            f"{self._name}: input {position} must be {spec.dtype} like {list(spec.shape)} (any "
            f"sizes of {len(spec.shape)} dimensions) on {spec.device}, got {given.dtype} "
            f"{list(given.shape)} on {given.device}"
        )

    def _specs_of(self, functions: SplitFunctions, names: Sequence[str]) -> list[OutputSpec]:
        specs, trained = functions.output_specs, functions.tangent_specs
        first = {name: spec[2] for name, spec in zip(names, self._like.outputs, strict=False)}
        return [
            (specs[name].shape, specs[name].dtype, name in trained or first.get(name, False))
            for name in names
        ]

    def _check_outputs(self, found: SplitFunctions) -> None:
        """Hold the outputs against those that came before of inputs of these sizes; of other sizes,
        all but their sizes. Outputs may be frozen, and be trained again that were at first.
        """
        before, first = self._now.outputs, self._like.outputs
        same = found.capture.outputs == self.outputs
        now = self._specs_of(found, self.outputs if same else list(found.output_specs))
        alike = before == now if before else [*map(_any_size, now)] == [*map(_any_size, first)]
        if same and alike:
            before[:] = now
            return
        raise SplitError(
            f"{self._name} ({type(self._model).__name__}) returned "
            f"{_described(before or first)} "
            f"when it was set up, and would now return {_described(now)}: what its forward "
            "reads was changed, such as parameters, their dtype or whether they are trained, "
            "or autocast; build a new Stage, or a new trainer"
        )


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
