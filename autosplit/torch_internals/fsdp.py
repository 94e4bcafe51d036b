"""Parameter groups of ``fully_shard``: gather, free and reduce them without FSDP's hooks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from .distributed import is_fsdp_managed
from .dtensor import Sharding


def roots_of(module: nn.Module) -> list[Root]:
    """The topmost modules of ``fully_shard`` in a module, one for each FSDP state."""
    states = {id(state): state for state in map(state_of, _topmost(module))}
    return [*map(Root, states.values())]


def managed_from_outside(module: nn.Module) -> bool:
    """Whether FSDP manages parameters of a module by a module that contains it.

    True inside ``FullyShardedDataParallel``, and inside a module of ``fully_shard``.
    """
    inside = {id(part) for root in _topmost(module) for part in root.modules()}
    return any(
        is_fsdp_managed(part) and id(part) not in inside for part in module.modules()
    ) or any(root.is_inner for root in roots_of(module))


def _topmost(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _topmost(child)


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of one FSDP state; torch 2.11 has at most one."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class Root:
    """A topmost module of ``fully_shard``. Modules that one call of ``fully_shard`` got as a list
    share an FSDP state and are one root.

    Args:
        state: the FSDP state of the root.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    @property
    def is_inner(self) -> bool:
        """Whether this root has run as a submodule of another module of ``fully_shard``."""
        return self._state._is_root is False

    def make_ready(self) -> None:
        """Initialize the FSDP states of the root and its submodules, as a first forward does."""
        self._state._lazy_init()

    def finish_backward(self) -> None:
        """Wait until the gradients of the root and its submodules are reduced, as FSDP's backward
        does.
        """
        context = self._state._state_ctx
        # In torch 2.15, hooks of the backward record whether the user finishes it.
        if getattr(context, "manual_backward_finalization_active", False) is None:
            context.manual_backward_finalization_active = context.manual_backward_finalization
        self._state._root_post_backward_final_callback()


def _gathered_sharding(parameter: Any) -> Sharding:
    """The sharding that a parameter of ``parallelize_module`` keeps while it is gathered."""
    is_renamed = hasattr(parameter, "_unsharded_dtensor_spec")  # not in torch 2.11
    spec = parameter._unsharded_dtensor_spec if is_renamed else parameter._tp_spec
    meta = spec.tensor_meta
    return Sharding(spec.mesh, tuple(spec.placements), meta.shape, meta.stride)


class ParameterGroup:
    """Parameters that are gathered in one all-gather and reduced in one reduce-scatter.

    Attributes:
        name: name of the module that ``fully_shard`` was called with; of a list of modules, the
            first module's name.
    """

    def __init__(self, group: Any, name: str) -> None:
        self._group = group
        self.name = name
        self._trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        self._needed: dict[int, bool] = {}

    @classmethod
    def within(cls, module: nn.Module) -> list[ParameterGroup]:
        """All parameter groups in a module, in the order of ``modules()``."""
        states: dict[int, tuple[str, Any]] = {}
        for name, part in module.named_modules():
            if isinstance(part, FSDPModule):
                state = state_of(part)
                states.setdefault(id(state), (name or type(part).__name__, state))
        return [cls(group, name) for name, state in states.values() for group in groups_of(state)]

    @property
    def refusal(self) -> str:
        """The reason why graphs cannot use the parameters; empty if they can. The text completes
        the sentence "fully_shard was called ...".
        """
        if isinstance(self._group.offload_policy, CPUOffloadPolicy):
            return "with an offload policy, which moves parameters and gradients to the host"
        if getattr(self._group.mesh_info, "is_spmd_mesh", False):
            return "with dp_mesh_dims, where parameters are DTensors over the ranks that shard them"
        for parameter in self._group.fsdp_params:
            if parameter.is_dtensor and self._group._use_post_forward_mesh:
                return (
                    "with a number for reshard_after_forward, and has parameters of "
                    "parallelize_module, which torch does not reshard to fewer ranks"
                )
            if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
                kind = type(parameter._sharded_local_tensor).__name__
                return f"with tensors of class {kind}, which gather themselves in their own way"
        return ""

    @property
    def sharded_parameters(self) -> list[Tensor]:
        """The sharded parameters."""
        return [parameter.sharded_param for parameter in self._group.fsdp_params]

    @property
    def gathered_shardings(self) -> list[tuple[Tensor, Sharding | None]]:
        """(sharded parameter, sharding that it keeps while it is gathered) for each parameter.

        The sharding is None if this rank gathers the whole parameter. A parameter that
        ``parallelize_module`` has sharded stays sharded along the mesh dimensions of
        ``parallelize_module``.
        """
        return [
            (p.sharded_param, _gathered_sharding(p) if p.is_dtensor else None)
            for p in self._group.fsdp_params
        ]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        return sum(
            p._orig_size.numel() * (p.param_dtype or p.orig_dtype).itemsize
            for p in self._group.fsdp_params
        )

    @property
    def unreduced_bytes(self) -> int:
        """Bytes of the gradients of a step before they are reduced."""
        return sum(
            p._orig_size.numel() * (p.reduce_dtype or p.param_dtype or p.orig_dtype).itemsize
            for p in self._trained
        )

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(sharded parameter, gathered parameter that replaces it in the module) for each
        parameter.

        The gathered parameter is the same object in each step. Its memory is freed when it is
        resharded.
        """
        return [
            (parameter.sharded_param, parameter._unsharded_param) for parameter in self._gathered
        ]

    @property
    def _gathered(self) -> list[Any]:
        """FSDP's objects for the parameters that were gathered before."""
        return [p for p in self._group.fsdp_params if hasattr(p, "_unsharded_param")]

    @contextlib.contextmanager
    def with_gathered_parameters(self) -> Iterator[None]:
        """Context in which the module has the gathered parameters. Their memory may be freed.

        The first call gathers and frees the parameters once, which creates the gathered parameters.
        """
        if self.is_unsharded:
            self.share_requires_grad()
            yield
            return
        parameters = self._group.fsdp_params
        if len(self.pairs) < len(parameters):
            self.start_unshard()
            self.finish_unshard()
            self.reshard()
        for parameter in parameters:
            if parameter._unsharded_param.requires_grad != parameter.sharded_param.requires_grad:
                parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)
            parameter._setattr_on_modules(parameter._unsharded_param)
        try:
            yield
        finally:
            for parameter in parameters:
                fewer = getattr(parameter, "_sharded_post_forward_param", None)
                parameter._setattr_on_modules(parameter.sharded_param if fewer is None else fewer)

    def share_requires_grad(self) -> None:
        """Make ``requires_grad`` of gathered and sharded parameters equal.

        If the user sets ``requires_grad`` while parameters are gathered, only the gathered ones get
        the new value. The next gathering would restore the old value from the sharded ones.
        """
        for sharded, whole in self.pairs if self.is_unsharded else ():
            needed, key = whole.requires_grad, id(sharded)
            if needed != sharded.requires_grad:
                needed = not self._needed.get(key, not needed)  # the one that was set since
                sharded.requires_grad_(needed)
                whole.requires_grad_(needed)
            self._needed[key] = needed

    @property
    def writes(self) -> list[int]:
        """For each sharded parameter, a number that grows with every write into it.

        The number is the sum of two version counters, the DTensor's and its local tensor's. An
        operator that writes increments only one of the two counters.
        """
        return [
            parameter.sharded_param._version + parameter._sharded_local_tensor._version
            for parameter in self._group.fsdp_params
        ]

    @property
    def is_unsharded(self) -> bool:
        return bool(self._group.is_unsharded)

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced. Users switch it by ``set_requires_gradient_sync``."""
        return bool(self._group.reduce_grads)

    @property
    def reduces_replicas(self) -> bool:
        """Whether gradients are also reduced over replicas. Users switch it by
        ``set_requires_all_reduce``.
        """
        return bool(self._group.all_reduce_grads)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a forward frees the gathered parameters, see
        ``fully_shard(reshard_after_forward=)``.

        By default, a root keeps its gathered parameters.
        """
        return bool(self._group._reshard_after_forward)

    @property
    def reshards_after_backward(self) -> bool:
        """Whether a backward frees the gathered parameters. Users switch it by
        ``set_reshard_after_backward``.
        """
        return bool(self._group.reshard_after_backward)

    def start_unshard(self) -> None:
        """Start the all-gather of the group's parameters."""
        self._group.lazy_init()
        self._group.unshard(async_op=True)

    def finish_unshard(self) -> None:
        """Wait for the all-gather, and put the gathered parameters into the module."""
        self._group.wait_for_unshard()

    def reshard(self) -> None:
        """Free the gathered parameters, after waiting for an unfinished all-gather."""
        self.finish_unshard()
        self.share_requires_grad()
        self._group.reshard()

    def reshard_after_forward(self) -> None:
        """Reshard as FSDP does after a forward: not, fully or to fewer ranks. The argument
        ``reshard_after_forward`` of ``fully_shard`` chooses.
        """
        with self._group.use_training_state(TrainingState.FORWARD):
            self.reshard()

    def accumulate(self) -> None:
        """Add the unreduced gradients of this microbatch to those of earlier ones.

        The sums have the mixed precision policy's ``reduce_dtype``.
        """
        for parameter in self._gathered:
            if _sums_apart(parameter):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            else:
                _put_in_dtype(parameter._unsharded_param, parameter.unsharded_grad_dtype)

    def add_missing(self) -> list[bool]:
        """Add zeros as the unreduced gradients of trained parameters that have none, so that all
        ranks reduce the same parameters. A parameter counts as trained if it was when this object
        was made: another rank may have frozen it since.

        Returns:
            For each of ``sharded_parameters``, whether it had a gradient.
        """
        had_gradient = []
        for parameter in self._group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)  # None if it was never gathered
            total = None if whole is None else whole.grad
            had = total is not None or parameter.unsharded_accumulated_grad is not None
            had_gradient.append(had)
            if whole is not None and not had and parameter in self._trained:
                whole.grad = torch.zeros_like(whole)
        return had_gradient

    @property
    def converts_gradients(self) -> bool:
        """Whether ``accumulate`` converts gradients to another dtype than the parameters'."""
        return any(
            parameter.reduce_dtype not in (None, parameter._unsharded_param.dtype)
            for parameter in self._gathered
        )

    @property
    def has_unreduced(self) -> bool:
        """Whether there are accumulated gradients that are not reduced yet."""
        return bool(self._sums)

    def divide(self, divisor: int) -> None:
        """Divide the accumulated, unreduced gradients in place."""
        for total in self._sums:
            total.div_(divisor)

    @property
    def _sums(self) -> list[Tensor]:
        """The accumulated, unreduced gradients, each tensor once.

        In torch 2.15, ``unsharded_accumulated_grad`` is ``.grad`` of the gathered parameter.
        """
        both = [
            (parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad)
            for parameter in self._gathered
        ]
        return list(
            {id(total): total for pair in both for total in pair if total is not None}.values()
        )

    def start_reduce(self) -> None:
        """Start the reduce-scatter of the accumulated gradients.

        The result is added to ``.grad`` of the sharded parameters. Gathered parameters are freed if
        FSDP frees them after a backward.
        """
        self.share_requires_grad()
        with torch.no_grad():
            self._group.post_backward()

    @property
    def ranks(self) -> tuple[list[int], list[int]]:
        """(ranks that together hold the parameters' shards, ranks that hold the same shards as this
        rank).

        Both lists hold global ranks and include this rank.
        """
        info = self._group.mesh_info
        dimensions = info.shard_mesh_dim, info.replicate_mesh_dim
        coordinates = [info.mesh.get_coordinate()[d] if d is not None else 0 for d in dimensions]
        ranks = info.mesh.mesh
        if None in dimensions:
            line = [int(rank) for rank in ranks.flatten()]
            alone = [torch.distributed.get_rank()]
            return (alone, line) if dimensions[0] is None else (line, alone)
        shards = ranks.select(dimensions[1], coordinates[1])
        copies = ranks.select(dimensions[0], coordinates[0])
        return shards.tolist(), copies.tolist()

    @contextlib.contextmanager
    def communicating(
        self, shard_group: Any, replicate_group: Any, divisor: int | None
    ) -> Iterator[None]:
        """Context in which the group communicates over other process groups of the same ranks.

        Args:
            shard_group: the group for all-gather and reduce-scatter.
            replicate_group: the group for all-reduce over replicas; None if there are none.
            divisor: the number by which summed gradients are divided, unless
                ``set_gradient_divide_factor`` was called. None: the number of ranks that reduce the
                gradients.
        """
        group = self._group
        original = (
            group.mesh_info,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        if divisor is not None and group.gradient_divide_factor is None:
            group.gradient_divide_factor = float(divisor)
            # Gloo has no PREMUL_SUM. With a single rank, torch would divide twice.
            group.force_sum_reduction_for_comms = shard_group.size() > 1
        info = copy.copy(group.mesh_info)
        info.shard_process_group = shard_group
        if hasattr(info, "reduce_scatter_process_group"):  # torch 2.13
            info.reduce_scatter_process_group = shard_group
        if info.replicate_mesh_dim is not None:
            info.replicate_process_group = replicate_group
        group.mesh_info = info
        try:
            yield
        finally:
            group.mesh_info, group.gradient_divide_factor, group.force_sum_reduction_for_comms = (
                original
            )

    def forget(self, sharded: Collection[int]) -> None:
        """Drop the accumulated gradients of sharded parameters, passed as their ``id``."""
        for parameter in self._gathered:
            if id(parameter.sharded_param) in sharded:
                if _sums_apart(parameter):
                    parameter.unsharded_accumulated_grad = None
                parameter._unsharded_param.grad = None


def _sums_apart(parameter: Any) -> bool:
    """Whether torch keeps accumulated gradients of another dtype than the parameter's in the
    attribute ``unsharded_accumulated_grad``.

    From torch 2.15 on, ``.grad`` of the gathered parameter holds such gradients instead.
    """
    return hasattr(parameter, "accumulate_unsharded_grad_if_needed")


def _put_in_dtype(gathered: nn.Parameter, dtype: torch.dtype | None) -> None:
    grad = gathered.grad
    if grad is not None and dtype not in (None, grad.dtype):
        gathered.grad = None
        gathered.grad_dtype = dtype
        gathered.grad = grad.to(dtype)


def state_of(module: Any) -> Any:
    """FSDP state of a module of ``fully_shard``; None for other modules."""
    get = getattr(module, "_get_fsdp_state", None)
    return None if get is None else get()
