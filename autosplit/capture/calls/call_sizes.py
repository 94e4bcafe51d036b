"""``CallSizes``: sizes that a kept call leaves open, and all that its graph assumes of them.

Another process gives the same sizes symbols of an environment of its own, assumes the same of them,
and has Dynamo's guards check it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import TensorProperty, TensorPropertySource
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from autosplit.capture.cache.argument_text import NoFingerprintError
from autosplit.capture.cache.size_symbols import Assumptions, SizeSymbols

from .call_errors import OtherwiseError

_PROPERTIES = {each.name: each for each in TensorProperty}

Place = tuple[int, str, int | None]
"""Row of a tensor's source, and which of its sizes, strides or offset."""


_Integers: TypeAlias = "tuple[int | None, ...]"
KnownLayout: TypeAlias = tuple[int, _Integers, _Integers]
"""Row of an input's source, its sizes and strides; None for those that are left open."""


class CallSizes(NamedTuple):
    """What is assumed of a call's sizes.

    Attributes:
        places: of each symbol, in their order, where it is found first.
        tensors: row of the source of an input, its dtype, sizes, strides and offset.
        assumptions: all of Dynamo's, AOTAutograd's and the passes'.
    """

    places: tuple[Place, ...]
    tensors: tuple[tuple[int, str, tuple[Any, ...], tuple[Any, ...], Any], ...]
    assumptions: tuple[Any, ...]

    @classmethod
    def of(cls, env: Any, symbols: SizeSymbols, row: Callable[[Source], int]) -> CallSizes:
        """What is assumed in an environment now.

        Args:
            env: of shapes.
            symbols: in it.
            row: of a source.

        Raises:
            NoFingerprintError: it has no form on disk.
        """
        if repr(env.settings) != repr(ShapeEnv().settings):
            raise NoFingerprintError(f"sizes are symbols by other rules, {env.settings}")
        tensors = []
        for each in env.tracked_fakes or ():
            if not isinstance(each.fake, Tensor):
                if not symbols.leaves_any(each.fake):
                    raise NoFingerprintError("numbers besides sizes are left open")
            elif any(map(_is_open, _layout(each.fake))):
                tensors.append((row(each.source), *_written(each.fake, symbols)))
        places = tuple(_place(env.var_to_sources[each][0], row) for each in symbols.order)
        return cls(places, tuple(tensors), tuple(symbols.assumed(everything=True)))

    def environment(
        self, sources: Sequence[Source], value: Callable[[Source], Any]
    ) -> tuple[FakeTensorMode, SizeSymbols]:
        """An environment in which the same is assumed of the sizes of this process's call.

        Args:
            sources: by their rows.
            value: finds the value at a source.

        Raises:
            OtherwiseError: it does not hold of them.
        """
        env: Any = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        made = [self._symbol(env, place, sources, value) for place in self.places]
        symbols, assumptions = SizeSymbols(mode, made), Assumptions(*self.assumptions)
        if not symbols.satisfy(assumptions):
            raise OtherwiseError("sizes on which the graph was decided")
        env.tracked_fakes = [
            types.SimpleNamespace(
                fake=_fake(mode, dtype, *map(symbols.sizes, (shape, stride, (offset,)))),
                source=sources[row],
                symbolic_context=None,
            )
            for row, dtype, shape, stride, offset in self.tensors
        ]
        if not symbols.assume(assumptions):
            raise OtherwiseError("what follows from the sizes on which the graph was decided")
        return mode, symbols

    @staticmethod
    def _symbol(
        env: Any, place: Place, sources: Sequence[Source], value: Callable[[Source], Any]
    ) -> sympy.Symbol:
        row, name, at = place
        tensor, kind = value(sources[row]), _PROPERTIES[name]
        read: Callable[..., int] = getattr(tensor, kind.method_name())
        size = read() if at is None else read(at)
        source = TensorPropertySource(sources[row], kind, at)
        symbol = env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
        if not isinstance(symbol, sympy.Symbol):
            raise OtherwiseError(f"{source.name}, which is {size}")
        return symbol


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return *tensor.shape, *tensor.stride(), tensor.storage_offset()


def _is_open(size: Any) -> bool:
    return type(size) is not int


def _written(tensor: Tensor, symbols: SizeSymbols) -> tuple[Any, ...]:
    if type(tensor) is not FakeTensor:
        raise NoFingerprintError(f"an input with open sizes is a {type(tensor).__name__}")
    offset = symbols.write_size(tensor.storage_offset())
    shape, stride = (tuple(map(symbols.write_size, x)) for x in (tensor.shape, tensor.stride()))
    return str(tensor.dtype).removeprefix("torch."), shape, stride, offset


def _fake(
    mode: FakeTensorMode, dtype: str, shape: list[Any], stride: list[Any], offset: list[Any]
) -> FakeTensor:
    kind: torch.dtype = getattr(torch, dtype)
    with torch.no_grad(), mode.shape_env.suppress_guards():  # type: ignore[union-attr]
        blank = torch.empty_strided(shape, stride, dtype=kind, device="meta")
        blank = blank.as_strided(shape, stride, offset[0])
        return FakeTensor(mode, blank, torch.device("cpu"))


def _place(source: Any, row: Callable[[Source], int]) -> Place:
    if not isinstance(source, TensorPropertySource):
        raise NoFingerprintError(f"{source.name} is left open, which is no size of a tensor")
    return row(source.base), source.prop.name, source.idx


def known_layouts(
    output: Any, row: Callable[[Source], int], open_sizes: bool
) -> tuple[KnownLayout, ...]:
    """Sizes and strides of all inputs, as far as they are known now.

    Args:
        output: Dynamo's ``OutputGraph``.
        row: of a source.
        open_sizes: whether some may be left open.

    Raises:
        NoFingerprintError: some are, and may not be.
    """
    found = output.input_source_to_sizes_strides.items()
    return tuple(
        (row(source), _known(each["size"], open_sizes), _known(each["stride"], open_sizes))
        for source, each in found
    )


def _known(sizes: Any, open_sizes: bool) -> _Integers:
    found = tuple(each if type(each) is int else each.node.maybe_as_int() for each in sizes)
    if None in found and not open_sizes:
        raise NoFingerprintError("sizes are symbols")
    return found
