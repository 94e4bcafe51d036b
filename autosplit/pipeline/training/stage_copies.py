"""Ranks that hold the same stages, or parts of these: built alike, and with the same values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError, ShardedError
from autosplit.mesh.dimensions import EXPERT, TENSOR
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.pipeline.engine.control import Control
from autosplit.pipeline.engine.groups import Groups
from autosplit.torch_internals.dtensor import (
    Sharding,
    local_tensor,
    sharding_of,
)
from autosplit.torch_internals.state import versions

from .reductions import Member, buckets_of

Modules = Mapping[int, nn.Module]
"""A rank's stages by index."""


def check_alike(
    modules: Modules, control: Control, sets: Iterable[Sequence[int]], what: str
) -> None:
    """Hold names, shapes, dtypes and shardings of this rank's tensors against those of others, for
    the stages that both hold; collective.

    Args:
        modules: this rank's.
        control: over the ranks.
        sets: of ranks that must have them alike, as they are numbered there.
        what: what these ranks hold.

    Raises:
        PipelineError: names two ranks and a tensor of each.
    """
    own = {
        stage: [f"stage {stage}'s {name}: {form_of(tensor)}" for name, tensor in _named(module)]
        for stage, module in modules.items()
    }
    everywhere = control.gather(own)
    for first, *others in sets:
        for other in others:
            for stage in sorted(everywhere[first].keys() & everywhere[other].keys()):
                expected, came = everywhere[first][stage], everywhere[other][stage]
                if came != expected:
                    here = next((each for each in came if each not in expected), "nothing more")
                    there = next((each for each in expected if each not in came), "nothing more")
                    one, two = control.members[first], control.members[other]
                    raise PipelineError(
                        f"the ranks {one} and {two} hold {what}, which must "
                        f"be built alike: rank {one} has {there}, rank {two} has {here}"
                    )


@torch.no_grad()
def adopt(
    tensors: Iterable[Tensor],
    source: int,
    link: dist.ProcessGroup | None,
    groups: Groups,
    others: str,
) -> None:
    """Take over the values of a rank, on all ranks that a link connects.

    Args:
        tensors: alike on all of them; of DTensors, what this rank has.
        source: whose, as the default process group numbers it.
        link: connects them; None does nothing.
        groups: the trainer's process groups.
        others: what the ranks are called in errors.

    Raises:
        LostPeerError: one of them did not take part.
    """
    for tensor in map(local_tensor, tensors) if link is not None else ():
        if tensor.numel():
            values = tensor.detach().clone(memory_format=torch.contiguous_format)
            with groups.losing(others):
                # As bytes, for not every backend knows every dtype.
                dist.broadcast(values.view(-1).view(torch.uint8), src=source, group=link)
            tensor.copy_(values)


def form_of(tensor: Tensor) -> str:
    """What must be the same on all ranks that hold a tensor."""
    trains = ", trained" if tensor.requires_grad else ""
    lies = sharding_of(tensor)
    over = "" if lies is None else f" over {lies}"
    return f"{TensorMeta.of(tensor)}{over}{trains}"


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def buffers_of(modules: Modules) -> dict[tuple[int, str], Tensor]:
    """Buffers by stage and name."""
    return {
        (stage, name): buffer
        for stage, module in modules.items()
        for name, buffer in module.named_buffers()
    }


class TensorParts:
    """What this rank's stages have to do with those that have other parts of the same tensors, or
    other experts.

    Parameters that ranks along "tp" do not share, of which each has a copy (or of those that are
    sharded over others, of its shard), start with the values of the first. Creating one is
    collective over all ranks.

    Args:
        modules: this rank's.
        groups: the trainer's process groups.
        sharded: by ``id``, parameters of ``fully_shard``, each with how it lies over ranks when it
            is gathered: None where a rank has the whole then.

    Raises:
        ShardedError: a DTensor over other ranks than those of "tp" or "ep" in the trainer's mesh.
        PipelineError: no tensor of the model is shared by ranks, though the mesh has "tp" or "ep";
            or they have not built their stages alike.
    """

    def __init__(
        self, modules: Modules, groups: Groups, sharded: Mapping[int, Sharding | None]
    ) -> None:
        layout = groups.layout
        self._place, self._sharded = layout.place, sharded
        name = EXPERT if layout.experts else TENSOR
        sets = layout.sets("inner" if layout.experts else "tensor")
        group = next(ranks for ranks in sets if groups.everybody.rank in ranks)
        shared = 0
        copies: dict[int, Tensor] = {}
        for stage, module in modules.items():
            for own, tensor in _named(module):
                lies = self._lies(tensor)
                if lies is not None:
                    shared += 1
                    _check_lies(f"stage {stage}'s {own}", lies, name, group)
                    for each in lies.mesh.get_all_groups():
                        groups.watch_lent(each)
                elif isinstance(tensor, nn.Parameter):
                    copies[id(tensor)] = tensor
        if len(group) > 1 and not any(groups.everybody.gather(shared)):
            raise PipelineError(
                f"the mesh has {len(group)} ranks along {name!r}, and no parameter of any stage is "
                f"shared by them: let {_SHARING[name]}, or take a mesh without {name!r}"
            )
        if layout.tensor_ranks > 1:
            check_alike(modules, groups.everybody, sets, "parts of the same stages")
            others = "the ranks that share its tensors"
            adopt(copies.values(), group[0], groups.of_several(sets), groups, others)

    def _lies(self, tensor: Tensor) -> Sharding | None:
        """How a tensor lies over ranks, of one that is sharded once it is gathered."""
        return self._sharded.get(id(tensor), sharding_of(tensor))

    def is_counted(self, parameter: Tensor) -> bool:
        """Whether this rank counts what it has of a parameter where the model's elements are
        counted: of copies the first rank's.
        """
        lies = self._lies(parameter)
        sharded = id(parameter) in self._sharded
        place = self._place
        apart = {
            "tensor": lies is not None and lies.is_sharded_along(TENSOR),
            "inner": is_expert(lies) or sharded,
            "shard": sharded,
        }
        return all(own or not getattr(place, name) for name, own in apart.items())


def is_expert(lies: Sharding | None) -> bool:
    """Whether a tensor that lies so has experts, of which ranks along "ep" have their own."""
    return lies is not None and lies.is_sharded_along(EXPERT)


_SHARING = {
    TENSOR: f"each stage be parallelize_module(stage, mesh[{TENSOR!r}], plan)",
    EXPERT: f"experts be parameters distribute_tensor(weights, mesh[{EXPERT!r}], [Shard(0)])",
}
"""How tensors are made parts of."""


def _check_lies(what: str, lies: Sharding, name: str, group: tuple[int, ...]) -> None:
    names = [own for own, _ in lies.by_dimension()]
    alike = names == [name] and lies.ranks == tuple(sorted(group))
    if alike and name == EXPERT and not is_expert(lies):
        raise ShardedError(
            f"{what} is a DTensor of which each rank along {name!r} has a copy ({lies}): leave it "
            "a plain parameter, whose gradient is the mean of theirs"
        )
    if alike:
        return
    here = (
        f"the ranks {list(group)} share tensors here"
        if len(group) > 1
        else f"the trainer has no mesh with {TENSOR!r} or {EXPERT!r}"
    )
    name = next((own for own in names if own in _SHARING), name)
    raise ShardedError(
        f"{what} is a DTensor over the ranks {list(lies.ranks)} ({lies}), and {here}: let "
        f"{_SHARING[name]}, with the mesh that PipelineTrainer gets, "
        f"mesh=init_device_mesh(..., mesh_dim_names=('pp', {name!r}))"
    )


_REPLICAS = "the replicas of its stages"


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
        self._modules, self._groups = modules, groups
        layout = groups.layout
        # Whoever has another share of the batch; and of those whoever has the same experts.
        self._peers = groups.of_several(layout.peers)
        self._copies = groups.of_several(layout.copies) if layout.experts else None
        check_alike(modules, groups.everybody, layout.peers, "replicas of the same stages")
        self._adopt([t for t in _tensors(modules) if id(t) not in shards])
        self._marks = self._buffer_marks()
        trained = {
            id(each): each
            for module in modules.values()
            for each in module.parameters()
            if each.requires_grad and id(each) not in shards
        }
        members = [
            Member([each], self._copies if is_expert(sharding_of(each)) else self._peers)
            for each in trained.values()
        ]
        self.reductions = buckets_of(members, groups.losing, parts=layout.shares)

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
        with self._groups.losing(_REPLICAS):
            dist.all_reduce(written, dist.ReduceOp.MAX, group=self._peers)
        flags = written.tolist()
        found = [buffer for buffer, flag in zip(buffers.values(), flags, strict=True) if flag]
        self._adopt(found)
        self._marks = self._buffer_marks() if found else marks

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
            found = [tensor for tensor in tensors if is_expert(sharding_of(tensor)) is experts]
            adopt(found, source, link, self._groups, _REPLICAS)


def _tensors(modules: Mapping[int, nn.Module]) -> list[Tensor]:
    """Parameters and buffers, each once."""
    found = {
        id(tensor): tensor
        for module in modules.values()
        for tensor in (*module.parameters(), *module.buffers())
    }
    return list(found.values())
