"""A whole model, captured, as a sequence of blocks; and in the mode, training or evaluation, in
which it was not captured, from a copy without the memory of its parameters.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autosplit.backends.backend import collecting_new_objects_only
from autosplit.capture.first_call import is_passing, warm_up
from autosplit.capture.forward_graph import CapturedForward, capture_forward
from autosplit.capture.module_paths import name_modules, stack
from autosplit.capture.workarounds.custom_functions import make_traceable
from autosplit.errors import AutosplitError, CaptureError, PlanError
from autosplit.planner.blocks import find_cuts, make_blocks
from autosplit.planner.meta_model import alike, named_tensors, stand_in_tensors
from autosplit.planner.operation_sequence import OperationSequence
from autosplit.planner.stage_module import Program, StageGraph, StageLayout, StageModule
from autosplit.text.figures import few, nearest
from autosplit.text.progress import working
from autosplit.torch_internals.pytree import flatten_named, tree_flatten, tree_unflatten
from autosplit.torch_internals.state import hold_state, modes_kept


def capture_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> OperationSequence:
    """The operations of ``model(*args, **kwargs)`` as it is now, training or not.

    Args:
        model: its parameters may be on the meta device.
        args: example positional inputs, no tensor twice among them and ``kwargs``.
        kwargs: example keyword inputs.
        device: stands for the meta device.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: it computes nothing.
    """
    has_values = not any(tensor.is_meta for tensor in named_tensors(model).values())
    try:
        with stand_in_tensors(model, device), collecting_new_objects_only():
            forward = _captured(model, args, kwargs, has_values=has_values)
    except CaptureError as error:
        raise CaptureError(
            f"{error}\nOnly a model that is captured whole can be cut, also with cut_at. "
            "Change that line, or cut by hand: give the trainer a list of stages, each a module"
        ) from error
    name_modules(forward.module, model)
    make_traceable(forward.module)
    line = OperationSequence(forward)
    if not line.body:
        raise PlanError(f"{type(model).__name__} computes nothing that could be a stage")
    return line


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_values: bool
) -> CapturedForward:
    """The forward; behind the first call where that is another. Without values there is none."""
    try:
        return capture_forward(model, args, kwargs)
    except CaptureError as error:
        passing = has_values and is_passing(
            error, model, args, kwargs, capture_forward, insist=True
        )
        if not passing:
            raise
    warm_up(model, args, kwargs)
    return capture_forward(model, args, kwargs)


class NotCopiedError(Exception):
    """A model cannot be copied so that the copy stands for it."""


def bare_copy(model: nn.Module) -> nn.Module:
    """A copy of a model as it is now, to be traced later: parameters are on the meta device, all
    other tensors are the model's own. It holds nothing of the model's parameters.

    Raises:
        NotCopiedError: something that hangs on the model cannot be copied, or leads back to it.
    """
    parameters = {id(p): p for p in model.parameters()}
    memo: dict[int, Any] = {key: _without_values(p) for key, p in parameters.items()}
    try:
        with _OwnTensors():
            copied = copy.deepcopy(model, memo)
    except Exception as error:  # whatever the user's objects raise
        raise NotCopiedError(f"{type(model).__name__} cannot be copied: {error}") from error
    originals = parameters.keys() | {id(module) for module in model.modules()}
    if not isinstance(copied, nn.Module) or _reaches(copied, originals):
        raise NotCopiedError(f"a copy of {type(model).__name__} leads back to what it is of")
    return copied


def _without_values(parameter: nn.Parameter) -> Tensor:
    if is_lazy(parameter) or type(parameter) is not nn.Parameter or _is_subclass(parameter.data):
        raise NotCopiedError(f"a parameter is a {type(parameter.data).__name__}")
    return alike(torch.empty_like(parameter, device="meta"), parameter)


def _is_subclass(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor


class _OwnTensors(TorchFunctionMode):
    """Inside, a copy has the tensors that what it is of has; nothing computes with any."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0]
        raise NotCopiedError(f"copying it calls {getattr(func, '__name__', func)}")


# What code can read in them belongs to the process, not to the object that is looked at.
_SHARED = (type, ModuleType, CodeType, BuiltinFunctionType, logging.Logger, str, bytes, int, float)


def _reaches(start: object, wanted: set[int]) -> bool:
    """Whether one leads from an object to one of these, by attributes, items and closures."""
    seen: dict[int, object] = {}  # alive, so that no other object gets its number
    waiting = [start]
    while waiting:
        found = waiting.pop()
        if id(found) in wanted:
            return True
        if id(found) in seen or isinstance(found, _SHARED):
            continue
        seen[id(found)] = found
        if isinstance(found, FunctionType):
            waiting += [found.__closure__, found.__defaults__, found.__kwdefaults__, vars(found)]
        elif not isinstance(found, Tensor):
            waiting += gc.get_referents(found)
    return False


Capture = Callable[[nn.Module], OperationSequence]


def later(model: nn.Module, training: bool, capture: Capture) -> Callable[[], OperationSequence]:
    """What gives the operations of a model in another mode, captured when that is first asked for:
    a run that never evaluates does not pay for it. Until then it holds a copy of the model as it
    is now, without parameters. A model that cannot be copied so is captured at once.

    Args:
        model: as it shall be but for its mode.
        training: whether that mode is training.
        capture: traces a model.

    Returns:
        raises an AutosplitError where the model cannot be captured in that mode, or not as late.
    """
    try:
        return functools.cache(partial(_of_copy, bare_copy(model), training, capture))
    except NotCopiedError:
        pass
    found: list[OperationSequence] = []
    try:
        found.append(_in_mode(model, training, capture))
    except AutosplitError as error:
        reason = error

    def known() -> OperationSequence:
        if not found:
            raise reason
        return found[0]

    return known


def _in_mode(model: nn.Module, training: bool, capture: Capture) -> OperationSequence:
    with modes_kept([model]):
        if model.training is not training:
            model.train(training)
        return capture(model)


def _of_copy(copied: nn.Module, training: bool, capture: Capture) -> OperationSequence:
    """The operations of a copy, whatever surrounds the call that asked for them.

    Raises:
        CaptureError: it cannot be captured.
        PlanError: it reads parameters that are not its own: those of what it is a copy of.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in _devices():
            stack.enter_context(torch.autocast(device, enabled=False))
        line = _in_mode(copied, training, capture)
    if any(isinstance(tensor, nn.Parameter) for tensor in line.forward.constants.values()):
        raise PlanError(
            f"in that mode {type(copied).__name__} reads parameters that are not registered in it; "
            "build the stages of a model that is in that mode"
        )
    return line


def _devices() -> Iterator[str]:
    yield "cpu"
    if accelerator := torch.accelerator.current_accelerator():
        yield accelerator.type


_OTHER_MODE = PlanError("blocks can be run only in the mode in which they were captured")


class WholeModel:
    """The captured forward of a model for one microbatch, as a sequence of blocks.

    Attributes:
        model: the user's module itself.
        args: example positional inputs.
        kwargs: example keyword inputs.
        training: whether it was captured in training mode, whatever mode it is in by now.
        names: of the tensors among the inputs in order; empty where all are positional.
        line: the operations.
        blocks: what lies between the cuts that can be made.
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
    ) -> None:
        self.model = model
        self.training = training
        self.args = args
        self.kwargs = kwargs
        self.names = _input_names(model, args, kwargs) if kwargs else ()
        self.line = line
        self.blocks = make_blocks(line, find_cuts(line, wanted))

    @classmethod
    def capture(
        cls, model: nn.Module, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> WholeModel:
        """Capture ``model(*args, **kwargs)`` as it is now, training or not, without running it on
        real data; but a model whose first call alone fills a cache or a setting is called once.

        Args:
            model: its parameters may be on the meta device; the graph is then for the device of
                its buffers, or of the inputs if it has none.
            args: example positional inputs of one microbatch, a tuple or one tensor; a dictionary
                is keyword inputs.
            kwargs: example keyword inputs.

        Raises:
            CaptureError: the model cannot be captured in one graph; names the user's line.
            PlanError: it computes nothing, or the inputs are none.
        """
        args, given = _apart(_inputs(args, kwargs))
        with working(f"capturing {type(model).__name__} whole"):
            line = capture_model(model, args, given, device_of(model, (args, given)))
        return cls(model, args, given, line, training=model.training)

    def check_stages(self, stages: int) -> None:
        """Refuse more stages than there are blocks.

        Raises:
            PlanError: says how many there may be.
        """
        if not 1 <= stages <= len(self.blocks):
            raise PlanError(
                f"{type(self.model).__name__} has blocks for 1 to {len(self.blocks)} stages, got "
                f"stages={stages}"
            )

    @cached_property
    def crossing(self) -> tuple[tuple[Tensor, ...], ...]:
        """For each cut between two blocks, the tensors that go over it, without data."""
        line = self.line
        return tuple(
            tuple(line.sent(n) for n in line.body[: b.first] if line.last_use[n] >= b.first)
            for b in self.blocks[1:]
        )

    @cached_property
    def other_mode(self) -> Callable[[], OperationSequence]:
        """What captures the model as it is now in the other mode: for evaluation if this is for
        training; see ``later``.
        """
        device = device_of(self.model, (self.args, self.kwargs))
        capture = partial(capture_model, args=self.args, kwargs=self.kwargs, device=device)
        return later(self.model, not self.training, capture)

    def divided(self, cut_at: Sequence[str]) -> WholeModel:
        """The same with a block beginning where each of these modules begins.

        Args:
            cut_at: names of modules, as ``model.layers.8``, or of blocks.

        Raises:
            PlanError: a name is unknown, or there can be no cut before it.
        """
        wanted = [self._place(name) for name in cut_at]
        return WholeModel(
            self.model, self.args, self.kwargs, self.line, wanted, training=self.training
        )

    def start(self, name: str) -> int:
        """Which block begins where a module begins, or has this name.

        Raises:
            PlanError: none does.
        """
        place = self._place(name)
        for index, block in enumerate(self.blocks):
            if block.first == place:
                return index
        raise PlanError(f"no block begins at {name!r}")

    def segment(self, first: int, last: int) -> tuple[nn.Module, list[Tensor]]:
        """Blocks ``first`` up to but not ``last`` as a module, in the mode of the capture.

        Returns:
            the module, with the model's own parameters and buffers; and what its arguments look
            like, as tensors without data.

        Raises:
            PlanError: there are no such blocks.
        """
        if not 0 <= first < last <= len(self.blocks):
            raise PlanError(
                f"expected blocks first < last of 0 to {len(self.blocks)}, got {first} to {last}"
            )
        cuts = [self.blocks[k].first for k in (first, last) if 0 < k < len(self.blocks)]
        layout, index = StageLayout(self.line, cuts), int(first > 0)
        program = layout.program(index)
        module = self.module(first, program, _OTHER_MODE, program.state)
        return module, [self.line.given_value(node) for node in layout.given[index]]

    def module(
        self, index: int, own: StageGraph, other: Program, names: Iterable[str]
    ) -> StageModule:
        """A stage in the mode of the capture, with the model's own parameters and buffers.

        Args:
            index: which one.
            own: what it runs in that mode.
            other: what it runs in the other one.
            names: of parameters and buffers.
        """
        module = StageModule(index, *((own, other) if self.training else (other, own)))
        module.train(self.training)
        hold_state(module, self.model, names)
        return module

    def _place(self, name: str) -> int:
        """Where on the line a block or module of this name begins."""
        place = next((block.first for block in self.blocks if block.name == name), None)
        if place is None:
            place = self._module(name)
        if place == 0:
            raise PlanError(f"cut_at={name!r} is where the model begins; there is nothing before")
        why = self.line.forbidden.get(place)
        if why is not None:
            raise PlanError(
                f"the model cannot be cut before {name!r}: {why}; cut before or behind all that "
                "has to be together"
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
                f"cut_at={name!r} is no module that the forward of {type(self.model).__name__} "
                f"calls{nearest(name, first) or f'; there are {few([*first], 5)}'}"
            )
        return min(inside)


def _inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs as a model is called with.

    Raises:
        PlanError: they are none.
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
        f"keyword inputs by name; got a {type(args).__name__} and a {type(named).__name__}"
    )


def _input_names(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The names that the forward has for the tensors among its inputs."""
    bound = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    parameters = inspect.signature(model.forward).parameters
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and name in bound:
            bound.update(bound.pop(name))
    ordered = {name: value for name, value in bound.items() if name not in kwargs} | kwargs
    found = []
    for name, value in ordered.items():
        leaves = flatten_named("", value)
        found += [f"{name}{path}" for path, leaf in leaves if isinstance(leaf, Tensor)]
    return tuple(found)


def _apart(inputs: Any) -> Any:
    """The same with no tensor in two places: labels that are the inputs are inputs of their own."""
    leaves, spec = tree_flatten(inputs)
    seen: set[int] = set()
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and id(leaf) in seen:
            leaves[position] = leaf.detach().requires_grad_(leaf.requires_grad)
        seen.add(id(leaf))
    return tree_unflatten(leaves, spec)


def device_of(model: nn.Module, inputs: Any = ()) -> torch.device:
    """Where the model would be if none of it were on the meta device."""
    leaves = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    real = (t.device for t in (*named_tensors(model).values(), *leaves) if not t.is_meta)
    return next(real, torch.device("cpu"))
