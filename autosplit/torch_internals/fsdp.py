"""Parameter groups of ``fully_shard``, what FSDP does to each of them, and its modules as plain
ones while a graph of them is captured or looked up.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.utils import _apply_to_tensors

from .distributed import is_fsdp_managed
from .dtensor import Sharding


def roots_of(module: nn.Module) -> list[Root]:
    """The topmost modules that ``fully_shard`` was called with; several may have one state."""
    states = {id(state): state for state in map(_state_of, _topmost(module))}
    return [*map(Root, states.values())]


def managed_from_outside(module: nn.Module) -> bool:
    """Whether FSDP manages parameters of a module by what is around it, or is none of the module's
    own: ``FullyShardedDataParallel``, or ``fully_shard`` of a module that this one is a part of.
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
    """The parameter groups of one state; torch 2.11 has at most one."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class Root:
    """A topmost module of ``fully_shard``, or several with one state.

    Args:
        state: what FSDP keeps of it.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    @property
    def is_inner(self) -> bool:
        """Whether it has run as a part of another."""
        return self._state._is_root is False

    def make_ready(self) -> None:
        """Have FSDP find out, as in a first forward, that this is a root, what is below it, and
        what a root does not reshard.
        """
        self._state._lazy_init()

    def finish_backward(self) -> None:
        """Wait for the reductions below it, as FSDP does at the end of a backward."""
        context = self._state._state_ctx
        # torch 2.15 notes in the backward's hooks whether its user is to finish it.
        if getattr(context, "manual_backward_finalization_active", False) is None:
            context.manual_backward_finalization_active = context.manual_backward_finalization
        self._state._root_post_backward_final_callback()


def _sharding(spec: Any) -> Sharding:
    """That of a DTensor's spec, as torch 2.11 to 2.15 have them."""
    meta = spec.tensor_meta
    return Sharding(spec.mesh, tuple(spec.placements), meta.shape, meta.stride)


class ParameterGroup:
    """Parameters that are gathered in one all-gather and reduced in one reduce-scatter.

    Attributes:
        name: the module that ``fully_shard`` was called with, the first of several.
    """

    def __init__(self, group: Any, name: str) -> None:
        self._group = group
        self.name = name
        self._needed: dict[int, bool] = {}

    @classmethod
    def within(cls, module: nn.Module) -> list[ParameterGroup]:
        """All of a module, in the order of ``modules()``."""
        states: dict[int, tuple[str, Any]] = {}
        for name, part in module.named_modules():
            if isinstance(part, FSDPModule):
                state = _state_of(part)
                states.setdefault(id(state), (name or type(part).__name__, state))
        return [cls(group, name) for name, state in states.values() for group in groups_of(state)]

    @property
    def refusal(self) -> str:
        """Why its parameters cannot be those of a graph; empty where they can."""
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
    def parameters(self) -> list[Tensor]:
        """The sharded parameters."""
        return [parameter.sharded_param for parameter in self._group.fsdp_params]

    @property
    def gathered_shardings(self) -> list[tuple[Tensor, Sharding | None]]:
        """Each sharded parameter, and how it lies over ranks when it is gathered: None where this
        rank has the whole then, and not a part along other dimensions (``parallelize_module``).
        """
        return [
            (parameter.sharded_param, _sharding(_gathered_spec(parameter)))
            if parameter.is_dtensor
            else (parameter.sharded_param, None)
            for parameter in self._group.fsdp_params
        ]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each sharded parameter, and the one that stands in the module while it is gathered: the
        same object each time, whose memory is freed in between.
        """
        return [
            (parameter.sharded_param, parameter._unsharded_param)
            for parameter in self._group.fsdp_params
            if hasattr(parameter, "_unsharded_param")
        ]

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Have the module hold the gathered parameters inside, without their memory if need be.

        The first time parameters are gathered and freed for that, to be made.
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
        """Make ``requires_grad`` of gathered and sharded parameters equal. Whoever sets it while
        parameters are gathered sets that of the gathered ones, and FSDP would put back that of the
        sharded ones the next time it gathers them.
        """
        for sharded, whole in self.pairs if self.is_unsharded else ():
            needed, key = whole.requires_grad, id(sharded)
            if needed != sharded.requires_grad:
                needed = not self._needed.get(key, not needed)  # whichever was set since
                sharded.requires_grad_(needed)
                whole.requires_grad_(needed)
            self._needed[key] = needed

    @property
    def writes(self) -> list[int]:
        """How often each sharded parameter was written: operators on a DTensor are counted there,
        those on this rank's part of it on that.
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
        """Whether gradients are to be reduced (``set_requires_gradient_sync``)."""
        return bool(self._group.reduce_grads)

    @property
    def reduces_copies(self) -> bool:
        """Whether they are reduced over copies of the shards, too (``set_requires_all_reduce``)."""
        return bool(self._group.all_reduce_grads)

    @property
    def frees(self) -> bool:
        """Whether a forward frees it (``reshard_after_forward``); roots by default do not."""
        return bool(self._group._reshard_after_forward)

    @property
    def reshards_after_backward(self) -> bool:
        """What ``set_reshard_after_backward`` has set."""
        return bool(self._group.reshard_after_backward)

    def start_unshard(self) -> None:
        """Have the all-gather under way."""
        self._group.lazy_init()
        self._group.unshard(async_op=True)

    def finish_unshard(self) -> None:
        """Wait for it; the module has the gathered parameters from now on."""
        self._group.wait_for_unshard()

    def reshard(self) -> None:
        """Free the gathered parameters."""
        self.share_requires_grad()
        self._group.reshard()

    def reshard_after_forward(self) -> None:
        """As ``reshard_after_forward`` says: not, wholly, or to a smaller mesh."""
        with self._group.use_training_state(TrainingState.FORWARD):
            self.reshard()

    def accumulate(self) -> None:
        """Add this microbatch's unreduced gradients to those before it, in the policy's
        ``reduce_dtype``.
        """
        for parameter in self._group.fsdp_params:
            if not hasattr(parameter, "_unsharded_param"):
                continue
            if _sums_apart(parameter):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            else:
                _put_in_dtype(parameter._unsharded_param, parameter.unsharded_grad_dtype)

    @property
    def adds_in_another_dtype(self) -> bool:
        """Whether ``accumulate`` puts gradients of the parameters' dtype into another."""
        return any(
            parameter.reduce_dtype not in (None, parameter._unsharded_param.dtype)
            for parameter in self._group.fsdp_params
            if hasattr(parameter, "_unsharded_param")
        )

    @property
    def unreduced(self) -> bool:
        """Whether gradients were accumulated that are not reduced yet."""
        return bool(self._sums)

    def divide(self, divisor: int) -> None:
        """Divide what was accumulated."""
        for total in self._sums:
            total.div_(divisor)

    @property
    def _sums(self) -> list[Tensor]:
        """What was accumulated, each tensor once: torch 2.15 has one under both names."""
        gathered = [
            parameter
            for parameter in self._group.fsdp_params
            if hasattr(parameter, "_unsharded_param")
        ]
        both = [
            (parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad)
            for parameter in gathered
        ]
        return list(
            {id(total): total for pair in both for total in pair if total is not None}.values()
        )

    def start_reduce(self) -> None:
        """Reduce what was accumulated: one reduce-scatter, whose result is added to ``.grad`` of
        the sharded parameters; and free the gathered ones, where FSDP does after a backward.
        """
        self.share_requires_grad()
        with torch.no_grad():
            self._group.post_backward()

    @property
    def ranks(self) -> tuple[list[int], list[int]]:
        """The ranks that hold shards of its parameters, and those that hold the same ones as this
        rank.
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
    def communicating(self, sharing: Any, copying: Any, parts: int | None = None) -> Iterator[None]:
        """Communicate over other process groups of the same ranks inside.

        Args:
            sharing: for parameters and for gradients.
            copying: for gradients of ranks that hold the same shards; None where none do.
            parts: by what to divide sums of gradients, where ``set_gradient_divide_factor`` has not
                said; None: by how many ranks reduce them.
        """
        group = self._group
        original = (
            group.mesh_info,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        if parts is not None and group.gradient_divide_factor is None:
            group.gradient_divide_factor = float(parts)
            # Gloo knows no sum that is multiplied before; alone, torch would divide twice.
            group.force_sum_reduction_for_comms = sharing.size() > 1
        info = copy.copy(group.mesh_info)
        info.shard_process_group = sharing
        if hasattr(info, "reduce_scatter_process_group"):  # torch 2.13
            info.reduce_scatter_process_group = sharing
        if info.replicate_mesh_dim is not None:
            info.replicate_process_group = copying
        group.mesh_info = info
        try:
            yield
        finally:
            group.mesh_info, group.gradient_divide_factor, group.force_sum_reduction_for_comms = (
                original
            )

    def forget(self, sharded: int) -> None:
        """Drop what was accumulated for one of the sharded parameters (its ``id``)."""
        for parameter in self._group.fsdp_params:
            if id(parameter.sharded_param) == sharded and hasattr(parameter, "_unsharded_param"):
                if _sums_apart(parameter):
                    parameter.unsharded_accumulated_grad = None
                parameter._unsharded_param.grad = None


def _gathered_spec(parameter: Any) -> Any:
    """How a gathered parameter lies over the ranks of other dimensions; torch 2.11's name of it."""
    is_renamed = hasattr(parameter, "_unsharded_dtensor_spec")
    return parameter._unsharded_dtensor_spec if is_renamed else parameter._tp_spec


def _sums_apart(parameter: Any) -> bool:
    """Whether sums of another dtype lie beside ``.grad`` of the gathered parameter; from torch 2.15
    on they are in it.
    """
    return hasattr(parameter, "accumulate_unsharded_grad_if_needed")


def _put_in_dtype(gathered: nn.Parameter, dtype: torch.dtype | None) -> None:
    grad = gathered.grad
    if grad is not None and dtype not in (None, grad.dtype):
        gathered.grad = None
        gathered.grad_dtype = dtype
        gathered.grad = grad.to(dtype)


_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def _cast(dtype: torch.dtype, *, output: bool) -> Callable[..., Any]:
    """A hook that casts a forward's inputs, positional and by keyword, or its output."""

    def to(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def cast(module: nn.Module, *values: Any) -> Any:
        return _apply_to_tensors(to, values[-1] if output else values)

    return cast


class PlainView:
    """Takes from one module what ``fully_shard`` has put on it, and gives it back: its class, its
    hooks and its marks for Dynamo, which makes guards of a managed module's attributes too few.
    What the mixed precision policy casts is cast by hooks that can be traced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sharded: dict[str, Any] = {}
        self._class: Any = None
        self._plain: dict[str, OrderedDict[int, Any]] = {name: OrderedDict() for name in _HOOKS}
        self._seen: dict[str, list[Any]] = {}
        state = _state_of(module)
        self._casts: dict[str, Any] = dict.fromkeys(_HOOKS)
        self._ids: frozenset[int] = frozenset()
        if state is not None:
            self._ids = frozenset(_handle_ids(state))
            policy = state._mp_policy
            if policy.cast_forward_inputs and policy.param_dtype:
                self._casts["_forward_pre_hooks"] = _cast(policy.param_dtype, output=False)
            if policy.output_dtype is not None:
                self._casts["_forward_hooks"] = _cast(policy.output_dtype, output=True)

    def enter(self) -> None:
        attributes = self._module.__dict__
        self._sharded = {name: attributes.pop(name) for name in _MARKS if name in attributes}
        if self._ids:
            self._class = type(self._module)
            self._module.__class__ = self._class.__bases__[1]
            for name in _HOOKS:
                self._sharded[name] = attributes[name]
                attributes[name] = self._without(name, attributes[name])

    def leave(self) -> None:
        self._module.__dict__.update(self._sharded)
        if self._class is not None:
            self._module.__class__ = self._class
        self._sharded, self._class = {}, None

    def _without(self, name: str, hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
        """The hooks, FSDP's replaced; the same dictionary as before, as guards may hold it."""
        plain, items = self._plain[name], list(hooks.items())
        if self._seen.get(name) != items:
            self._seen[name] = items
            plain.clear()
            for key, hook in items:
                if key not in self._ids:
                    plain[key] = hook
                elif self._casts[name] is not None:
                    plain[key] = self._casts[name]
        return plain


def is_managed(module: nn.Module) -> bool:
    """Whether ``fully_shard`` has left anything on this module."""
    return _MARKS[0] in module.__dict__ or _state_of(module) is not None


def _state_of(module: Any) -> Any:
    """What ``fully_shard`` keeps of one of its modules; None of others."""
    get = getattr(module, "_get_fsdp_state", None)
    return None if get is None else get()


def _handle_ids(state: Any) -> list[int]:
    """Numbers of the hooks on forwards; one object may stand for many, and twice for the same."""
    ids = []
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        ids += [part.id for part in getattr(handle, "handles", (handle,))]
    return ids
