"""GraphModule -> callable."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.abc
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from .errors import SplitError
from .passes import codegen
from .passes.graph import Role, inputs, outputs

Boxed = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """A graph as a callable.

    Attributes:
        call: takes one list, empties it, and returns a list. The caller keeps no reference
            to what it handed over, so every tensor dies at its last use inside.
        inputs: role of every item of the list it takes.
        outputs: role of every item of the list it returns.
    """

    call: Boxed
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]

    def taking(self, given: Sequence[Role]) -> Boxed:
        """``call`` for a list in the order of ``given``, of which the graph may take a part."""
        order = positions(self.inputs, given)
        call = self.call

        def run(pool: list[Any]) -> list[Any]:
            args = [pool[at] for at in order]
            pool.clear()
            return call(args)

        return call if order == list(range(len(given))) else run


def positions(wanted: Iterable[Role], given: Sequence[Role]) -> list[int]:
    """Where each of the wanted roles stands among the given ones."""
    at = {role: index for index, role in enumerate(given)}
    return [at[role] for role in wanted]


def compile_graph(name: str, module: fx.GraphModule, backend: str) -> CompiledGraph:
    """Compile one graph with a backend of ``BACKENDS``.

    Raises:
        SplitError: the backend is unknown; lists the known ones.
    """
    check_backend(backend)
    call = BACKENDS[backend](name, module)
    taken = tuple(inputs(module.graph))
    returned = tuple(role for role, _ in outputs(module.graph))
    return CompiledGraph(call, taken, returned)


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        known = ", ".join(map(repr, BACKENDS))
        raise SplitError(f"unknown backend {backend!r}; known backends: {known}")


def _eager(name: str, module: fx.GraphModule) -> Boxed:
    """Run the operators one by one, by the very source that ``dump`` writes."""
    source = f"{codegen.HEADER}\n\n{codegen.generate(name, module)}"
    constants = codegen.constants(module)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    file = f"autosplit-generated/{name}-{digest}.py"
    space = types.ModuleType(name)
    # Tracebacks and debuggers ask the module's loader for the line that failed.
    space.__loader__ = _Source(source)
    exec(compile(source, file, "exec"), space.__dict__)
    function = getattr(space, name)
    return lambda args: function(args, constants)


@dataclasses.dataclass(frozen=True)
class _Source(importlib.abc.InspectLoader):
    text: str

    def get_source(self, fullname: str) -> str:
        return self.text


BACKENDS: Mapping[str, Callable[[str, fx.GraphModule], Boxed]] = {"eager": _eager}
