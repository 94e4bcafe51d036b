"""Graphs captured as CUDA graphs and replayed: one launch instead of one for each operator.

What is captured is the source that the eager backend runs, so the kernels and the bits are those
of plain autograd; Inductor's code calls allocators and autotunes of its own, which capture would
have to be kept away from.

A replay reads and writes the same memory every time, so what it makes is copied out of there: any
number of microbatches may be pending. All calls of one module belong on one stream, or on streams
that wait for each other as they must for memory that torch's allocator hands out.

This has been tested with a stand-in for capture and has not been measured on a device. Known
costs: what crosses, what users get, and new gradients are copied in and out; so are sums.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, fx

from autosplit.errors import BackendError
from autosplit.passes.analysis.aliasing import is_free
from autosplit.passes.graph import STATE, Kind, calls, inputs, source_line
from autosplit.passes.lowering import codegen

from .backend import Boxed, Code
from .eager import Eager


class Recording(NamedTuple):
    """Captured kernels.

    Attributes:
        replay: does it again, on the memory that it was captured with.
        results: where it leaves its results.
    """

    replay: Callable[[], None]
    results: list[Any]


class _Alias(NamedTuple):
    """A result that lies in an input.

    Attributes:
        at: which input.
        like: where it lies in what was captured.
        shift: elements between the input's beginning and its own.
    """

    at: int
    like: Tensor
    shift: int

    def of(self, source: Tensor) -> Tensor:
        """The same part of the caller's tensor, whose writes are counted there."""
        size, stride = self.like.size(), self.like.stride()
        if (size, stride, self.shift) == (source.size(), source.stride(), 0):
            return source
        return source.as_strided(size, stride, source.storage_offset() + self.shift)


class CapturedGraph:
    """A captured copy of a graph, and its memory.

    Args:
        places: see below.
        layout: see below.
        copied: the first values of inputs that are copied, by position; others are read where
            they are.
        written: positions of inputs that are copied back afterwards.

    Attributes:
        places: addresses of parameters, buffers and constants that it reads.
        layout: how its inputs lie in memory.
        static: position of an input -> where it is copied to before a replay.
    """

    def __init__(
        self,
        places: tuple[int, ...],
        layout: tuple[Any, ...],
        copied: Mapping[int, Any],
        *,
        written: Sequence[int],
    ) -> None:
        self.places = places
        self.layout = layout
        self.static = {
            at: _like(source) for at, source in copied.items() if isinstance(source, Tensor)
        }
        self._fill(copied)  # operators that are given indices trap on wild ones
        self._written = written

    def hold(self, recording: Recording, given: Sequence[Any]) -> None:
        """Set the recording that was captured on the inputs ``given``."""
        self._replay, results = recording
        owners = {_address(t): at for at, t in enumerate(given) if isinstance(t, Tensor)}
        self._plan: list[Any] = []
        for result in results:
            at = None
            if isinstance(result, Tensor) and result.numel():
                at = owners.get(_address(result))
            if at is not None and given[at].dtype == result.dtype:
                shift = result.storage_offset() - given[at].storage_offset()
                result = _Alias(at, result, shift)
            self._plan.append(result)

    def run(self, sources: Sequence[Any]) -> list[Any]:
        self._fill(sources)
        self._replay()
        for at in self._written:
            sources[at].copy_(self.static[at])
        return self._hand_out(sources)

    def _fill(self, sources: Sequence[Any] | Mapping[int, Any]) -> None:
        for at, tensor in self.static.items():
            _once(tensor).copy_(_once(sources[at]))

    def _hand_out(self, sources: Sequence[Any]) -> list[Any]:
        storages: dict[int, UntypedStorage] = {}
        results = []
        for result in self._plan:
            if isinstance(result, _Alias):
                result = result.of(sources[result.at])
            elif isinstance(result, Tensor):
                key = _address(result)
                if key not in storages:
                    storages[key] = _copy(result.untyped_storage())
                result = _within(storages[key], result)
            results.append(result)
        return results


def _like(source: Tensor) -> Tensor:
    return torch.empty_strided(
        source.shape, source.stride(), dtype=source.dtype, device=source.device
    )


def _once(tensor: Tensor) -> Tensor:
    """Without repetition along expanded dimensions, which no tensor can be copied into."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(storage: UntypedStorage) -> UntypedStorage:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.clone().untyped_storage()


def _within(storage: UntypedStorage, like: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


_ADVICE = "backend='eager' runs every graph that can be split"


class CudaGraphs(Eager):
    """Captures the graphs of one module, each when it is first run."""

    device_type = "cuda"
    calls_subgraphs = False

    def compile(self, name: str, module: fx.GraphModule) -> Code:
        """Raises:
        BackendError: something of the graph is not on the device, or of no fixed size.
        """
        _check(name, module, self.device_type)
        call = super().compile(name, module).call
        if all(map(is_free, calls(module.graph))):
            return Code(call)  # launches nothing
        return Code(_Replayed(name, module, call, self))

    def record(self, function: Callable[[], list[Any]], device: torch.device) -> Recording:
        """Capture what ``function`` launches; it is called more than once.

        A memory pool of its own: in a shared one, a graph's replay would write its intermediate
        values over results that another graph left there and that are pending. ``torch.cuda.graph``
        would wait for the whole device first, and in a pipeline's step a receive may stand there
        until another rank has what this graph makes. Other threads (NCCL's, a data loader's) may
        do meanwhile what this one must not.
        """
        with torch.cuda.device(device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side), torch.random.fork_rng([torch.cuda.current_device()]):
                function()  # libraries set themselves up at a first call
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    results = function()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # says only that it was broken off
                        graph.capture_end()
                    raise
                graph.capture_end()
        return Recording(graph.replay, results)

    def stream(self, device: torch.device) -> int:
        """Which stream a replay would run on."""
        return torch.cuda.current_stream(device).cuda_stream


class _Replayed:
    """One graph and what was captured of it."""

    def __init__(self, name: str, module: fx.GraphModule, call: Boxed, backend: CudaGraphs) -> None:
        self._name = name
        self._call = call
        self._backend = backend
        self._taken = list(inputs(module.graph))
        values = codegen.constants(module).values()
        self._constants = [value for value in values if isinstance(value, Tensor)]
        self._device = next(tensor.device for _, tensor in _tensors(module))
        self._captured: list[CapturedGraph] = []
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> list[Any]:
        with self._lock, torch.no_grad():
            sources = [*args, *self._constants]
            args.clear()
            return self._fitting(sources).run(sources)

    def _fitting(self, sources: Sequence[Any]) -> CapturedGraph:
        """One that was captured for inputs like these; captured now where there is none."""
        states = [role.kind in STATE for role in self._taken] + [True] * len(self._constants)
        pairs = list(zip(sources, states, strict=True))
        places = tuple([source.data_ptr() for source, is_state in pairs if is_state])
        # Another address, and what was captured reads memory that is no parameter any more.
        self._captured = [each for each in self._captured if each.places == places]
        layout = (self._backend.stream(self._device), *map(_layout, sources))
        for captured in self._captured:
            if captured.layout == layout:
                return captured
        moved = [at for at, role in enumerate(self._taken) if role.kind not in STATE]
        sums = [at for at in moved if self._taken[at].kind is Kind.ACCUMULATOR]
        made = CapturedGraph(places, layout, {at: sources[at] for at in moved}, written=sums)
        given = [made.static.get(at, source) for at, source in enumerate(sources)]
        made.hold(self._record(given[: len(self._taken)]), given)
        self._captured.append(made)
        return made

    def _record(self, given: Sequence[Any]) -> Recording:
        def function() -> list[Any]:
            results = self._call(list(given))
            return [r.resolve_conj().resolve_neg() if isinstance(r, Tensor) else r for r in results]

        try:
            return self._backend.record(function, self._device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise BackendError(
                f"backend 'cudagraphs' cannot capture the {self._name} graph ({error}); operators "
                f"that wait for the device cannot be captured; {_ADVICE}"
            ) from error


def _check(name: str, module: fx.GraphModule, device_type: str) -> None:
    what = f"the {name} graph for backend 'cudagraphs'"
    for role, node in inputs(module.graph).items():
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise BackendError(f"{what} needs fixed sizes, and {role} varies; {_ADVICE}")
    first = None
    for where, tensor in _tensors(module):
        if tensor.device.type != device_type or tensor.device != (first or tensor.device):
            raise BackendError(
                f"{what} needs every tensor on one {device_type.upper()} device; {where} is on "
                f"{tensor.device}. Move it there before splitting; {_ADVICE}"
            )
        first = tensor.device


def _tensors(module: fx.GraphModule) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a graph, with words for where it comes from."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        role = str(node.meta.get("role", node.name))
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, Tensor):
                line = source_line(node)
                yield f"{role} ({line})" if line else role, each
    for target, value in codegen.constants(module).items():
        if isinstance(value, Tensor):
            yield f"constant {target}", value


def _layout(source: Any) -> Any:
    if isinstance(source, Tensor):
        return source.dtype, source.shape, source.stride()
    return type(source), source
