"""``StageSharding``: the part that ``fully_shard`` has in a stage of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from autosplit.torch_internals.distributed import fsdp_part

if TYPE_CHECKING:
    from autosplit.torch_internals.fsdp import ParameterGroup

    from .module import ShardedModule


class StageSharding:
    """Gathers a stage's sharded parameters where its schedule has not, and reduces its gradients.

    A schedule that knows of sharding gathers parameters (UNSHARD) ahead of a stage's first
    microbatch, and frees them (RESHARD) behind its last. Under one that does not, they are gathered
    at the first microbatch and freed when gradients are reduced.

    Args:
        module: the stage's; it may be sharded after the stage was made.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sharded: ShardedModule | None = None

    @property
    def groups(self) -> list[ParameterGroup]:
        """The parameter groups; none where nothing is sharded, or nothing was looked at yet."""
        return [] if self._sharded is None else self._sharded.groups

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Around what looks at the module before the first microbatch."""
        if self._sharded is None and fsdp_part(self._module) is not None:
            # Importing autosplit imports nothing distributed.
            from .module import ShardedModule

            self._sharded = ShardedModule(self._module)
        if self._sharded is None:
            yield
            return
        self._sharded.unshard()
        try:
            yield
        finally:
            self._sharded.reshard()

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """The module as it is captured."""
        with contextlib.nullcontext() if self._sharded is None else self._sharded.plain():
            yield

    def gather(self) -> bool:
        """Gather parameters that are not; whether there were any."""
        if self._sharded is None or self._sharded.is_unsharded:
            return False
        self._sharded.unshard()
        return True

    def free(self) -> None:
        """Free gathered parameters."""
        if self._sharded is not None:
            self._sharded.reshard()

    @property
    def adds_in_another_dtype(self) -> bool:
        """Whether microbatches' gradients add up in another dtype than that of a parameter."""
        return any(group.adds_in_another_dtype for group in self.groups)

    def accumulate(self) -> None:
        """Add a microbatch's gradients to those before it."""
        if self._sharded is not None:
            self._sharded.accumulate()

    def reduce(self) -> None:
        """Reduce what the microbatches have added up."""
        if self._sharded is not None:
            self._sharded.reduce()
            self._sharded.reshard()

    def owners(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parameters that gradients end in, for those that the module has now."""
        sharded = self._sharded
        return list(parameters) if sharded is None else [*map(sharded.owner, parameters)]
