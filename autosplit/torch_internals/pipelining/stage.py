"""The stage of torch.distributed.pipelining without what it computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import _utils

from autosplit.errors import PipelineError
from autosplit.torch_internals.pytree import tree_flatten

from .shapes import ShapeAgreement


class RuntimeStage(ShapeAgreement):
    """Stage that torch's runtime drives: it receives and sends as torch's own does, and computes by
    the methods that its subclass has.

    Memory for what is received is taken when a receive begins, and given away to the computation.
    Tensors travel as they lie in memory, whatever their strides.
    """

    @abstractmethod
    def run_forward(
        self, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """F: the result, and its tensors as they are sent, none on the last stage."""

    @abstractmethod
    def run_loss(self, chunk: int, loss: Any) -> list[Tensor | None]:
        """Gradients of the last stage's outputs."""

    @abstractmethod
    def run_backward(
        self, chunk: int, grads: list[Tensor | None], *, whole: bool, last: bool
    ) -> tuple[Tensor | None, ...]:
        """I, or with ``whole`` B: gradients of what was received."""

    @abstractmethod
    def run_weights(self, chunk: int, *, last: bool) -> None:
        """W."""

    # Receives and sends.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_room(self._infos(self.args_recv_info, fwd_chunk_id))
        return _as_they_lie(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make_room(self._infos(self.grad_recv_info, bwd_chunk_id))
        return _as_they_lie(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = _as_they_lie(super().get_fwd_send_ops(fwd_chunk_id))
        self.fwd_cache[fwd_chunk_id] = ((), [])  # the operations hold what they send
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _as_they_lie(super().get_bwd_send_ops(bwd_chunk_id))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        tensors, _ = tree_flatten(prev_stage_outputs)
        super().set_local_fwd_input(tuple(tensors), mb_index)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # In an evaluation, torch's runtime asks all the same.
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _make_room(self, infos: Iterable[Any]) -> None:
        for info in infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = _utils._make_tensor_from_meta(info.tensor_meta, self.device)

    def _infos(self, table: Mapping[int, Sequence[Any]], chunk: int) -> Sequence[Any]:
        """What is received for a microbatch."""
        if chunk not in table:
            self._refuse(chunk)
        return table[chunk]

    def _refuse(self, chunk: int) -> NoReturn:
        raise PipelineError(
            f"stage {self.stage_index} knows no microbatch {chunk}: it has agreed on the shapes of "
            f"{len(self.args_recv_info)} with its neighbours. Let a schedule's step() or eval() "
            "drive the stage: it has the stages agree, and then calls each of them"
        )

    def _received(self, infos: Sequence[Any]) -> list[Tensor | None]:
        """What was received; nothing else holds it from now on."""
        found = [info.buffer for info in infos]
        for info in infos:
            info.buffer = None
        return found

    # Computations.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        if fwd_chunk_id not in self.args_recv_info:
            self._refuse(fwd_chunk_id)
        # What was received is held by nobody but F.
        output, sent = self.run_forward(
            fwd_chunk_id,
            args if self.is_first else self._received_arguments(fwd_chunk_id),
            kwargs or {},
        )
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
        if self.is_last or self._is_same_rank(self.stage_index + 1):
            sent = ()
        self.fwd_cache[fwd_chunk_id] = (sent, [])
        return output

    def _received_arguments(self, chunk: int) -> tuple[Any, ...]:
        infos = self._infos(self.args_recv_info, chunk)
        found = self._received(infos)
        trains = self.has_backward and torch.is_grad_enabled()
        for info, tensor in zip(infos, found, strict=True):
            if tensor is None or info.tensor_meta is None:
                raise PipelineError(
                    f"stage {self.stage_index}, microbatch {chunk}: {info.input_name} was not "
                    "received before F; the schedule must list its RECV_F first"
                )
            tensor.requires_grad_(info.tensor_meta.requires_grad and trains)
        return self._arguments(found)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        self.fwd_cache.pop(bwd_chunk_id, None)
        if self.is_last:
            grads = self.run_loss(bwd_chunk_id, loss)
        else:
            grads = self._received(self._infos(self.grad_recv_info, bwd_chunk_id))
        made = self.run_backward(bwd_chunk_id, grads, whole=full_backward, last=last_backward)
        self.bwd_cache[bwd_chunk_id] = made

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward:
            self.run_weights(bwd_chunk_id, last=last_backward)


def _as_they_lie(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    """The operations with tensors as runs of memory: transports want contiguous ones."""
    for operation in operations:
        tensor = operation.tensor
        if tensor.ndim and not tensor.is_contiguous():
            operation.tensor = tensor.as_strided((tensor.numel(),), (1,))
    return operations
