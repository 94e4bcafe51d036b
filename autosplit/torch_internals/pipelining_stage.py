"""Base class of a stage for torch.distributed.pipelining. The base class receives and sends; a
subclass computes.

torch's own shape inference differs between versions 2.11 to 2.15, and is not used here. Stages
agree on shapes by messages of autosplit, and receive and send tensors of the agreed shapes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, _utils, schedules

from autosplit.errors import PipelineError

from .pytree import TreeSpec, tree_flatten, tree_unflatten

_COMPILE_CHECK = getattr(
    getattr(schedules, "_check_torch_compile_compatibility", None), "__code__", None
)
# Older versions of torch raise RuntimeError for metadata.
_MetadataError: Any = getattr(_utils, "PipeliningMetadataError", RuntimeError)


class StageShapeError(PipelineError, _MetadataError):  # type: ignore[misc]
    """Raised when a stage's tensors have other shapes or dtypes than the stages agreed on, or than
    the examples.

    It derives from the error that torch's own stage raises for wrong shapes.
    """


@dataclasses.dataclass(frozen=True)
class StridedTensorMeta:
    """Metadata of a tensor that crosses between stages, on which both stages agree.

    Attributes:
        shape: its shape.
        stride: its strides, in elements.
        dtype: its dtype.
        requires_grad: whether the tensor's gradient is sent back.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> StridedTensorMeta:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclasses.dataclass(frozen=True)
class StageShapes:
    """The shapes on which a stage and its neighbours have agreed.

    Attributes:
        inputs: for each microbatch, metadata of the tensors from the previous stage; empty for the
            first stage.
        structure: pytree structure that the received tensors have as the module's only argument;
            None if each received tensor is an argument.
        results: for each microbatch, metadata of the stage's results.
        gradients: for each microbatch, metadata of each output's gradient; None if the next stage
            sends none.
        wanted: for each input, whether the previous stage receives the input's gradient.
    """

    inputs: Sequence[Sequence[StridedTensorMeta]] = ()
    structure: TreeSpec | None = None
    results: Sequence[Any] = ()
    gradients: Sequence[Sequence[StridedTensorMeta | None]] = ()
    wanted: Sequence[bool] = ()

    def arguments(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the module, from the received tensors."""
        if self.structure is None:
            return tuple(tensors)
        value = tree_unflatten(tensors, self.structure)
        return tuple(value) if type(value) in (tuple, list) else (value,)


class RuntimeStage(PipelineStage):
    """A stage for torch's runtime that receives and sends as torch's own stage does.

    A receive allocates its memory when it starts, and passes it to the computation. Tensors of any
    strides are sent in their memory order.

    Attributes:
        agree: a function that makes all stages of the rank agree on shapes with their neighbours,
            unless the known shapes are valid for the step. It is called before the first
            microbatch. All neighbouring ranks call it in the same step.
        shapes: shapes of the tensors to receive and send.
        agreement: the exchange in which the shapes were agreed on; None before the first exchange.
        ranks: the process group of the pipeline.
    """

    agree: Callable[[], None]
    agreement: object
    ranks: dist.ProcessGroup
    # Values in place of torch's properties, which each action reads several times.
    has_backward = False
    is_first = cached_property(lambda stage: stage.stage_index == 0)
    is_last = cached_property(lambda stage: stage.stage_index == stage.num_stages - 1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (meta := getattr(self, "_user_meta", None)) is not None:
            # With shapes, even none, torch infers no shapes: ``agree`` finds them. Inference is
            # an error in a dry run with a "fake" process group since torch 2.14.
            meta.inputs, meta.outputs = (), ()
        self.shapes, self.agreement = StageShapes(), None
        self.ranks = self.group or dist.group.WORLD  # type: ignore[assignment]
        self.fwd_cache: dict[int, tuple[Tensor, ...]] = {}  # type: ignore[assignment]
        self._inputs: dict[int, Sequence[Tensor | None]] = {}
        self._gradients: dict[int, Sequence[Tensor | None]] = {}

    @property
    def submod(self) -> nn.Module:
        """The stage's module as it was passed. Before a step begins, a parallelised module may
        replace it.

        Raises:
            PipelineError: in the setter, if the value is no module.
        """
        # torch's zero-bubble schedules refuse modules of torch.compile, because torch's own stage
        # cannot split their backward.
        is_checked = sys._getframe(1).f_code is _COMPILE_CHECK
        return None if is_checked else self._submodule  # type: ignore[return-value]

    @submod.setter
    def submod(self, module: nn.Module) -> None:
        self.replace_module(module)
        self._submodule = module

    def replace_module(self, module: nn.Module) -> None:
        """Prepare the stage for another module."""
        raise NotImplementedError

    # --- start of a step

    def clear_runtime_states(self) -> None:
        """Clear the tensors of the last step."""
        for tensors in (self.fwd_cache, self.bwd_cache, self._inputs, self._gradients):
            tensors.clear()
        self.output_chunks.clear()

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        self.args_recv_info = {0: ()}  # schedules search it for connections that skip stages
        self.agree()

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        self.agree()

    def _pre_metadata_inference_backup(self) -> None:
        """Do nothing in place of torch's backup: agreeing on shapes does not run the module."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing in place of torch's cleanup: nothing was backed up."""

    def register_forward_context(self, *_: Any) -> Any:
        """Refuse a context manager around each forward of the module, an option of torch from 2.15
        on.

        Raises:
            PipelineError: always.
        """
        raise PipelineError(
            f"stage {self.stage_index} does not support a forward context: the stage runs "
            "captured graphs, in which the module's Python code cannot read the context. Pass the "
            "values as arguments of the forward, or use torch's PipelineStage"
        )

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch 2.11 includes the stages of this rank, but Gloo cannot send to the own rank.
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.peer != dist.get_rank()]

    # --- receives and sends

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        metas = self._shapes_of(self.shapes.inputs, fwd_chunk_id)
        return self._receive(self._inputs, fwd_chunk_id, metas, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        metas = self._shapes_of(self.shapes.gradients, bwd_chunk_id)
        return self._receive(self._gradients, bwd_chunk_id, metas, self.stage_index + 1)

    def keep_for_send(self, chunk: int, tensors: tuple[Tensor, ...]) -> None:
        """Keep a microbatch's results until they are sent. Does nothing if this rank has the next
        stage, to which torch's runtime passes the results.
        """
        if self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
            self.fwd_cache[chunk] = tensors

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        # From here on, only the operations refer to the tensors.
        return self._send(self.fwd_cache.pop(fwd_chunk_id, ()), self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        return self._send(self.bwd_cache.pop(bwd_chunk_id), self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        is_tensor = isinstance(prev_stage_outputs, Tensor)  # flattening one takes ten times as long
        tensors = [prev_stage_outputs] if is_tensor else tree_flatten(prev_stage_outputs)[0]
        self._inputs[mb_index] = [tensor.detach() for tensor in tensors]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # torch's runtime calls this in an evaluation too.
        return self.bwd_cache.pop(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            self._gradients[mb_index] = next_stage_bwd_outputs

    def _receive(
        self,
        buffers: dict[int, Sequence[Tensor | None]],
        chunk: int,
        metas: Sequence[StridedTensorMeta | None],
        source: int,
    ) -> list[dist.P2POp]:
        room = [None if meta is None else meta.empty(self.device) for meta in metas]
        buffers[chunk] = room
        return self._operations(dist.irecv, room, source, (source, self.stage_index))

    def _send(self, tensors: Sequence[Tensor | None], target: int) -> list[dist.P2POp]:
        return self._operations(dist.isend, tensors, target, (self.stage_index, target))

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups over which this stage sends and receives."""
        # From torch 2.15 on, each pair of ranks may have its own groups.
        return [self.ranks, *getattr(self, "_p2p_edge_groups", {}).values()]

    def _operations(
        self, call: Any, tensors: Sequence[Tensor | None], peer: int, edge: tuple[int, int]
    ) -> list[dist.P2POp]:
        present = [tensor for tensor in tensors if tensor is not None]
        if not present:
            return []
        group = self._get_p2p_group(*edge) if hasattr(self, "_get_p2p_group") else self.group
        rank = dist.get_global_rank(self.ranks, self.stage_index_to_group_rank[peer])
        return [dist.P2POp(call, _in_memory_order(tensor), rank, group) for tensor in present]

    # --- received tensors, which only the computation refers to from then on

    def arguments(self, chunk: int, first_stage_arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a microbatch.

        Args:
            chunk: the microbatch.
            first_stage_arguments: the arguments that the first stage gets from the batch. Other
                stages get received tensors instead.
        """
        metas = self._shapes_of(self.shapes.inputs, chunk)
        if self.is_first:
            return first_stage_arguments
        tensors = self._received(self._inputs, chunk, "input")
        trains = self.has_backward and torch.is_grad_enabled()
        for meta, tensor in zip(metas, tensors, strict=True):
            if tensor is not None:
                tensor.requires_grad_(meta.requires_grad and trains)
        return self.shapes.arguments(tensors)

    def received_gradients(self, chunk: int) -> list[Tensor | None]:
        """The received gradients of the outputs for a microbatch."""
        self._shapes_of(self.shapes.gradients, chunk)
        return [*self._received(self._gradients, chunk, "gradient")]

    def _received(
        self, buffers: dict[int, Sequence[Tensor | None]], chunk: int, kind: str
    ) -> Sequence[Tensor | None]:
        if chunk not in buffers:
            raise PipelineError(
                f"stage {self.stage_index}, microbatch {chunk}: the schedule computes before it "
                f"receives the {kind}; list the receive before the computation"
            )
        return buffers.pop(chunk)

    def _shapes_of(self, table: Sequence[Any], chunk: int) -> Any:
        if not 0 <= chunk < len(table):
            raise PipelineError(
                f"stage {self.stage_index} has no microbatch {chunk}: it has agreed with its "
                f"neighbours on the shapes of {len(table)} microbatches. Run the stage by a "
                "schedule's step() or eval(), which agrees on shapes before it calls the stages"
            )
        return table[chunk]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A flat, contiguous view of a dense tensor's memory. Sends and receives require contiguous
    tensors.
    """
    if not tensor.ndim or tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))
