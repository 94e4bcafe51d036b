"""Archives of split graphs: ``SplitGraphs`` to bytes and back.

Values without data become descriptions; operators and types are named, and only those that are
listed in ``archive_names`` are looked up when bytes are read, so that reading runs nobody's code.
Constants that tracing made have their data in it. A graph that holds anything else (bodies of
higher-order operators, symbolic sizes) cannot be archived.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autosplit.passes import SplitGraphs
from autosplit.passes.memory_policy import Memory

from .archive_names import NoArchiveError
from .constant_data import read_constant
from .graph_reader import GraphReader, read_graph, read_tensors
from .graph_writer import GraphWriter

__all__ = ["NoArchiveError", "pack_graphs", "unpack_graphs"]


def pack_graphs(graphs: SplitGraphs) -> bytes:
    """The graphs as bytes, from which ``unpack_graphs`` was seen to make the same graphs.

    Raises:
        NoArchiveError: they hold something that has no such form.
    """
    writer = GraphWriter()
    memory = dataclasses.astuple(graphs.memory)
    written = {name: writer.graph(module) for name, module in graphs.graphs().items()}
    data = pickle.dumps((memory, writer.tensors, writer.constants, written))
    values = [node.meta.get("val") for node in graphs.forward.graph.nodes]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        raise NoArchiveError("no tensor is in them")
    twin = unpack_graphs(data, mode).graphs()
    for name, module in graphs.graphs().items():
        if _text(module) != _text(twin[name]):
            raise NoArchiveError(f"{name} is read back as another graph")
    return data


def unpack_graphs(data: bytes, mode: FakeTensorMode) -> SplitGraphs:
    """Split graphs from the bytes of ``pack_graphs``, with values of this fake mode.

    Raises:
        NoArchiveError: they were not written by this version.
    """
    try:
        memory, described, constants, written = GraphReader(data, []).load()
        tensors, real = read_tensors(described, mode), [read_constant(*each) for each in constants]
        graphs = {
            name: read_graph(name, nodes, tensors, {key: real[at] for key, at in held.items()})
            for name, (held, nodes) in written.items()
        }
        fields = [field.name for field in dataclasses.fields(SplitGraphs)]
        made: dict[str, Any] = {name: graphs.get(name) for name in fields}
        return SplitGraphs(**{**made, "memory": Memory(*memory)})
    except NoArchiveError:
        raise
    except Exception as error:
        raise NoArchiveError(f"{type(error).__name__}: {error}") from error


def _text(module: fx.GraphModule) -> list[str]:
    return [
        f"{n.op} {n.target} {n.name} {n.args} {n.kwargs} {_value(n)} {n.meta.get('role')} "
        f"{n.meta.get('roles')}"
        for n in module.graph.nodes
    ]


def _value(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [
        (v.dtype, v.device, v.shape, v.stride(), v.storage_offset(), v.requires_grad)
        if isinstance(v, Tensor)
        else v
        for v in values
    ]
