"""Stages of equal modules take the graphs of an earlier capture, instead of being captured again.

Most of the time of tests of trainers would go into captures of modules that an earlier trainer of
the process has captured already. Graphs are taken only if all that ``trace`` is passed is equal,
and Dynamo's guards hold for the new module. Graphs that depend on more than these are captured
anew: those with collectives, constants, repeated blocks or a compiler.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tests import devices

_MOST = 4  # captures that are kept of equal modules, whose guards differ
_PLAIN = (bool, int, float, str, type(None))
_VARIABLES = ("AUTOSPLIT_CHECK", "AUTOSPLIT_DUMP")


def share_captures(share: bool = True) -> None:
    """Replace ``trace`` where ``Specializations`` calls it, or restore it. Does nothing before that
    is imported.
    """
    calling: Any = sys.modules.get("autosplit.runtime.specializations")
    if calling is None or share == isinstance(calling.trace, SharingTrace):
        return
    if share:
        calling.trace = _sharing.setdefault(calling.trace, SharingTrace(calling.trace))
    else:
        calling.trace = calling.trace.trace


class _Captured(NamedTuple):
    """What is kept of a capture: nothing of its module."""

    kind: type
    capture: Any
    graphs: Any
    accumulation: Any
    backend: Any

    @classmethod
    def of(cls, functions: Any) -> _Captured:
        kept = cls(
            type(functions),
            functions.capture,
            functions._graphs,
            functions._accumulation,
            functions._backend,
        )
        return kept.bound(None, None)

    def bound(self, module: nn.Module | None, gathering: Any) -> _Captured:
        """The same for another module, which ``gathering`` gathers."""
        guards, backend = copy.copy(self.capture.guards), copy.copy(self.backend)
        guards.module, backend.gathering = module, gathering
        capture = dataclasses.replace(self.capture, guards=guards)
        return self._replace(capture=capture, backend=backend)

    def functions(self) -> Any:
        return self.kind(self.capture, self.graphs, self.backend, self.accumulation)


class SharingTrace:
    """``autosplit.runtime.build.trace``, which remembers the captures of its process.

    Attributes:
        trace: captures a module, splits and compiles its graphs.
        hits: how many captures were spared.
    """

    def __init__(self, trace: Callable[..., Any]) -> None:
        self.trace = trace
        self._captured: dict[Hashable, list[_Captured]] = {}
        self.hits = 0

    def __call__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Any,
        *,
        gathering: Any = None,
        **more: Any,
    ) -> Any:
        key = _key(module, args, kwargs), options, gathering is None, *more.items()
        earlier = self._captured.setdefault(key, [])
        for captured in earlier:
            bound = captured.bound(module, gathering)
            if bound.capture.guards.hold(args, kwargs):
                self.hits += 1
                return bound.functions()
        functions = self.trace(module, args, kwargs, options, gathering=gathering, **more)
        if _depends_on_module_alone(functions):
            earlier.insert(0, _Captured.of(functions))
            del earlier[_MOST:]
        return functions


_sharing: dict[Callable[..., Any], SharingTrace] = {}


def _key(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Classes of modules, and how parameters, buffers and inputs look; guards see to the rest."""
    state = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    places = {id(tensor): place for place, (_, tensor) in enumerate(state)}
    leaves, spec = tree_flatten((args, kwargs))
    return (
        tuple((name, type(part)) for name, part in module.named_modules()),
        tuple((name, places[id(tensor)], _look(tensor)) for name, tensor in state),
        tuple(map(_look, leaves)),
        spec,
        torch.is_grad_enabled(),
        devices.chosen(),
        tuple(map(os.environ.get, _VARIABLES)),
    )


def _look(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf if isinstance(leaf, _PLAIN) else object()  # equal to no other
    open_sizes = getattr(leaf, "_dynamo_weak_dynamic_indices", ())
    return (
        type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad,
        leaf.is_leaf, tuple(open_sizes),
    )  # fmt: skip


def _depends_on_module_alone(functions: Any) -> bool:
    """Whether guards and ``_key`` say all that these graphs depend on."""
    capture, guards = functions.capture, functions.capture.guards
    return (
        guards.has_only_dynamo_guards
        and not (guards.blocks or capture.shardings or capture.values)
        and not functions._backend.compiles
        and not any(map(os.environ.get, _VARIABLES))
        and all(
            node.op != "get_attr" and "c10d" not in str(node.target)
            for graph in functions._graphs.graphs().values()
            for node in graph.graph.nodes
        )
    )
