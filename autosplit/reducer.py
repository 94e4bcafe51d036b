"""torch.distributed around a model and its split module: when a reducer may see gradients.

A forward outside ``no_sync()`` arms the reducer: the next gradient that arrives at every
parameter is averaged over the ranks, once. With weight gradients deferred, those of earlier
microbatches are still to come then, so all that is pending must arrive as one sum.
"""

from __future__ import annotations

import threading
import weakref

from torch import nn

from .compat import data_parallel, fsdp_part
from .errors import ShardedError, SplitError


def refuse_sharded(module: nn.Module) -> None:
    """FSDP reduces and frees weight gradients in ``backward()``; later ones would be left over
    for the next step.

    Raises:
        ShardedError: FSDP manages the module or a part of it.
    """
    found = fsdp_part(module)
    if found is not None:
        name, kind = found
        where = f"{name} ({kind})" if name else kind
        raise ShardedError(
            f"FSDP (fully_shard or FullyShardedDataParallel) manages {where}: it reduces weight "
            "gradients in backward(), where those of a split model are not there yet. Build the "
            "model without FSDP, and wrap the split module in DistributedDataParallel; where no "
            "rank has room for the whole model, cut it with autosplit.partition or PipelineTrainer"
        )


class Ticket:
    """A forward that armed the reducer, until its backward has run."""


class ReducerWatch:
    """Follows whether a reducer waits for gradients. Without DistributedDataParallel it says no.

    A ticket lives with the graph of its forward, so a forward that is never followed by a
    backward is forgotten with its output.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed = False
        self._out: weakref.WeakSet[Ticket] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[ReducerWatch], tuple[()]]:
        """A copy of what is watched has seen no forward."""
        return ReducerWatch, ()

    def forward(self) -> Ticket | None:
        """Note a forward; returns a ticket where it arms a reducer.

        Raises:
            SplitError: the reducer looks for parameters where a split module has none.
        """
        wrapper = data_parallel()
        if wrapper is None:
            return None
        for option in ("find_unused_parameters", "static_graph"):
            if getattr(wrapper, option, False):
                raise SplitError(
                    f"DistributedDataParallel({option}=True) looks for parameters in the graph "
                    "of the outputs, where those of a split module are not, because their "
                    f"gradients come from backward_weight(); use {option}=False"
                )
        if not wrapper.require_backward_grad_sync:
            return None
        ticket = Ticket()
        with self._lock:
            self._armed = True
            self._out.add(ticket)
        return ticket

    def backward(self, ticket: Ticket | None) -> None:
        """Note the backward of a forward."""
        if ticket is not None:
            with self._lock:
                self._out.discard(ticket)

    def delivers_together(self, taken: int, pending: int) -> bool:
        """Whether ``taken`` of ``pending`` microbatches must arrive as one sum, now that they
        are about to be delivered.

        Raises:
            SplitError: part of what the reducer must get would be missing.
        """
        with self._lock:
            if not self._armed:
                return False
            if self._out:
                raise SplitError(
                    "backward_weight() after a forward of DistributedDataParallel outside "
                    "no_sync() whose backward() has not run: the reducer would average the "
                    "gradients without it. Call backward() first"
                )
            if taken != pending:
                raise SplitError(
                    f"backward_weight(microbatches={taken}) of {pending} pending, after a forward "
                    "of DistributedDataParallel outside no_sync(): the reducer averages once, so "
                    "everything pending must come together; leave out microbatches"
                )
            self._armed = False
            return True
