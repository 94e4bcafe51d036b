"""A whole model, captured for one microbatch, as a sequence of blocks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.autograd.module_proxy import refuse_split
from autosplit.backends.backend import collecting_new_objects_only
from autosplit.capture.diagnosis import named_module
from autosplit.capture.forward_graph import CapturedForward, capture_forward
from autosplit.capture.input_sizes import leave_open
from autosplit.capture.module_paths import name_modules, stack
from autosplit.capture.repeated_blocks import repeated_blocks
from autosplit.capture.workarounds.custom_functions import make_traceable
from autosplit.capture.workarounds.dynamo import forget_traced_values
from autosplit.errors import AutosplitError, CaptureError, PlanError, PythonStateError
from autosplit.planner.blocks import find_cuts, make_blocks
from autosplit.planner.meta_model import named_tensors
from autosplit.planner.operation_sequence import OperationSequence
from autosplit.planner.precision import OWN_DTYPES, MixedPrecision
from autosplit.planner.stage_layout import StageLayout
from autosplit.planner.stage_module import StageModule
from autosplit.runtime.build import warm_up
from autosplit.text.figures import few, nearest
from autosplit.text.progress import working
from autosplit.torch_internals.pytree import flatten_named, tree_flatten, tree_unflatten
from autosplit.torch_internals.state import preserve_modes


def _capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: MixedPrecision,
    device: torch.device | None = None,
    aux_losses: Collection[str] = (),
) -> OperationSequence:
    """Capture the operations of ``model(*args, **kwargs)`` in the model's present mode.

    Args:
        model: the model.
        args: example positional inputs.
        kwargs: example keyword inputs.
        precision: the dtypes of parameters, inputs and outputs.
        device: the device of an earlier capture, from which parameters may have moved; None: the
            model's device.
        aux_losses: names of attributes in which the forward leaves auxiliary losses.
    """
    tensors = named_tensors(model).values()
    has_values = not any(t.is_meta or precision.dtype_of(t) is not t.dtype for t in tensors)
    moved = device is not None
    try:
        device = device or device_of(model, (args, kwargs))
        with precision.applied(model, device, moved=moved), collecting_new_objects_only():
            forward = _captured(model, args, kwargs, aux_losses, has_values=has_values)
    except CaptureError as error:
        raise CaptureError(
            f"{error}\nOnly a model that is captured whole can be cut, also with cut_at. "
            "Change that line, or cut by hand: give the trainer a list of stages, each a module"
        ) from error
    name_modules(forward.module, model)
    make_traceable(forward.module)
    forget_traced_values(forward.module)
    line = OperationSequence(forward, repeated_blocks(model))
    if not line.body:
        raise PlanError(
            f"{type(model).__name__} computes nothing: it has no operators to cut into stages"
            if any(parameter.requires_grad for parameter in model.parameters())
            else f"no parameter of {type(model).__name__} requires a gradient: there is nothing "
            "to train"
        )
    return line


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    aux_losses: Collection[str],
    *,
    has_values: bool,
) -> CapturedForward:
    """The captured forward. If the first call changes Python state, call the model once and capture
    the second call; that needs parameters with values.
    """
    try:
        return capture_forward(model, args, kwargs, aux_losses)
    except PythonStateError:
        if not has_values:
            raise
    warm_up(model, args, kwargs)
    return capture_forward(model, args, kwargs, aux_losses)


class WholeModel:
    """The captured forward of a model for one microbatch, as a sequence of blocks.

    Attributes:
        model: the user's module.
        args: example positional inputs.
        kwargs: example keyword inputs.
        training: whether it was captured in training mode; its present mode may differ.
        precision: the dtypes of its parameters, inputs and outputs in the capture.
        names: names of the input tensors, in order; empty if all inputs are positional.
        line: the operations of the model.
        blocks: the ranges of operations between possible cuts.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        line: OperationSequence,
        wanted: Sequence[int] = (),
        *,
        training: bool,
        precision: MixedPrecision = OWN_DTYPES,
    ) -> None:
        self.model = model
        self.training = training
        self.precision = precision
        self.args = args
        self.kwargs = kwargs
        self.names = _input_names(model, args, kwargs) if kwargs else ()
        self.line = line
        self.blocks = make_blocks(line, find_cuts(line, wanted))

    @classmethod
    def capture(
        cls,
        model: nn.Module,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        precision: MixedPrecision = OWN_DTYPES,
        aux_losses: Collection[str] = (),
    ) -> WholeModel:
        """Capture ``model(*args, **kwargs)`` in its present mode, without running it on real data.
        Only a model whose first call fills a cache or changes a setting is called once.

        Args:
            model: the model. Its parameters may be on the meta device; the graph is then for the
                device of its buffers, or of the inputs if it has no buffers.
            args: example positional inputs of one microbatch, a tuple or one tensor. A dictionary
                is passed as keyword inputs.
            kwargs: example keyword inputs.
            precision: the dtypes of parameters, inputs and outputs.
            aux_losses: names of attributes in which the forward leaves auxiliary losses.

        Raises:
            CaptureError: the model cannot be captured in one graph; names the user's line.
            PlanError: the model computes nothing, the inputs are invalid, or no module's forward
                leaves an auxiliary loss.
            SplitError: the model is split or compiled already.
        """
        if not isinstance(model, nn.Module):
            raise PlanError(
                f"expected one nn.Module to cut, got a {type(model).__name__}: give "
                "PipelineTrainer existing stages as a list"
            )
        refuse_split("a model to cut", model)
        args, named = _apart(_inputs(args, kwargs))
        with working(f"capturing {type(named_module(model)).__name__} whole"):
            line = _capture(model, args, named, precision, aux_losses=aux_losses)
        if missing := [name for name in aux_losses if name not in line.forward.aux_losses]:
            raise PlanError(
                f"aux_losses has {missing[0]!r}, which the forward of {type(model).__name__} sets "
                "on no module: name attributes that modules set to computed tensors"
            )
        return cls(model, args, named, line, training=model.training, precision=precision)

    def bound_to(self, model: nn.Module, wanted: Sequence[int] = ()) -> WholeModel:
        """The same capture, for a copy of the model with other parameters and buffers.

        Args:
            model: the copy, or the model itself.
            wanted: places in the operation sequence at which a block must start.
        """
        return WholeModel(
            model,
            self.args,
            self.kwargs,
            self.line,
            wanted,
            training=self.training,
            precision=self.precision,
        )

    @property
    def input_tensors(self) -> list[Tensor]:
        """The example's input tensors, in the order of the stages' wiring."""
        leaves = tree_flatten((self.args, self.kwargs))[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @cached_property
    def crossing(self) -> tuple[tuple[Tensor, ...], ...]:
        """For each cut between two blocks, the tensors that cross it, without data."""
        line = self.line
        return tuple(
            tuple(line.sent(n) for n in line.body[: b.first] if line.last_use[n] >= b.first)
            for b in self.blocks[1:]
        )

    @cached_property
    def other_mode(self) -> OperationSequence | AutosplitError:
        """The operations of the model in the mode, training or evaluation, in which it was not
        captured. They are captured at the first use; the value is the error if that fails.
        """
        try:
            return self._captured_again(not self.training, self.args, self.kwargs, "its other mode")
        except AutosplitError as error:
            return error

    def recaptured(
        self,
        training: bool,
        shapes: Sequence[Sequence[int]],
        varying: Sequence[Collection[int]],
    ) -> tuple[list[Tensor], OperationSequence]:
        """Capture the model for inputs of other sizes.

        Args:
            training: the mode, training or evaluation.
            shapes: the shape of each input tensor.
            varying: for each input tensor, the dimensions whose sizes become symbols.

        Returns:
            (input tensors of these shapes, operations of the model).

        Raises:
            CaptureError: the model cannot be captured for these sizes.
        """
        tensors = [
            tensor.new_zeros(shape).requires_grad_(tensor.requires_grad)
            for tensor, shape in zip(self.input_tensors, shapes, strict=True)
        ]
        for tensor, dimensions in zip(tensors, varying, strict=True):
            leave_open(tensor, dimensions)
        leaves, spec = tree_flatten((self.args, self.kwargs))
        replacements = iter(tensors)
        resized = [next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(resized, spec)
        return tensors, self._captured_again(training, args, kwargs, "other sizes")

    def _captured_again(
        self, training: bool, args: Any, kwargs: Any, purpose: str
    ) -> OperationSequence:
        """Capture the model once more, in training or evaluation mode."""
        device = self.line.device
        autocasts = torch.amp.is_autocast_available(device.type)
        with (
            preserve_modes([self.model]),
            working(f"capturing {type(named_module(self.model)).__name__} for {purpose}"),
            # The first evaluation may begin inside either.
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False) if autocasts else contextlib.nullcontext(),
        ):
            if self.model.training is not training:
                self.model.train(training)
            names = [*self.line.forward.aux_losses]
            return _capture(self.model, args, kwargs, self.precision, device, names)

    def divided(self, cut_at: Sequence[str]) -> tuple[WholeModel, list[int]]:
        """Return (model with a block that starts at each named module, indices of these blocks).

        Args:
            cut_at: names of modules, such as ``model.layers.8``, or of blocks.

        Raises:
            PlanError: a name is unknown, or the model cannot be cut before it.
        """
        places = [self._place(name) for name in cut_at]
        model = self.bound_to(self.model, places)
        starts = [block.first for block in model.blocks]
        return model, [starts.index(place) for place in places]

    def segment(self, first: int, last: int) -> tuple[nn.Module, list[Tensor]]:
        """Blocks ``first`` to ``last - 1`` as a module, in the mode of the capture. It returns a
        tuple of tensors, even if the model returns something else.

        Args:
            first: the first block.
            last: the block after the last block.

        Returns:
            (module with the model's own parameters and buffers, its arguments as tensors without
            data).

        Raises:
            PlanError: the blocks do not exist.
        """
        if not 0 <= first < last <= len(self.blocks):
            raise PlanError(
                f"segment(first, last) needs 0 <= first < last <= {len(self.blocks)}; got "
                f"first={first} and last={last}"
            )
        cuts = [self.blocks[k].first for k in (first, last) if 0 < k < len(self.blocks)]
        layout, index = StageLayout(self.line, cuts), int(first > 0)
        program = layout.program(index, plain=True)
        module = StageModule(first, {self.training: program}, self.model, program.state)
        module.train(self.training)
        return module, [self.line.given_value(node) for node in layout.received[index]]

    def _place(self, name: str) -> int:
        """The position of the first operation of a block or module."""
        place = next((block.first for block in self.blocks if block.name == name), None)
        if place is None:
            place = self._module(name)
        if place == 0:
            raise PlanError(
                f"cut_at={name!r} is the start of the model, where no stage can end: name a later "
                "module"
            )
        why = self.line.forbidden.get(place)
        if why is not None:
            raise PlanError(
                f"the model cannot be cut before {name!r}: {why}; cut before or after all "
                "operations that must stay together"
            )
        return place

    def _module(self, name: str) -> int:
        first: dict[str, int] = {}
        for index, node in enumerate(self.line.body):
            for path in stack(node):
                first.setdefault(path, index)
        # A list of modules is never called itself.
        inside = [place for path, place in first.items() if f"{path}.".startswith(f"{name}.")]
        if not inside:
            raise PlanError(
                f"cut_at={name!r} is not a module that the forward of {type(self.model).__name__} "
                f"calls{nearest(name, first) or f'; there are {few([*first], 5)}'}"
            )
        return min(inside)


def _inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (positional inputs, keyword inputs) of a model's call.

    Raises:
        PlanError: the inputs are invalid.
    """
    if isinstance(args, Mapping) and not kwargs:
        args, kwargs = (), args
    positional = (args,) if isinstance(args, Tensor) else args
    named = {} if kwargs is None else kwargs
    keys = isinstance(named, Mapping) and all(isinstance(name, str) for name in named)
    if isinstance(positional, (tuple, list)) and keys:
        return tuple(positional), dict(named)
    raise PlanError(
        "inputs of one microbatch are a tensor, a tuple of positional inputs, or a dictionary of "
        f"keyword inputs by name; got args of type {type(args).__name__} and kwargs of type "
        f"{type(named).__name__}"
    )


def _input_names(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The forward's names of the input tensors."""
    positional = zip(inspect.signature(model.forward).parameters, args, strict=False)
    return tuple(
        f"{name}{path}"
        for name, value in (dict(positional) | kwargs).items()
        for path, leaf in flatten_named("", value)
        if isinstance(leaf, Tensor)
    )


def _apart(inputs: Any) -> Any:
    """The inputs without repeated tensors: if labels are the input ids, they become a separate
    tensor.
    """
    leaves, spec = tree_flatten(inputs)
    seen: set[int] = set()
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and id(leaf) in seen:
            leaves[position] = leaf.detach().requires_grad_(leaf.requires_grad)
        seen.add(id(leaf))
    return tree_unflatten(leaves, spec)


def device_of(model: nn.Module, inputs: Any = ()) -> torch.device:
    """The device of a model's tensors that are not on the meta device, or of its inputs."""
    leaves = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    real = (t.device for t in (*named_tensors(model).values(), *leaves) if not t.is_meta)
    return next(real, torch.device("cpu"))
