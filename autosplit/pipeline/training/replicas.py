"""Replicas of a pipeline: equal weights, and gradients that are means over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.pipeline.engine.groups import Groups
from autosplit.torch_internals.dtensor import sharding_of
from autosplit.torch_internals.state import versions

from .reductions import Bucket, Member, buckets_of
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
        shards: parameters that are sharded, by ``id``.

    Attributes:
        reductions: make all other gradients means over the replicas.

    Raises:
        PipelineError: a stage is not alike in all replicas.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        groups: Groups,
        shards: Collection[int],
    ) -> None:
        self._modules, self._groups, self._shards = modules, groups, shards
        layout = groups.layout
        # Whoever has another share of the batch; and of those whoever has the same experts.
        self._peers = groups.of_several(layout.peers)
        self._copies = groups.of_several(layout.copies) if layout.experts else None
        check_alike(modules, groups.everybody, layout.peers, "replicas of the same stages")
        self._adopt([t for t in _tensors(modules) if id(t) not in self._shards])
        self._marks = self._buffer_marks()
        self.reductions = self._buckets()

    def equalise_buffers(self) -> None:
        """Give all replicas the buffers of the first that were written since.

        Raises:
            LostPeerError: a rank that holds a replica did not take part.
        """
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

    def _buckets(self) -> list[Bucket]:
        """Of all gradients but those of shards."""
        known = {
            id(parameter): parameter
            for module in self._modules.values()
            for parameter in module.parameters()
            if parameter.requires_grad and id(parameter) not in self._shards
        }
        members = [
            Member([each], self._copies if _is_expert(each) else self._peers)
            for each in known.values()
        ]
        return buckets_of(members, self._groups.losing, parts=self._groups.layout.shares)

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
