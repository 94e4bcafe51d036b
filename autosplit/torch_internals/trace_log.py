"""torch's structured log of compilations (``TORCH_TRACE=folder``), which tlparse shows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx
from torch._logging._internal import trace_structured


def trace_graphs(prefix: str, graphs: Mapping[str, fx.GraphModule]) -> None:
    """Log graphs as readable code; nothing is written out where nobody traces.

    Args:
        prefix: of their names, as in ``"autosplit_"``.
        graphs: by name.
    """
    for name, graph in graphs.items():

        def metadata(name: str = name) -> dict[str, str]:
            return {"name": f"{prefix}{name}", "encoding": "string"}

        def payload(graph: fx.GraphModule = graph) -> str:
            return graph.print_readable(print_output=False)

        trace_structured("artifact", metadata_fn=metadata, payload_fn=payload)
