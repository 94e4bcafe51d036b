"""What every rank learns about a step: its losses, and the squared norms of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import REPLICATE, SHARD, RankLayout
from autosplit.mesh.exact_norm import norm_of
from autosplit.pipeline.engine.faults.first_error import Guard

from .control import Sum
from .process_groups import Groups

_ROUNDING = 1e-5
"""By how much, of itself, a loss may differ on ranks that compute it together."""


class Agreement:
    """Losses and gradient norm of a step in flight; having them means that every rank ran it.

    One small sum over all ranks carries the losses of each pipeline (on ranks without them they are
    zero; pipelines of one batch, which share its tensors, must have the same) and the digits of the
    sum of squares of the gradients, exactly: so the norm is the same bits however parameters lie on
    ranks. It is collective, and starts when this is made.

    Args:
        groups: the trainer's process groups.
        guard: the trainer's guard.
        losses: those that this rank has, by microbatch.
        count: how many microbatches there are.
        squares: this rank's ``sum_of_squares``; None where nobody asks for the norm.
        dtype: the dtype of the losses.
        batch: stands for what this rank took of the batch, where other ranks must have the same;
            fewer than 2**46 in all.

    Attributes:
        behind: what ``wait`` does besides, once every rank has run the step.
    """

    def __init__(
        self,
        groups: Groups,
        guard: Guard,
        losses: Mapping[int, Tensor],
        *,
        count: int,
        squares: Tensor | None,
        dtype: torch.dtype,
        batch: int = 0,
    ) -> None:
        self._guard = guard
        self._dtype = dtype
        layout = groups.layout
        self._losses = len(layout.pipelines) * count
        self._layout = layout
        rows = len(layout.pipelines)
        self._squares = self._losses + rows
        size = self._squares + (0 if squares is None else len(squares))
        numbers = torch.zeros(size, dtype=torch.float64, device="cpu")
        if losses:
            own = torch.stack(tuple(losses.values())).to(numbers)
            numbers[layout.own * count :][list(losses)] = own
        if squares is not None:
            numbers[self._squares :] = squares
        numbers[self._losses + layout.own] = batch
        self.behind: Callable[[], None] = lambda: None
        self._sum: Sum = groups.everybody.start_sum(numbers)

    def wait(self) -> Tensor:
        """The loss of each microbatch, shape [M], on the CPU.

        Raises:
            RankError: a rank did not get through the step.
            PipelineError: ranks that share the tensors of a stage have different losses.
        """
        with self._guard("the end of a step"):
            numbers = self._sum.wait()
            everywhere = numbers[: self._losses].view(len(self._layout.pipelines), -1)
            self._check_shared(everywhere, numbers[self._losses : self._squares].tolist())
            losses = everywhere[self._layout.own].to(self._dtype)
            self.behind()
        return losses

    def _check_shared(self, losses: Tensor, batches: list[float]) -> None:
        """Hold pipelines that share tensors against each other: what each would do by itself."""
        rows: dict[tuple[int, int], int] = {}
        precision = max(_ROUNDING, 4 * torch.finfo(self._dtype).eps)
        for row, place in enumerate(self._layout.places):
            first = rows.setdefault(place.share, row)
            if batches[first] != batches[row]:
                one, other = self._layout.pipelines[first], self._layout.pipelines[row]
                raise PipelineError(
                    f"the ranks {list(one)} and {list(other)} share the tensors of their stages "
                    "and were given different batches: give all ranks along 'tp' the same one"
                    f"{_own_shares(self._layout)}"
                )
            if not torch.allclose(
                losses[first], losses[row], rtol=precision, atol=0.0, equal_nan=True
            ):
                ends = [self._layout.pipelines[each][-1] for each in (first, row)]
                raise PipelineError(
                    f"the ranks {ends[0]} and {ends[1]} share the tensors of a stage and have the "
                    f"losses {losses[first].tolist()} and {losses[row].tolist()}, which must be "
                    "the same: give all ranks along 'tp' the same batch and the same seed (for "
                    "dropout), and let the loss be one of whole outputs, or loss_parallel()"
                )

    def norm(self) -> float:
        """The norm of the model's gradient; waits like ``wait``."""
        with self._guard("the end of a step"):
            return norm_of(self._sum.wait()[self._squares :])


def _own_shares(layout: RankLayout) -> str:
    """What other ranks than those along "tp" are to be given; empty where there are none."""
    along = {REPLICATE: layout.replicas, SHARD: layout.shards}
    several = [name for name, ranks in along.items() if ranks > 1]
    if not several:
        return ""
    count = " * ".join(f"mesh[{name!r}].size()" for name in several)
    place = f" * mesh[{SHARD!r}].size() + ".join(f"mesh.get_local_rank({n!r})" for n in several)
    return (
        f", those along {' and '.join(map(repr, several))} shares of their own, as "
        f"DistributedSampler(num_replicas={count}, rank={place}) does"
    )
