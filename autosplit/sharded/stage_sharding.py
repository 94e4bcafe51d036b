"""``StageSharding``: the part that ``fully_shard`` has in a stage of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from autosplit.torch_internals.distributed import fsdp_part

if TYPE_CHECKING:
    from autosplit.torch_internals.fsdp import ParameterGroup

    from .gathering import Gathering
    from .module import ShardedModule


class StageSharding:
    """Gathers a stage's sharded parameters where its schedule has not, and reduces its gradients.

    A schedule that knows of sharding gathers parameters (UNSHARD) ahead of a stage's first
    microbatch, and frees them (RESHARD) behind its last. Under one that does not, graphs gather
    those that are to be freed after a forward, block by block (ZeRO-3); the others are gathered
    at the first microbatch and freed when gradients are reduced (ZeRO-2).

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

    @property
    def gathering(self) -> Gathering | None:
        """Gathers parameters for the stage's graphs, where any are sharded."""
        return None if self._sharded is None else self._sharded.gathering

    def look(self) -> None:
        """Find out whether the module is sharded, before anything is traced."""
        if self._sharded is None and fsdp_part(self._module) is not None:
            # Importing autosplit imports nothing distributed.
            from .module import ShardedModule

            self._sharded = ShardedModule(self._module)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """The module as it is captured."""
        with contextlib.nullcontext() if self._sharded is None else self._sharded.plain():
            yield

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """The module holds the parameters that graphs read, with or without their memory."""
        with contextlib.nullcontext() if self._sharded is None else self._sharded.standing_in():
            yield

    def gather(self) -> bool:
        """Gather parameters that a forward leaves gathered; whether any were not."""
        return self._sharded is not None and self._sharded.unshard(left_by_forward=True)

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
