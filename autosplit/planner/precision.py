"""The mixed precision of ``fully_shard`` in the capture of a whole model.

A captured forward has casts such as ``x.to(weight.dtype)`` as constants. So a model whose
parameters will be gathered in ``param_dtype`` is captured with parameters of this dtype:

    fully_shard's hook       in the captured forward
    inputs to param_dtype    a cast before the model, and before each module of its own group
    output to output_dtype   a cast after the model
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.planner.meta_model import stand_in_tensors


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a whole model's parameters, inputs and outputs.

    Attributes:
        policy: the ``MixedPrecisionPolicy`` of the model and of its groups; None: the model keeps
            its own dtypes.
        groups: names of the modules that are parameter groups of their own.
    """

    policy: Any = None
    groups: tuple[str, ...] = ()

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype in which a forward reads a parameter or buffer. A scalar keeps its dtype,
        because FSDP2 shards no scalars.
        """
        dtype = getattr(self.policy, "param_dtype", None)
        is_cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.ndim
        return dtype or tensor.dtype if is_cast else tensor.dtype

    @contextlib.contextmanager
    def applied(
        self, model: nn.Module, device: torch.device, *, moved: bool = False
    ) -> Iterator[None]:
        """Let a model run for tracing inside the context as under ``fully_shard``, with stand-ins
        for parameters of other dtypes and for tensors on the meta device.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(stand_in_tensors(model, device, self.dtype_of, moved=moved))
            for handle in self._hooks(model) if self.policy is not None else ():
                stack.callback(handle.remove)
            yield

    def _hooks(self, model: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        # This imports much of torch.distributed.
        from autosplit.torch_internals.fsdp_view import cast_hook

        if self.policy.param_dtype is not None and self.policy.cast_forward_inputs:
            cast = cast_hook(self.policy.param_dtype, output=False)
            for module in (model, *map(model.get_submodule, self.groups)):
                yield module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
        if self.policy.output_dtype is not None:
            yield model.register_forward_hook(cast_hook(self.policy.output_dtype, output=True))


OWN_DTYPES = MixedPrecision()
"""All dtypes are the model's own."""
