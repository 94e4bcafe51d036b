"""Graphs of one pipeline stage, traced for one shape of microbatch; again if the module changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from autosplit.errors import CaptureError, SplitError
from autosplit.passes import Kind
from autosplit.passes.analysis.aliasing import overlaps_itself
from autosplit.runtime.activations.saved_tensors import TensorSpec
from autosplit.torch_internals.module_state import StateReader

from .build import trace, without_history
from .call_signature import CallSignature
from .functions import SplitFunctions
from .specialization_cache import SpecializationCache
from .split_options import SplitOptions

_MAX_GRAPHS = 8

OutputSpec = tuple[torch.Size, torch.dtype, bool]


class StageSpecializations:
    """Traces a stage's module, and again where anything that its forward reads has changed.

    Args:
        name: of the stage, for messages.
        module: the stage's module.
        args: example inputs.
        options: how it is split.
        slices: into how many parts W can be run.

    Attributes:
        outputs: paths of the module's outputs.
        state: reads the module's parameters and buffers.

    Raises:
        CaptureError: the module cannot be traced, or returns something besides tensors.
        SplitError: the graph cannot be split, or W not be sliced.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: Sequence[Tensor],
        options: SplitOptions,
        slices: int,
    ) -> None:
        self._name = name
        self._module = module
        self._options = options
        self._slices = slices
        args = tuple(map(_without_overlap, args))
        self._specs = [TensorSpec.of(example) for example in args]
        self._blanks = tuple(map(_memoryless, args))
        self._grad_mode = torch.is_grad_enabled()
        self._cache = SpecializationCache(name, _MAX_GRAPHS)
        self._latest = self._trace(without_history(args, computed=True))
        self._keep(self._latest)
        self.outputs = self._latest.capture.outputs
        refuse_dtensors(name, module, self._latest)
        missing = [path for path in self.outputs if path not in self._latest.output_specs]
        if missing:
            raise CaptureError(
                f"{name} ({type(module).__name__}) returns {missing[0]}, which is not a "
                "tensor; a stage hands only tensors to the next"
            )

    @property
    def latest(self) -> SplitFunctions:
        """The graphs of the latest forward."""
        return self._latest

    @property
    def output_specs(self) -> list[OutputSpec]:
        """Shape, dtype and whether a gradient comes back, of every output."""
        return _output_specs(self._latest, self.outputs)

    def fitting(self) -> SplitFunctions:
        """The graphs of the module as it is now.

        Raises:
            CaptureError: the module changed and cannot be traced any more.
            SplitError: it changed so that its outputs did.
        """
        with torch.set_grad_enabled(self._grad_mode):
            found = self._cache.find(self._key(), lambda f: f.capture.guards.hold(self._blanks, {}))
            if found is None:
                examples = [
                    spec.zeros().requires_grad_(blank.requires_grad)
                    for spec, blank in zip(self._specs, self._blanks, strict=True)
                ]
                found = self._trace(without_history(examples, computed=True))
                self._check_outputs(found)
                self._keep(found)
        self._latest = found
        return found

    def check_inputs(self, inputs: list[Tensor]) -> None:
        """Check shapes, dtypes and devices; lay inputs out as the examples were.

        Raises:
            SplitError: an input is not as the stage was traced with it.
        """
        if len(inputs) != len(self._specs):
            raise SplitError(f"{self._name} takes {len(self._specs)} inputs, got {len(inputs)}")
        for position, (given, spec) in enumerate(zip(inputs, self._specs, strict=True)):
            if (given.shape, given.dtype, given.device) != (spec.shape, spec.dtype, spec.device):
                raise SplitError(
                    f"{self._name}: input {position} must be {spec.dtype} "
                    f"{list(spec.shape)} on {spec.device}, got {given.dtype} "
                    f"{list(given.shape)} on {given.device}"
                )
            inputs[position] = spec.conform(given)

    def _trace(self, args: list[Tensor]) -> SplitFunctions:
        functions = trace(self._module, tuple(args), {}, self._options)
        if functions.has_backward and self._slices != 1:
            functions.sliced(self._slices)  # now is the time to hear that it cannot be
        return functions

    def _keep(self, functions: SplitFunctions) -> None:
        self._cache.add(self._key(), functions)
        self.state = StateReader(self._module)

    def _key(self) -> CallSignature:
        return CallSignature.of(list(self._blanks), None)

    def _check_outputs(self, found: SplitFunctions) -> None:
        before, now = self.output_specs, _output_specs(found, list(found.output_specs))
        same = found.capture.outputs == self.outputs
        if same and _output_specs(found, self.outputs) == before:
            return
        raise SplitError(
            f"{self._name} ({type(self._module).__name__}) returned {_described(before)} "
            f"when it was set up, and would now return {_described(now)}: what its forward "
            "reads was changed, such as parameters, their dtype or whether they are trained, "
            "or autocast; build a new Stage, or a new trainer"
        )


def refuse_dtensors(name: str, module: nn.Module, functions: SplitFunctions) -> None:
    """Check that what a stage takes from others and hands to others is no DTensor.

    Raises:
        CaptureError: one is; says how it lies over ranks.
    """
    for role, lies in functions.capture.shardings.items():
        if role.kind in (Kind.INPUT, Kind.OUTPUT):
            verb = "takes" if role.kind is Kind.INPUT else "returns"
            raise CaptureError(
                f"{name} ({type(module).__name__}) {verb} {role.name}, a DTensor ({lies}); stages "
                "hand each other local tensors. Pass local ones, and leave use_local_output=True "
                "in the plan of parallelize_module"
            )


def _output_specs(functions: SplitFunctions, names: Sequence[str]) -> list[OutputSpec]:
    specs, differentiable = functions.output_specs, functions.tangent_specs
    return [(specs[name].shape, specs[name].dtype, name in differentiable) for name in names]


def _described(specs: Sequence[OutputSpec]) -> str:
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')}{list(shape)}{'' if trained else ' without gradient'}"
        for shape, dtype, trained in specs
    )


def _without_overlap(example: Tensor) -> Tensor:
    """The example, contiguous if it overlaps itself: no other microbatch can be laid out so."""
    if not overlaps_itself(example):
        return example
    copy = example.detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(example.requires_grad)


def _memoryless(example: Tensor) -> Tensor:
    """A tensor like the example, without memory: guards look only at an input's metadata."""
    spec = TensorSpec.of(example)
    blank = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    blank.untyped_storage().resize_(0)
    return blank.requires_grad_(example.requires_grad)
