"""Archives of split graphs: ``SplitGraphs`` to bytes and back.

Values without data become descriptions; operators and types are named, and only those that are
listed in ``archive_names`` are looked up when bytes are read, so that reading runs nobody's code.
Constants that tracing made have their data in it. Sizes that are left open are numbered, and others
written as what follows from them. A graph that holds anything else (bodies of higher-order
operators, sizes that depend on data) cannot be archived.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.passes import Role, SplitGraphs
from autosplit.passes.memory_policy import Memory, Rates
from autosplit.torch_internals.dtensor import Sharding
from autosplit.torch_internals.dtensor_facts import group_names, placement_facts, placement_of

from .archive_names import NoArchiveError
from .constant_data import read_constant
from .graph_reader import GraphReader, read_graph, read_tensors
from .graph_writer import GraphWriter
from .size_symbols import SizeSymbols

__all__ = ["NoArchiveError", "Shardings", "pack_graphs", "unpack_graphs"]


Shardings = Mapping[Role, Sharding]
"""Role of what is a DTensor outside of the graphs -> how it lies over ranks."""


def pack_graphs(
    graphs: SplitGraphs,
    shardings: Shardings = MappingProxyType({}),
    meshes: Sequence[Any] = (),
    symbols: SizeSymbols | None = None,
) -> bytes:
    """The graphs as bytes, from which ``unpack_graphs`` makes the same graphs: the writer refuses
    whatever the reader would not read, or read as something else.

    Args:
        graphs: the graphs.
        shardings: what of their inputs and results are DTensors.
        meshes: that the reader has, too, in this order; DTensors are on these.
        symbols: sizes that are left open; None where none is.

    Raises:
        NoArchiveError: they hold something that has no such form.
    """
    writer = GraphWriter({name for mesh in meshes for name in group_names(mesh)}, symbols)
    rates = graphs.memory.rates  # a tuple of a type of its own, which would be no plain data
    memory = dataclasses.astuple(dataclasses.replace(graphs.memory, rates=None)), rates and [*rates]
    written = {name: writer.graph(module) for name, module in graphs.graphs().items()}
    if not writer.tensors:
        raise NoArchiveError("no tensor is in them")
    lying = [(role, *_described(lies, meshes)) for role, lies in shardings.items()]
    made = writer.tensors, writer.numbers, writer.constants
    return pickle.dumps((memory, *made, written, lying))


def _described(lies: Sharding, meshes: Sequence[Any]) -> tuple[Any, ...]:
    placements = tuple(map(placement_facts, lies.placements))
    if lies.mesh not in meshes or None in placements:
        raise NoArchiveError(f"a tensor lies as {lies}, which only this process knows")
    return meshes.index(lies.mesh), placements, tuple(lies.shape), tuple(lies.stride)


def unpack_graphs(
    data: bytes,
    mode: FakeTensorMode,
    meshes: Sequence[Any] = (),
    symbols: SizeSymbols | None = None,
) -> tuple[SplitGraphs, Shardings]:
    """Split graphs from the bytes of ``pack_graphs``, with values of this fake mode and sizes that
    follow from these symbols, and what of their inputs and results are DTensors on these meshes.

    Raises:
        NoArchiveError: they were not written by this version.
    """
    try:
        memory, described, sizes, constants, written, lying = GraphReader(data).load()
        numbers = _read_numbers(sizes, symbols)
        tensors = read_tensors(described, mode, numbers)
        real = [read_constant(*each) for each in constants]
        graphs = {
            name: read_graph(
                name, nodes, tensors, {key: real[at] for key, at in held.items()}, numbers
            )
            for name, (held, nodes) in written.items()
        }
        fields = [field.name for field in dataclasses.fields(SplitGraphs)]
        made: dict[str, Any] = {name: graphs.get(name) for name in fields}
        shardings = {
            role: Sharding(
                meshes[at], tuple(map(placement_of, placements)), torch.Size(shape), stride
            )
            for role, at, placements, shape, stride in lying
        }
        (setting, rates) = memory
        kept = dataclasses.replace(Memory(*setting), rates=rates and Rates(*rates))
        return SplitGraphs(**{**made, "memory": kept}), shardings
    except NoArchiveError:
        raise
    except Exception as error:
        raise NoArchiveError(f"{type(error).__name__}: {error}") from error


def _read_numbers(forms: Sequence[Any], symbols: SizeSymbols | None) -> list[Any]:
    """Numbers that follow from sizes that are left open."""
    if symbols is None and forms:
        raise NoArchiveError("sizes are symbolic")
    return [] if symbols is None else [symbols.read(*form) for form in forms]
