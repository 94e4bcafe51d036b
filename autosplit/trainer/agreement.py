"""What ranks of a trainer agree on: options and meshes at first, losses and norm in each step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import RankLayout
from autosplit.pipeline.schedule.routes import Wiring
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.default_group import gather
from autosplit.ranks.first_error import Guard
from autosplit.ranks.groups import Groups
from autosplit.text.figures import few

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def difference(
    said: Mapping[K, Mapping[str, T]],
) -> tuple[str, tuple[K, T], tuple[K, T]] | None:
    """The first thing of which two ranks, or whoever it is, say different, with these and what they
    say.
    """
    first: dict[str, tuple[K, T]] = {}
    for one, own in said.items():
        for name, value in own.items():
            if first.setdefault(name, (one, value))[1] != value:
                return name, first[name], (one, value)
    return None


def check_unanimous(said: Mapping[str, Any], layout: RankLayout) -> None:
    """Hold what this rank was told against what the others were, over the default process group;
    collective. Does nothing for a trainer of one rank.

    Without it, some would clip and others not, or wait for a message that nobody sends.

    Args:
        said: by name; the same names on every rank.
        layout: by the rank's mesh; the trainer's groups are made by it.

    Raises:
        PipelineError: names the first difference and the ranks.
    """
    if len(layout.ranks) == 1:
        return
    places = f"{layout.pipelines} at the places {layout.places}"
    own = {name: _text(value) for name, value in said.items()}
    texts = gather({"what its mesh makes pipelines": places, **own})
    if (found := difference(dict(enumerate(texts)))) is not None:
        name, (one, here), (two, there) = found
        raise PipelineError(
            f"every rank must build the same trainer, but {name} is {here} on rank {one} and "
            f"{there} on rank {two}"
        )


def _text(value: object) -> str:
    if isinstance(value, Schedule):
        order = _digest(value.ranks, value.placement)
        return f"{value.name!r} (split_backward={value.split_backward}, order {order})"
    if isinstance(value, Wiring):
        return f"one of order {_digest(value)}"
    return repr(value)


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


# --- a step ---------------------------------------------------------------------------------------

_ROUNDING = 1e-5
"""By how much, of itself, a loss may differ on ranks that compute it together."""


class StepReduction:
    """Losses and gradient norm of a step in flight; having them means that every rank ran it.

    One small sum over all ranks carries the losses of each pipeline (on ranks without them they are
    zero; pipelines of one batch, which share its tensors, must have the same), of each rank the
    last stage with a gradient that is not finite, the sum of the squares of the gradients, and when
    each rank's recorded actions began and ended. It is collective, and starts when this is made.

    Args:
        groups: the trainer's process groups.
        guard: the trainer's guard.
        losses: those that this rank has, by microbatch.
        count: how many microbatches there are.
        end: the rank of each pipeline that has its losses.
        squares: the sum of this rank's; None where nobody asks for the norm.
        nonfinite: the last of this rank's stages with a gradient that is not finite, if any has.
        dtype: the dtype of the losses.
        raises: whether gradients that are not finite are an error.
        window: when this rank's first recorded action began and its last one ended, in seconds of
            ``time.perf_counter()``; zeros if nothing was recorded.
        batch: stands for what this rank took of the batch, where other ranks must have the same;
            fewer than 2**46 in all.
    """

    def __init__(
        self,
        groups: Groups,
        guard: Guard,
        losses: Mapping[int, Tensor],
        *,
        count: int,
        end: int,
        squares: Tensor | None,
        dtype: torch.dtype,
        nonfinite: int | None = None,
        raises: bool = False,
        window: tuple[float, float] = (0.0, 0.0),
        batch: int = 0,
    ) -> None:
        self._guard, self._raises = guard, raises
        self._dtype = dtype
        layout, self._end = groups.layout, end
        self._losses = len(layout.pipelines) * count
        self._layout = layout
        rows = len(layout.pipelines)
        self._stages = self._losses + rows
        self._squares = self._stages + groups.everybody.ranks
        self._windows = self._squares + (squares is not None)
        size = self._windows + 2 * groups.everybody.ranks
        numbers = torch.zeros(size, dtype=torch.float64, device="cpu")
        if losses:
            own = torch.stack(tuple(losses.values())).to(numbers)
            numbers[layout.own * count :][list(losses)] = own
        if squares is not None:
            numbers[self._squares : self._windows] = squares
        at = self._windows + 2 * groups.everybody.rank
        numbers[at : at + 2] = torch.tensor(window, dtype=torch.float64, device="cpu")
        numbers[self._losses + layout.own] = batch
        if nonfinite is not None:
            numbers[self._stages + groups.everybody.rank] = nonfinite + 1
        self._own = numbers.clone()
        self._numbers: Callable[[], Tensor] = lambda: numbers
        if groups.everybody.ranks > 1:
            self._numbers = groups.everybody.start_sum(numbers)

    def wait(self) -> Tensor:
        """The loss of each microbatch, shape [M], on the CPU.

        Raises:
            RankError: a rank did not get through the step.
            PipelineError: ranks that share the tensors of a stage have different losses; or
                gradients are not finite, and that is an error.
        """
        with self._guard("the end of a step"):
            numbers = self._numbers()
            everywhere = numbers[: self._losses].view(len(self._layout.pipelines), -1)
            if len(everywhere) > 1:
                self._check_shared(everywhere, numbers[self._losses : self._stages].tolist())
            self._refuse(numbers)
        return everywhere[self._layout.own].to(self._dtype)

    def _check_shared(self, losses: Tensor, batches: list[float]) -> None:
        """Hold pipelines that share tensors against each other: what each would do by itself."""
        rows: dict[tuple[int, ...], int] = {}
        precision = max(_ROUNDING, 4 * torch.finfo(self._dtype).eps)
        for row, place in enumerate(self._layout.places):
            first = rows.setdefault(place.share, row)
            if batches[first] != batches[row]:
                one, other = self._layout.pipelines[first], self._layout.pipelines[row]
                raise PipelineError(
                    f"the ranks {list(one)} and {list(other)} share the tensors of their stages "
                    "and were given different batches: give all ranks along 'tp' the same one, and "
                    "those along other dimensions of the mesh shares of their own"
                )
            if not torch.allclose(
                losses[first], losses[row], rtol=precision, atol=0.0, equal_nan=True
            ):
                ends = [self._layout.pipelines[each][-1] for each in (first, row)]
                raise PipelineError(
                    f"the ranks {ends[0]} and {ends[1]} share the tensors of a stage and have the "
                    f"losses {losses[first].tolist()} and {losses[row].tolist()}, which must be "
                    "the same: give all ranks along 'tp' the same batch, and let the loss be one "
                    "of whole outputs, or loss_parallel()"
                )

    def bounds(self) -> tuple[float, float]:
        """The first start and the last end of what the ranks of this pipeline recorded; zeros if
        nothing was. Waits like ``wait``.
        """
        with self._guard("the end of a step"):
            rows = self._numbers()[self._windows :].view(-1, 2).tolist()
        windows = [rows[rank] for rank in self._layout.pipeline if rows[rank] != [0.0, 0.0]]
        starts, ends = zip(*windows, strict=True) if windows else ([0.0], [0.0])
        return min(starts), max(ends)

    def norm(self) -> float:
        """The norm of the model's gradient; waits like ``wait``."""
        with self._guard("the end of a step"):
            return math.sqrt(self._numbers()[self._squares].item())

    def check_local(self) -> None:
        """Refuse gradients of this rank that are not finite, without waiting for others.

        Raises:
            PipelineError: there are some, and that is an error.
        """
        with self._guard("the end of a step"):
            self._refuse(self._own)

    @property
    def finite(self) -> bool:
        """Whether all gradients of the step are finite, on all ranks; waits like ``wait``."""
        with self._guard("the end of a step"):
            return not self._numbers()[self._stages : self._squares].any()

    def _refuse(self, numbers: Tensor) -> None:
        stages = numbers[self._stages : self._squares].tolist()
        found = sorted(((int(at) - 1, rank) for rank, at in enumerate(stages) if at), reverse=True)
        if not found or not self._raises:
            return
        told = [f"stage {stage} (rank {rank})" for stage, rank in found]
        losses = numbers[: self._losses].view(len(self._layout.pipelines), -1)
        bad = [
            f"{losses[row, microbatch].item()} for microbatch {microbatch} "
            f"(rank {self._layout.pipelines[row][self._end]})"
            for row, microbatch in (~losses.isfinite()).nonzero().tolist()
        ]
        raise PipelineError(
            f"gradients are not finite in {few(told, 4)}, and the loss is "
            f"{few(bad, 4) or 'finite for all microbatches'}. No optimizer has moved by them. "
            "RunOptions(nonfinite='skip') drops the gradients of such steps and goes on; 'ignore' "
            "lets optimizers move by them"
        )
