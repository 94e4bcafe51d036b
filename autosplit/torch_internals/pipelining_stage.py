"""The stage of torch.distributed.pipelining without what it computes: first its agreement with
others on shapes, before the first microbatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, _utils
from torch.distributed.pipelining import stage as stages

from autosplit.errors import PipelineError

from .pipelining_schedules import check_version, given_microbatches
from .pytree import TreeSpec, tree_flatten, tree_unflatten

# Another class where the names have moved, which is said when a stage is made.
_ForwardMeta: Any = getattr(_utils, "_StageForwardMeta", object)

# RuntimeError before torch had an error of its own for these.
_MetadataError: Any = getattr(_utils, "PipeliningMetadataError", RuntimeError)

_PATIENCE = 5.0
"""Seconds that a failing stage tries to tell its neighbours."""


class StageShapeError(PipelineError, _MetadataError):  # type: ignore[misc]
    """Tensors of a stage have other shapes or dtypes than were agreed on or given as examples; also
    what torch's own stage raises then.
    """


@dataclasses.dataclass(frozen=True)
class _StructuredMeta(_ForwardMeta):  # type: ignore[misc]
    """What torch's stages tell the next one of their outputs, and what ours add to it.

    Attributes:
        structure: how the outputs make up a result, where it is neither a tensor nor a tuple.
        others: microbatches whose outputs are of other shapes than the first one's, with theirs.
    """

    structure: TreeSpec | None = None
    others: Mapping[int, Sequence[Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Failure:
    """What a stage tells its neighbours instead of shapes."""

    text: str
    ranks: tuple[int, ...]


class NeighbourError(PipelineError):
    """Another rank's stage failed before the first microbatch."""

    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks


def _send_within(seconds: float, send: Callable[[], None]) -> None:
    """Send to a rank that may not be waiting for it, or be gone."""

    def try_to() -> None:
        with contextlib.suppress(RuntimeError):
            send()

    thread = threading.Thread(target=try_to, daemon=True)
    thread.start()
    thread.join(seconds)


class ShapeAgreement(PipelineStage):
    """Stage that agrees on shapes as torch's own does, by what its subclass traces: nothing of the
    user's runs meanwhile. Ours tell each other more: structures of results, microbatches of other
    shapes than the first one's, and failures.

    Attributes:
        agreeing: whether it agrees on shapes, or failed while it did in this step.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        check_version()
        super().__init__(submodule, stage_index, num_stages, device, group=group)
        self._result_structure: TreeSpec | None = None
        self._argument_structure: TreeSpec | None = None
        self._other_inputs: Mapping[int, Sequence[Any]] = {}
        self._other_outputs: dict[int, Sequence[Any]] = {}
        self.agreeing = False

    def clear_runtime_states(self) -> None:
        """Begin a step."""
        super().clear_runtime_states()
        self.agreeing = False

    @abstractmethod
    def trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], chunk: int
    ) -> tuple[Sequence[Tensor], TreeSpec | None]:
        """Outputs for such inputs, those of a microbatch, without memory; and how they make up the
        result where that is neither a tensor nor a tuple of tensors.
        """

    @abstractmethod
    def without_gradient(self, absent: Sequence[int]) -> Sequence[int]:
        """Places of the latest traced inputs that get no gradient where these outputs have none."""

    # Agreement on shapes, before the first microbatch.

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        outputs, self._result_structure = self.trace(self._arguments(list(args)), kwargs, 0)
        self._without_gradient(args, ())
        self._trace_other_shapes(args, kwargs)
        return tuple(outputs)

    def _trace_other_shapes(self, args: Sequence[Tensor], kwargs: dict[str, Any]) -> None:
        """Trace microbatches whose inputs are not of the first one's shapes."""
        given, keywords = given_microbatches()
        self._other_outputs = {}
        first = _shapes(args, kwargs)
        for chunk in range(1, max(len(keywords), len(given))):
            keyword = {name: _blank(value) for name, value in keywords[chunk].items()}
            if self.is_first:
                positional = [_blank(value) for value in given[chunk]]
            elif chunk in self._other_inputs:
                positional = [meta.to_tensor(self.device) for meta in self._other_inputs[chunk]]
            else:
                positional = list(args)
            if _shapes(positional, keyword) != first:
                outputs, _ = self.trace(self._arguments(positional), keyword, chunk)
                self._other_outputs[chunk] = [_utils.extract_tensor_meta(t) for t in outputs]

    def _arguments(self, tensors: list[Any]) -> tuple[Any, ...]:
        """What the module is called with where these were received."""
        if self._argument_structure is None:
            return tuple(tensors)
        value = tree_unflatten(tensors, self._argument_structure)
        return tuple(value) if type(value) in (tuple, list) else (value,)

    def input_metas(self, chunk: int) -> Sequence[Any]:
        """Shape, stride and dtype of each input of a microbatch."""
        return self._other_inputs.get(chunk, self._stage_meta.inputs or ())

    def sends_gradient(self, place: int) -> bool:
        """Whether the stage before waits for a gradient of this input."""
        metas = self._stage_meta.input_grads
        return metas is not None and metas[place] is not None

    def _compute_input_grads(
        self,
        outputs: list[Tensor],
        all_fwd_inputs: list[Tensor],
        grad_outputs: list[Tensor | None] | None = None,
    ) -> tuple[Tensor | None, ...]:
        # Torch takes those of the inputs that need one to be as these are.
        if not self.is_last and self._stage_meta.output_grads is not None:
            grads = enumerate(self._stage_meta.output_grads)
            self._without_gradient(all_fwd_inputs, [at for at, meta in grads if meta is None])
        return tuple([None] * len(all_fwd_inputs))

    def _without_gradient(self, inputs: Sequence[Tensor], absent: Sequence[int]) -> None:
        if self.is_first:
            return
        for at in self.without_gradient(absent):
            if at < len(inputs):
                inputs[at].requires_grad_(False)

    def _forward_metadata_inference(
        self, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> Any:
        self._take(args)
        with self._telling_neighbours():
            made = super()._forward_metadata_inference(args, kwargs, has_backward)
        return None if made is None else self._completed(made)

    def _take(self, meta: Any) -> None:
        """Note what one of our stages adds to what torch's tell."""
        if isinstance(meta, _StructuredMeta):
            self._argument_structure, self._other_inputs = meta.structure, meta.others

    def _completed(self, meta: Any) -> _StructuredMeta:
        return _StructuredMeta(meta.forward_metas, self._result_structure, self._other_outputs)

    def _backward_metadata_inference(
        self,
        loss_fn: Any = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # The loss would be computed of outputs that are not there; nothing here depends on it.
        blank = None if loss_fn is None else _no_loss
        with self._telling_neighbours():
            if self.is_last and target is None:
                raise PipelineError(
                    f"step() was given no target on the rank of stage {self.stage_index}, the last "
                    "one, where loss_fn(output, target) needs it: call "
                    "schedule.step(..., target=...) there"
                )
            return super()._backward_metadata_inference(blank, target, received_grad_meta, None)

    @contextlib.contextmanager
    def _telling_neighbours(self) -> Iterator[None]:
        """Have the ranks of the neighbouring stages, which wait for shapes, raise too."""
        self.agreeing = True
        try:
            yield
            self.agreeing = False
        except Exception as error:
            told = error.ranks if isinstance(error, NeighbourError) else ()
            text = str(error)
            if not told:
                text = f"stage {self.stage_index} failed: {type(error).__name__}: {text}"
            for at in (self.stage_index - 1, self.stage_index + 1):
                rank = self.stage_index_to_group_rank.get(at, self.group_rank)
                if rank != self.group_rank and rank not in told:
                    failure = _Failure(text, (self.group_rank,))
                    _send_within(_PATIENCE, partial(super()._send_meta, failure, at))
            raise

    def _recv_meta(self, src_stage: int) -> Any:
        meta = super()._recv_meta(src_stage)
        if isinstance(meta, _Failure):
            raise NeighbourError(meta.text, meta.ranks)
        self._take(meta)
        return meta

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        if isinstance(meta, _utils._StageForwardMeta):
            meta = self._completed(meta)
        super()._send_meta(meta, dst_stage)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        source = None if self.is_first else self.stage_index - 1
        for chunk in range(num_microbatches):
            self.args_recv_info[chunk] = tuple(
                stages._RecvInfo(
                    f"input {place} of stage {self.stage_index}",
                    source,
                    None,
                    meta,
                    is_root_arg=self.is_first,
                )
                for place, meta in enumerate(self.input_metas(chunk))
            )

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        grads = () if self.is_last else self._stage_meta.output_grads or ()
        for chunk in range(num_microbatches):
            like = self._other_outputs.get(chunk, grads)
            self.grad_recv_info[chunk] = tuple(
                stages._RecvInfo(
                    f"gradient of output {place} of stage {self.stage_index}",
                    self.stage_index + 1,
                    None,
                    like[place] if wanted else None,
                )
                for place, wanted in enumerate(grads)
            )


def _blank(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves, _ = tree_flatten((list(args), dict(kwargs)))
    return tuple([(t.shape, t.dtype) if _is_tensor(t) else None for t in leaves])


def _no_loss(*_: Any, **__: Any) -> Any:
    return None


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
