"""A whole model, captured, as a sequence of blocks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.capture.module_paths import stack
from autosplit.errors import PlanError
from autosplit.planner.meta_init.meta_model import named_tensors
from autosplit.torch_internals.module_state import hold_state
from autosplit.torch_internals.pytree import flatten_named, tree_flatten, tree_unflatten

from .blocks import find_cuts, make_blocks
from .capture_model import capture_model
from .operation_sequence import OperationSequence
from .other_mode import OtherMode
from .subgraph_module import StageModule, make_stage_graph


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
        line = capture_model(model, args, given, _device(model, (args, given)))
        return cls(model, args, given, line, training=model.training)

    @cached_property
    def crossing(self) -> tuple[tuple[Tensor, ...], ...]:
        """For each cut between two blocks, the tensors that go over it, without data."""
        line = self.line
        return tuple(
            tuple(line.sent(node) for node in line.crossing(block.first))
            for block in self.blocks[1:]
        )

    @cached_property
    def other_mode(self) -> OtherMode:
        """The model as it is now in the other mode: for evaluation if this is for training."""
        device = _device(self.model, (self.args, self.kwargs))
        capture = partial(capture_model, args=self.args, kwargs=self.kwargs, device=device)
        return OtherMode(self.model, not self.training, capture)

    def index(self, name: str) -> int:
        """Which block has this name.

        Raises:
            PlanError: none; lists names alike.
        """
        for index, block in enumerate(self.blocks):
            if block.name == name:
                return index
        raise PlanError(f"no block is called {name!r}{_alike(name, [b.name for b in self.blocks])}")

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
        line, start, end = self.line, self.blocks[first].first, self.blocks[last - 1].last
        nodes, outside = line.part(start, end)
        given = line.given(outside)
        sent = [n for n in line.body[start:end] if line.last_use[n] >= end]
        program = make_stage_graph(line, nodes, given, None if end == len(line.body) else sent)
        other = PlanError("blocks can be run only in the mode in which they were captured")
        pair = (program, other) if self.training else (other, program)
        module = StageModule(first, *pair)
        module.train(self.training)
        hold_state(module, self.model, program.state)
        return module, [line.given_value(node) for node in given]

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
                f"calls{_alike(name, list(first))}"
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


def _alike(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 3, 0.5) or known[:5]
    return f"; there are {', '.join(map(repr, close))}" if known else ""


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


def _device(model: nn.Module, inputs: Any) -> torch.device:
    """Where the model would be if none of it were on the meta device."""
    leaves = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    real = [t for t in (*named_tensors(model).values(), *leaves) if not t.is_meta]
    return real[0].device if real else torch.device("cpu")
