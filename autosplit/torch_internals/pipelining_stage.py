"""The stage of torch.distributed.pipelining without what it computes: what schedules call on it.

Torch 2.11 to 2.15 find out shapes in different ways, and keep what they found in different state.
None of that is used: stages agree on shapes by messages of autosplit's own, and receive and send by
what they have agreed on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, _utils

from autosplit.errors import PipelineError

from .pytree import TreeSpec, tree_flatten, tree_unflatten

# RuntimeError before torch had an error of its own for these.
_MetadataError: Any = getattr(_utils, "PipeliningMetadataError", RuntimeError)


class StageShapeError(PipelineError, _MetadataError):  # type: ignore[misc]
    """Tensors of a stage have other shapes or dtypes than were agreed on or given as examples; also
    what torch's own stage raises then.
    """


@dataclasses.dataclass(frozen=True)
class StridedTensorMeta:
    """What stages agree on about a tensor that crosses between them: how it lies in memory, and
    whether a gradient comes back for it.
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
    """What a stage and its neighbours have agreed on.

    Attributes:
        inputs: per microbatch, what comes from the stage before; nothing for the first stage.
        structure: how that makes up the argument, where it is not the arguments themselves.
        results: per microbatch, what the stage returns.
        gradients: per microbatch, what comes back for each output; None where nothing does.
        wanted: for each input, whether the stage before waits for its gradient.
    """

    inputs: Sequence[Sequence[StridedTensorMeta]] = ()
    structure: TreeSpec | None = None
    results: Sequence[Any] = ()
    gradients: Sequence[Sequence[StridedTensorMeta | None]] = ()
    wanted: Sequence[bool] = ()

    def arguments(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """What the module is called with where these came."""
        if self.structure is None:
            return tuple(tensors)
        value = tree_unflatten(tensors, self.structure)
        return tuple(value) if type(value) in (tuple, list) else (value,)


class RuntimeStage(PipelineStage):
    """Stage that torch's runtime drives: it receives and sends as torch's own does. Its subclass
    computes.

    Memory for what is received is taken when a receive begins, and given away to the computation.
    Tensors travel as they lie in memory, whatever their strides.

    Attributes:
        agree: has all stages of the rank agree with the others, where that is due in this step;
            called before the first microbatch, when the ranks next to this one are in the step.
        shapes: what is received and sent.
        agreement: the exchange in which that was agreed on; None before the first.
        ranks: the process group of the pipeline.
    """

    agree: Callable[[], None]
    agreement: object
    ranks: dist.ProcessGroup

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shapes, self.agreement = StageShapes(), None
        self.ranks = self.group or dist.group.WORLD  # type: ignore[assignment]
        self.fwd_cache: dict[int, tuple[Tensor, ...]] = {}  # type: ignore[assignment]
        self._inputs: dict[int, Sequence[Tensor | None]] = {}
        self._gradients: dict[int, Sequence[Tensor | None]] = {}

    # The beginning of a step.

    def clear_runtime_states(self) -> None:
        """Begin a step."""
        for tensors in (self.fwd_cache, self.bwd_cache, self._inputs, self._gradients):
            tensors.clear()
        self.output_chunks.clear()

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        self.args_recv_info = {0: ()}  # schedules look for stages that skip others in it
        self.agree()

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        self.agree()

    def _pre_metadata_inference_backup(self) -> None:
        """Nothing: no module runs before the first microbatch."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing, as before."""

    def register_forward_context(self, *_: Any) -> Any:
        """From torch 2.15 on, a context around each forward of the module.

        Raises:
            PipelineError: always.
        """
        raise PipelineError(
            f"stage {self.stage_index} takes no forward context: it runs graphs, in which the "
            "module's Python code and what it would find in a context are not. Give forwards what "
            "they need as arguments, or keep torch's PipelineStage"
        )

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # A stage of this rank is among them (torch 2.11), which Gloo does not send to.
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.peer != dist.get_rank()]

    # Receives and sends.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        metas = self._shapes_of(self.shapes.inputs, fwd_chunk_id)
        return self._receive(self._inputs, fwd_chunk_id, metas, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        metas = self._shapes_of(self.shapes.gradients, bwd_chunk_id)
        return self._receive(self._gradients, bwd_chunk_id, metas, self.stage_index + 1)

    def keep_for_send(self, chunk: int, tensors: tuple[Tensor, ...]) -> None:
        """Keep what is to be sent: to a stage of this rank torch's runtime hands results itself."""
        if self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
            self.fwd_cache[chunk] = tensors

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        # From here on the operations hold what they send.
        return self._send(self.fwd_cache.pop(fwd_chunk_id, ()), self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        return self._send(self.bwd_cache.pop(bwd_chunk_id), self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        tensors, _ = tree_flatten(prev_stage_outputs)
        self._inputs[mb_index] = [tensor.detach() for tensor in tensors]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # In an evaluation, torch's runtime asks all the same.
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
        """Those that messages go over."""
        # From torch 2.15 on, each pair of ranks may have groups of its own.
        return [self.ranks, *getattr(self, "_p2p_edge_groups", {}).values()]

    def _operations(
        self, call: Any, tensors: Sequence[Tensor | None], peer: int, edge: tuple[int, int]
    ) -> list[dist.P2POp]:
        present = [tensor for tensor in tensors if tensor is not None]
        if not present:
            return []
        group = self._get_p2p_group(*edge) if hasattr(self, "_get_p2p_group") else self.group
        rank = dist.get_global_rank(self.ranks, self.stage_index_to_group_rank[peer])
        return [dist.P2POp(call, _as_it_lies(tensor), rank, group) for tensor in present]

    # What has come for a computation, which alone holds it from then on.

    def arguments(self, chunk: int, first_stage_arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Those of a microbatch; ``given`` are the first stage's."""
        metas = self._shapes_of(self.shapes.inputs, chunk)
        if self.is_first:
            return first_stage_arguments
        tensors = self._received(self._inputs, chunk, "input")
        trains = self.has_backward and torch.is_grad_enabled()
        for meta, tensor in zip(metas, tensors, strict=True):
            if tensor is not None:
                tensor.requires_grad_(meta.requires_grad and trains)
        return self.shapes.arguments(tensors)

    def gradients(self, chunk: int) -> list[Tensor | None]:
        """Those of the outputs for a microbatch."""
        self._shapes_of(self.shapes.gradients, chunk)
        return [*self._received(self._gradients, chunk, "gradient")]

    def _received(
        self, buffers: dict[int, Sequence[Tensor | None]], chunk: int, kind: str
    ) -> Sequence[Tensor | None]:
        if chunk not in buffers:
            raise PipelineError(
                f"stage {self.stage_index}, microbatch {chunk}: no {kind} was received before it "
                "is computed with; the schedule must list the receive first"
            )
        return buffers.pop(chunk)

    def _shapes_of(self, table: Sequence[Any], chunk: int) -> Any:
        if not 0 <= chunk < len(table):
            raise PipelineError(
                f"stage {self.stage_index} knows no microbatch {chunk}: it has agreed on the "
                f"shapes of {len(table)} with its neighbours. Let a schedule's step() or eval() "
                "drive the stage: it has the stages agree, and then calls each of them"
            )
        return table[chunk]


def _as_it_lies(tensor: Tensor) -> Tensor:
    """A tensor as a run of memory: transports want contiguous ones."""
    if not tensor.ndim or tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))
