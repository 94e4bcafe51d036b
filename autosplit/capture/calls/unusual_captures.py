"""Captures that depend on more than the key of their call and Dynamo's guards tell."""

from __future__ import annotations

from typing import Any

from torch._dynamo.source import CallMethodItemSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from autosplit.capture.cache.argument_text import NoFingerprintError

_ANY = ValueRanges.unknown_int()


def refuse_unusual(output: Any, open_sizes: bool) -> None:
    """Refuse a capture under settings that are in no key, or for sizes that nobody left open.

    Args:
        output: Dynamo's ``GraphCaptureOutput``.
        open_sizes: whether sizes were to be left open.

    Raises:
        NoFingerprintError: it is such a capture.
    """
    if output.aotautograd_guards or output.torch_function_mode_stack or output.functorch_layers:
        raise NoFingerprintError("it was captured under modes, or with inputs that overlap")
    if output.dual_level != -1 or output.export or output.export_constraints:
        raise NoFingerprintError("it was captured under forward-mode differentiation")
    if not open_sizes and output.shape_env is not None and not _assumes_nothing(output.shape_env):
        raise NoFingerprintError("sizes are symbols")


def _assumes_nothing(shapes: ShapeEnv) -> bool:
    """Whether all its symbols stand for the values of tensors of one integer, which may be any:
    those in which batch normalisation counts batches.
    """
    if shapes.guards or shapes.replacements or shapes.divisible or shapes.deferred_runtime_asserts:
        return False
    sources = (shapes.var_to_sources.get(symbol, ()) for symbol in shapes.var_to_range)
    values = (each and isinstance(each[0], CallMethodItemSource) for each in sources)
    return all(values) and all(each == _ANY for each in shapes.var_to_range.values())
