"""Replicas of a pipeline: equal weights, and gradients that are means over them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.mesh.reduction import CAP, GradientReduction, ReductionQueue
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.results import Member, buckets_of
from autosplit.pipeline.engine.timing import measure_sum
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.reductions import Reductions, last_weights_by_stage
from autosplit.pipeline.simulation.timeline import Span
from autosplit.torch_internals.dtensor import local_tensor, sharding_of
from autosplit.torch_internals.state import versions

from .sharded_stages import ShardedStages
from .stage_copies import adopt, buffers_of, check_alike, is_expert

_OTHERS = "the replicas of its stages"


class ModelReplicas:
    """What this rank's stages have to do with those of other replicas of the pipeline.

    All start with the parameters and buffers of the first replica, and optimizers get the mean of
    the gradients. Buffers that a forward writes become those of the first replica behind it, as
    under DistributedDataParallel. Creating one is collective over all ranks, where there are
    several pipelines.

    Args:
        modules: this rank's stages by index.
        groups: the trainer's process groups.
        settled: waits until the device has done what it was given.
        is_shared: whether a parameter's gradient is summed with others of the pipeline before.
        sharded: the stages that are sharded, where any are: what reduces their gradients is among
            the reductions here.

    Raises:
        PipelineError: a stage is not alike in all replicas.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        groups: Groups,
        settled: Callable[[], None],
        is_shared: Callable[[nn.Parameter], bool],
        sharded: ShardedStages | None,
    ) -> None:
        self._modules = modules
        self._groups = groups
        self._settled = settled
        self._is_shared = is_shared
        self._sharded = sharded
        self._shards = frozenset(() if sharded is None else sharded.parameters)
        layout = groups.layout
        # Whoever has another share of the batch; and of those whoever has the same experts.
        self._peers = groups.of_several(layout.peers)
        self._copies = groups.of_several(layout.copies) if layout.experts else None
        self._queues: dict[tuple[int, ...], tuple[ReductionQueue, list[GradientReduction]]] = {}
        self._queue: ReductionQueue | None = None
        self._reductions: list[GradientReduction] = []
        self._marks: dict[tuple[int, str], tuple[int, int]] = {}
        self._bytes: dict[int, int] = {}
        if self._peers is not None:
            check_alike(modules, groups.everybody, layout.peers, "replicas of the same stages")
            self._adopt([t for t in _tensors(modules) if id(t) not in self._shards])
            self._marks = self._buffer_marks()
            for part in groups.gather(
                {at: self._reduced_bytes(each) for at, each in modules.items()}
            ):
                self._bytes |= part

    @property
    def reduces_early(self) -> bool:
        """Whether reductions may begin while other gradients are computed."""
        return self._sharded is None or self._sharded.reduces_early

    @contextlib.contextmanager
    def averaging(self, completions: Sequence[int], *, timed: bool) -> Iterator[None]:
        """Make the gradients that come inside means over the replicas, one reduction a bucket.

        Args:
            completions: in which order stages are said to be complete; the same in all replicas.
            timed: whether ``spans`` is asked for.

        Raises:
            LostPeerError: a rank that holds a replica did not take part.
        """
        key = tuple(completions)
        if key not in self._queues:
            self._queues[key] = self._make_queue(key)
        self._queue, self._reductions = self._queues[key]
        for each in self._reductions:
            each.timed, each.times = timed, None
        with self._queue.reducing():
            yield

    def ready(self, stage: int) -> None:
        """Start the reductions that wait for a stage's gradients and for none before them."""
        if self._queue is not None and self._queue.open:
            self._queue.ready(stage)

    def reducing_early(self, schedule: Schedule) -> Schedule:
        """The schedule, whose last Ws come stage by stage where replicas reduce gradients."""
        if not self._bytes:
            return schedule
        return replace(schedule, ranks=last_weights_by_stage(schedule.ranks, self._bytes))

    def measured(self) -> Reductions | None:
        """What replicas reduce, and how long their links take for it; collective over all ranks.
        None with one pipeline.
        """
        if self._peers is None:
            return None
        device = next(iter(_tensors(self._modules)), torch.empty(0)).device
        link = measure_sum(self._groups, device, self._peers)
        return Reductions([self._bytes[at] for at in sorted(self._bytes)], link, CAP)

    def _reduced_bytes(self, module: nn.Module) -> int:
        """Of the gradients that others have a share of."""
        alone = self._copies is None
        reduced = (
            p
            for p in module.parameters()
            if p.requires_grad and not (alone and id(p) not in self._shards and _is_expert(p))
        )
        return sum(
            local_tensor(p).numel() * (getattr(p, "grad_dtype", None) or p.dtype).itemsize
            for p in reduced
        )

    @property
    def spans(self) -> list[Span]:
        """When the last reductions ran, where that was noted."""
        rank = self._groups.rank
        return [
            Span(rank, Action(each.stage or 0, ActionKind.REDUCE_GRAD, 0), *each.times)
            for each in self._reductions
            if each.times is not None
        ]

    def equalise_buffers(self) -> None:
        """Give all replicas the buffers of the first that were written since.

        Raises:
            LostPeerError: a rank that holds a replica did not take part.
        """
        if self._peers is None:
            return
        marks = self._buffer_marks()
        if not marks:
            return
        buffers = buffers_of(self._modules)
        # A forward may write where another replica's does not.
        written = torch.tensor(
            [self._marks.get(at) != mark for at, mark in marks.items()],
            dtype=torch.int32,
            device=next(iter(buffers.values())).device,
        )
        with self._groups.losing(_OTHERS):
            dist.all_reduce(written, dist.ReduceOp.MAX, group=self._peers)
        flags = written.tolist()
        found = [buffer for buffer, flag in zip(buffers.values(), flags, strict=True) if flag]
        self._adopt(found)
        self._marks = self._buffer_marks() if found else marks

    def _make_queue(
        self, completions: Sequence[int]
    ) -> tuple[ReductionQueue, list[GradientReduction]]:
        """Reductions of all gradients, in the order in which they are complete."""
        # A parameter of several stages waits for the last of them.
        last = {id(p): stage for stage in completions for p in self._modules[stage].parameters()}
        known: dict[int, tuple[int, nn.Parameter]] = {}
        for stage, module in self._modules.items():
            for parameter in module.parameters():
                if parameter.requires_grad and id(parameter) not in self._shards:
                    known.setdefault(id(parameter), (stage, parameter))
        # Those that wait for the end of the step have buckets of their own.
        waiting: dict[int | None, list[Member]] = defaultdict(list)
        for stage, parameter in known.values():
            link = self._copies if _is_expert(parameter) else self._peers
            end = None if self._is_shared(parameter) else last.get(id(parameter))
            waiting[end].append(Member([parameter], 0, link, stage))
        losing, shares = self._groups.losing, self._groups.layout.shares
        found: list[tuple[GradientReduction, set[int]]] = [
            (bucket, set() if end is None else {end})
            for end, members in waiting.items()
            for bucket in buckets_of(members, losing, parts=shares, cap=CAP)
        ]
        for reduction in () if self._sharded is None else self._sharded.reductions():
            made = reduction.parameters
            found.append((reduction, {last[at] for at in made} if made <= last.keys() else set()))
        place = {stage: at for at, stage in enumerate(completions)}
        found.sort(key=lambda each: max((place[it] for it in each[1]), default=len(place)))
        return ReductionQueue(found, self._settled), [reduction for reduction, _ in found]

    def _buffer_marks(self) -> dict[tuple[int, str], tuple[int, int]]:
        buffers = buffers_of(self._modules)
        marks = versions(buffers.values())
        return {
            at: (id(each), mark) for (at, each), mark in zip(buffers.items(), marks, strict=True)
        }

    def _adopt(self, tensors: Sequence[Tensor]) -> None:
        """Take over the values of the first replica, of experts the first that has the same."""
        layout, own = self._groups.layout, self._groups.everybody.rank
        for sets, link, experts in (
            (layout.peers, self._peers, False),
            (layout.copies, self._copies, True),
        ):
            source = next(ranks[0] for ranks in sets if own in ranks)
            found = [tensor for tensor in tensors if _is_expert(tensor) is experts]
            adopt(found, source, link, self._groups, _OTHERS)


def _is_expert(tensor: Tensor) -> bool:
    return is_expert(sharding_of(tensor))


def _tensors(modules: Mapping[int, nn.Module]) -> list[Tensor]:
    """Parameters and buffers, each once."""
    found = {
        id(tensor): tensor
        for module in modules.values()
        for tensor in (*module.parameters(), *module.buffers())
    }
    return list(found.values())
