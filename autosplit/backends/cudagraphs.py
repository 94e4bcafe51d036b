"""Graphs captured as CUDA graphs and replayed: one launch instead of one for each operator.

What is captured is the source that the eager backend runs, so the kernels and the bits are those
of plain autograd; Inductor's code calls allocators and autotunes of its own, which capture would
have to be kept away from.

A replay reads and writes the same memory every time. So a captured copy of a graph, a *slot*, is
left alone while anything that it handed to the next graph is alive; a further microbatch gets
another slot, captured when it is first needed. There are as many as microbatches were ever
pending at once. All calls of one module belong on one stream, or on streams that wait for each
other as they must for memory that torch's allocator hands out.

This has been tested with a stand-in for capture and has not been measured on a device. Known
costs: what crosses is copied into the memory that the next graph reads; what users get, and new
gradients, are copied out; sums of gradients are copied in and out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.errors import BackendError
from autosplit.passes.analysis.aliasing import is_free
from autosplit.passes.graph import STATE, Kind, calls, inputs, outputs, source_line
from autosplit.passes.lowering import codegen

from .backend import Boxed, Code
from .cudagraph_slots import CudaGraphSlot, Recording
from .eager import Eager

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
    """One graph and its slots."""

    def __init__(self, name: str, module: fx.GraphModule, call: Boxed, backend: CudaGraphs) -> None:
        self._name = name
        self._call = call
        self._backend = backend
        self._taken = list(inputs(module.graph))
        self._returned = [role for role, _ in outputs(module.graph)]
        values = codegen.constants(module).values()
        self._constants = [value for value in values if isinstance(value, Tensor)]
        self._device = next(tensor.device for _, tensor in _tensors(module))
        self._slots: list[CudaGraphSlot] = []
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> list[Any]:
        with self._lock, torch.no_grad():
            sources = [*args, *self._constants]
            args.clear()
            return self._slot(sources).run(sources)

    def _slot(self, sources: Sequence[Any]) -> CudaGraphSlot:
        """One that nothing is alive of; captured where there is none."""
        states = [role.kind in STATE for role in self._taken] + [True] * len(self._constants)
        pairs = list(zip(sources, states, strict=True))
        places = tuple([source.data_ptr() for source, is_state in pairs if is_state])
        # Another address, and what was captured reads memory that is no parameter any more.
        self._slots = [slot for slot in self._slots if slot.places == places]
        layout = (self._backend.stream(self._device), *map(_layout, sources))
        for slot in self._slots:
            if slot.layout == layout and slot.is_free:
                return slot
        moved = [at for at, role in enumerate(self._taken) if role.kind not in STATE]
        sums = [at for at in moved if self._taken[at].kind is Kind.ACCUMULATOR]
        slot = CudaGraphSlot(places, layout, {at: sources[at] for at in moved}, written=sums)
        given = [slot.static.get(at, source) for at, source in enumerate(sources)]
        slot.hold(self._record(given[: len(self._taken)]), given, self._returned)
        self._slots.append(slot)
        return slot

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
