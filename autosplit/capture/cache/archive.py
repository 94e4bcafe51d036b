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

from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.passes import SplitGraphs
from autosplit.passes.memory_policy import Memory

from .archive_names import NoArchiveError
from .constant_data import read_constant
from .graph_reader import GraphReader, read_graph, read_tensors
from .graph_writer import GraphWriter

__all__ = ["NoArchiveError", "pack_graphs", "unpack_graphs"]


def pack_graphs(graphs: SplitGraphs) -> bytes:
    """The graphs as bytes, from which ``unpack_graphs`` makes the same graphs: the writer refuses
    whatever the reader would not read, or read as something else.

    Raises:
        NoArchiveError: they hold something that has no such form.
    """
    writer = GraphWriter()
    memory = dataclasses.astuple(graphs.memory)
    written = {name: writer.graph(module) for name, module in graphs.graphs().items()}
    if not writer.tensors:
        raise NoArchiveError("no tensor is in them")
    return pickle.dumps((memory, writer.tensors, writer.constants, written))


def unpack_graphs(data: bytes, mode: FakeTensorMode) -> SplitGraphs:
    """Split graphs from the bytes of ``pack_graphs``, with values of this fake mode.

    Raises:
        NoArchiveError: they were not written by this version.
    """
    try:
        memory, described, constants, written = GraphReader(data).load()
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
