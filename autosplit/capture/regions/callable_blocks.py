"""Which captured blocks another graph can call; the others are captured with their model."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.errors import CaptureError
from autosplit.passes import Kind
from autosplit.passes.analysis.aliasing import storage_root
from autosplit.passes.graph import inputs, outputs

from .region import Region

SWITCH = "AUTOSPLIT_REGIONS"


def are_captured() -> bool:
    """Whether blocks are captured by themselves; ``AUTOSPLIT_REGIONS=0`` turns that off."""
    return os.environ.get(SWITCH) != "0"


def refuse_what_cannot_be_called(region: Region) -> None:
    """Check that F, I and W of a block can be operators of other graphs.

    Raises:
        CaptureError: it depends on more than Dynamo's guards tell, writes into inputs or in its
            backward, hands on or returns what it was given, takes or returns what is no tensor.
    """
    capture, graphs = region.capture, region.graphs
    if not capture.guards.only_dynamos:
        raise CaptureError("it reads constants or sets attributes")
    if capture.shardings:
        raise CaptureError("it works on DTensors")
    written = [role for role, _ in outputs(graphs.joint.graph, Kind.UPDATE, Kind.WRITE)]
    for role in written:
        if role.kind is Kind.WRITE or role.name in capture.inputs:
            raise CaptureError(f"it writes into {role.name}")
    if not _is_plain(capture.output_spec):
        raise CaptureError("it returns an object that is no tuple or list")
    crossing = [*inputs(graphs.joint.graph).values(), *region.returned.values()]
    crossing += [value for part in region.parts.values() for value in _results(part.module)]
    if not all(isinstance(node.meta["val"], Tensor) for node in crossing):
        raise CaptureError("numbers that depend on data go in or out")
    if _are_copied(list(region.returned.values())):
        raise CaptureError("it returns what it was given, or a view of it")


def _are_copied(values: list[fx.Node]) -> bool:
    """Whether tracing made copies of what a block returns, as that lies in the memory of an input
    or of another result: around the block, that would not be known.
    """
    sources = [
        storage_root(value.args[0])  # type: ignore[arg-type]
        for value in values
        if value.target is torch.ops.aten.clone.default
    ]
    return len({*sources}) < len(sources) or any(each.op == "placeholder" for each in sources)


def _results(module: fx.GraphModule) -> list[fx.Node]:
    return [value for _, value in outputs(module.graph) if isinstance(value, fx.Node)]


def _is_plain(spec: Any) -> bool:
    """Whether results are made up as Dynamo takes them from an operator."""
    return spec.is_leaf() or (spec.type in (tuple, list) and all(map(_is_plain, spec.children())))
