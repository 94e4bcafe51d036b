"""Modules that are split graph by graph although they could be captured in one graph."""

from __future__ import annotations

import math

from torch import nn

import autosplit
from autosplit.dynamo.partial_model import PartialModel
from autosplit.errors import CaptureError
from autosplit.module import SplitModule


def split_by_graphs(model: nn.Module) -> SplitModule:
    """Split a model graph by graph from its first call on, with any number of microbatches."""
    module = autosplit.split(model, max_pending=math.inf)
    module._fallback.split_by_graphs(CaptureError("a test asks for graphs"))
    return module


def partial_of(module: SplitModule) -> PartialModel:
    """The part of a split module that knows Dynamo's graphs."""
    partial = module._by_graphs
    assert partial is not None
    return partial
