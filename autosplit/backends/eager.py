"""Graphs run operator by operator: the same kernels as plain autograd, so the same bits."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.abc
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from autosplit.errors import SplitError
from autosplit.passes.errors import StrideError
from autosplit.passes.lowering import codegen
from autosplit.passes.subgraph import Subgraph, subgraphs
from autosplit.torch_internals.operators import DirectOperators

from .backend import Backend, Boxed, Code

if TYPE_CHECKING:
    from autosplit.sharded.module import Gathering

_OPERATORS = DirectOperators()


class Eager(Backend):
    """Runs the very source that ``dump`` writes.

    Args:
        known: compiled graphs that others call; the rest are compiled here.
        gathering: see ``Backend``.
    """

    def __init__(
        self,
        known: Mapping[Subgraph, Boxed] = types.MappingProxyType({}),
        gathering: Gathering | None = None,
    ) -> None:
        self._called = dict(known)
        self.gathering = gathering

    def compile(self, name: str, module: fx.GraphModule) -> Code:
        source = f"{codegen.HEADER}\n\n{codegen.generate(name, module)}"
        constants = codegen.constants(module)
        for called in subgraphs(module.graph):
            block, gathering = self._compiled(called), self.gathering
            constants[called.name] = gathering.block(name, block) if gathering else block
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        file = f"autosplit-generated/{name}-{digest}.py"
        space = types.ModuleType(name)
        # Tracebacks and debuggers ask the module's loader for the line that failed.
        space.__loader__ = _Source(source)
        exec(compile(source, file, "exec"), space.__dict__)
        space.__dict__["aten"] = _OPERATORS
        function: Any = getattr(space, name)
        function.__defaults__ = (constants,)
        if StrideError.__name__ not in source:
            return Code(function)

        def call(args: list[Any]) -> list[Any]:
            try:
                found: list[Any] = function(args)
            except StrideError as error:
                raise SplitError(str(error)) from error
            return found

        return Code(call)

    def _compiled(self, called: Subgraph) -> Boxed:
        """A graph that others call, compiled once."""
        if called not in self._called:
            self._called[called] = self.compile(called.name, called.module).call
        return self._called[called]


@dataclasses.dataclass(frozen=True)
class _Source(importlib.abc.InspectLoader):
    text: str

    def get_source(self, fullname: str) -> str:
        return self.text
