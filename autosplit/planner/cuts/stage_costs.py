"""What the stages of many different cuts cost, all computed at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from autosplit.planner.costs.block_costs import ModelCosts

_FIELDS = (
    "forward",
    "backward_input",
    "backward_weight",
    "saved",
    "deferred",
    "parameters",
    "backward_alone",
)


@dataclass(frozen=True)
class StageCosts:
    """The stages of K ways to cut a model into S stages, float64.

    Attributes:
        times: seconds of F, I and W, shape [3, S, K].
        kept: bytes saved and deferred of one microbatch, shape [2, S, K].
        parameters: bytes, shape [S, K].
        crossing: bytes over each cut, shape [S - 1, K].
        returning: bytes of the gradients that come back over it, shape [S - 1, K].
    """

    times: Tensor
    kept: Tensor
    parameters: Tensor
    crossing: Tensor
    returning: Tensor

    def of(self, ways: Tensor) -> StageCosts:
        """The stages of some of the ways, by their places."""
        return StageCosts(*(getattr(self, each.name)[..., ways] for each in fields(self)))


class PrefixSums:
    """Sums over the blocks of a model, so that any run of blocks is a difference of two.

    Args:
        costs: of the model.
    """

    def __init__(self, costs: ModelCosts) -> None:
        self.blocks = len(costs.blocks)
        rows = [[getattr(block, field) for block in costs.blocks] for field in _FIELDS]
        self._pieces = torch.tensor(rows, dtype=torch.float64)
        zero = torch.zeros(len(_FIELDS), 1, dtype=torch.float64)
        self._sums = torch.cat([zero, self._pieces.cumsum(1)], 1)
        self._call = costs.call
        # Nothing crosses the end of the model.
        self._crossing = torch.tensor((*costs.crossing, 0.0), dtype=torch.float64)
        self._returning = torch.tensor((*costs.gradients, 0.0), dtype=torch.float64)
        self._tables: dict[bool, tuple[Tensor, Tensor, Tensor]] = {}

    def stages(self, cuts: Tensor) -> StageCosts:
        """The stages of each way to cut.

        Args:
            cuts: per way, increasing: k cuts behind block k. Shape [K, S - 1], int64.
        """
        ends = torch.zeros(cuts.shape[1] + 2, cuts.shape[0], dtype=torch.int64)
        ends[1:-1] = cuts.T + 1
        ends[-1] = self.blocks
        sums = self._sums[:, ends]
        pieces = (sums[:, 1:] - sums[:, :-1]).clamp_(min=0.0)  # rounding may go below
        times, kept = pieces[:3] + self._call, pieces[3:5]
        self._as_first(times[:, 0], kept[:, 0], pieces[6, 0], self._returning[ends[1] - 1])
        crossing, returning = self._crossing[cuts.T], self._returning[cuts.T]
        return StageCosts(times, kept, pieces[5], crossing, returning)

    def before(self, *, split: bool) -> tuple[Tensor, Tensor]:
        """Seconds that the blocks before each place take at least in a forward, and in a backward
        as far as another waits for it, whatever stages they are in; shape [B + 1] each.

        Args:
            split: whether the backward is; then nobody waits for its Ws.
        """
        forward, backward = self._pieces[0], self._pieces[1]
        if not split:
            backward = backward + self._pieces[2]
        sums = torch.stack([forward, torch.minimum(backward, self._pieces[6])]).cumsum(1)
        ahead, behind = torch.cat([torch.zeros(2, 1, dtype=torch.float64), sums], 1)
        return ahead, behind

    def least_work(self, stages: int) -> float:
        """Seconds of a microbatch on all stages together, at least."""
        forward, inputs, weights, *_, alone = self._pieces
        work = float((forward + torch.minimum(inputs + weights, alone)).sum())
        return work + (3 * stages - 1) * self._call

    def table(self, *, first: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Every run of blocks as a stage: times [3, B + 1, B + 1], kept [2, B + 1, B + 1] and
        parameters [B + 1, B + 1], by where it begins and where it ends; empty runs are NaN.

        Args:
            first: as the first stage of a pipeline, which computes no input gradient.
        """
        if first not in self._tables:  # asked for stage by stage, by every schedule
            self._tables[first] = self._table(first=first)
        return self._tables[first]

    def _table(self, *, first: bool) -> tuple[Tensor, Tensor, Tensor]:
        pieces = (self._sums[:, None, :] - self._sums[:, :, None]).clamp_(min=0.0)
        places = torch.arange(self.blocks + 1)
        pieces[:, places[:, None] >= places] = torch.nan
        times, kept = pieces[:3] + self._call, pieces[3:5]
        if first:
            behind = torch.cat([self._returning[-1:], self._returning])
            self._as_first(times, kept, pieces[6], behind)
        return times, kept, pieces[5]

    def _as_first(self, times: Tensor, kept: Tensor, alone: Tensor, behind: Tensor) -> None:
        """Turn stages into first ones, in place: their W is the whole backward, ``alone``, and
        waits with all that F saved and with the gradient of what they put out, ``behind``.
        """
        times[1] = 0.0
        times[2] = alone + self._call
        kept[1] = kept[0] + behind
