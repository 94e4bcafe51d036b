"""What several ranks hold the same of: replicas of stages, parts of these, tied parameters. All are
built alike, start with the same values, and have one gradient at the end of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError, ShardedError
from autosplit.mesh.dimensions import EXPERT, TENSOR, Place
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.groups import Groups
from autosplit.torch_internals.autograd import has_tensor_hooks
from autosplit.torch_internals.dtensor import (
    Sharding,
    local_tensor,
    redistribute_gradient,
    sharding_of,
    with_sharding_of,
)
from autosplit.trainer.agreement import difference
from autosplit.trainer.stage_modules import Holder

Modules: TypeAlias = "Mapping[int, nn.Module]"
"""A rank's stages by index."""

Wait: TypeAlias = "Callable[[], None]"
"""Waits until what a reduction gives is in ``.grad``; raises LostPeerError where another rank did
not take part.
"""

PER_GROUP = ("params", "param_names")
"""What a group of an optimizer has that is no option."""

_OTHERS = "the ranks that hold the same parameters"


class _Member(NamedTuple):
    """This rank's copies of one parameter that other ranks hold too, or that is tied.

    Attributes:
        copies: what this rank holds of it, one or more.
        link: connects all ranks that hold a copy; None if no other does.
    """

    copies: Sequence[Tensor]
    link: dist.ProcessGroup | None


class ReplicatedParameters:
    """This rank's parameters and buffers that others hold too: replicas of the pipeline, other
    stages (tied parameters, such as embeddings), or ranks along "tp" that do not share them.

    All start with the values of the first. Optimizers get the sum of the gradients of tied
    parameters, and the mean of that over replicas. Buffers that a forward writes become those of
    the first replica behind it, as under DistributedDataParallel. Creating one is collective over
    all ranks.

    Args:
        modules: this rank's stages by index.
        shared: groups of (stage, parameter name); every group is one parameter of the model.
        schedule: says which ranks hold which stage.
        groups: the trainer's process groups.
        sharded: by ``id``, parameters of ``fully_shard``, each with how it lies over ranks when it
            is gathered: None where a rank has the whole then.
        synchronize: waits until the device has done what it was given.

    Attributes:
        reductions: each starts one, of the gradients that are there, which are complete: of all of
            one dtype that the same ranks hold, as one message.

    Raises:
        PipelineError: shared parameters that are not there, in two groups or not alike; stages
            that ranks have not built alike; a mesh with "tp" or "ep", along which nothing is
            shared.
        ShardedError: a DTensor over other ranks than those of "tp" or "ep" in the trainer's mesh.
    """

    def __init__(
        self,
        modules: Modules,
        shared: Sequence[Sequence[Holder]],
        schedule: Schedule,
        groups: Groups,
        sharded: Mapping[int, Sharding | None],
        synchronize: Callable[[], None],
    ) -> None:
        self._modules, self._groups, self._sharded = modules, groups, sharded
        self._layout, self._synchronize = groups.layout, synchronize
        self._named, self._shared = _find(shared, modules, schedule.stages), shared
        whole = self._check(shared)
        everywhere: list[tuple[int, ...]] = [(at,) for at in range(len(self._layout.columns))]
        tied = [
            (tuple(dict.fromkeys([schedule.placement[stage] for stage, _ in holders])), holders)
            for holders in shared
        ]
        # The same calls on all ranks.
        if self._layout.tensor_ranks > 1:
            for at in everywhere:
                broadcast_from(whole, *self._link(at, "tensor"), groups)
        along = {False: ("replicate", "shard", "inner"), True: ("replicate",)}
        self._links = {
            (at, expert): self._link(at, *along[expert])
            for at in dict.fromkeys([*everywhere, *(at for at, _ in tied)])
            for expert in ((False, True) if self._layout.experts else (False,))
        }
        self._duplicates: set[int] = set()
        members = []
        seen = {*sharded}
        for at, holders in tied:
            found = [self._named[holder] for holder in holders if holder in self._named]
            if copies := [*dict.fromkeys(found)]:
                seen.update(map(id, copies))
                self._duplicates.update(map(id, copies[groups.rank == at[0] :]))
                members += self._adopt(copies, at)
        for tensor in _tensors(modules):
            if id(tensor) not in seen:
                members += self._adopt([tensor], (groups.rank,))
        alike: dict[tuple[dist.ProcessGroup | None, torch.dtype], list[_Member]] = defaultdict(list)
        for member in members:
            first = member.copies[0]
            alike[member.link, getattr(first, "grad_dtype", None) or first.dtype].append(member)
        self.reductions = [
            partial(self._start, part, dtype, link) for (link, dtype), part in alike.items()
        ]

    # --- at the start -----------------------------------------------------------------------------

    def _link(self, columns: Sequence[int], *along: str) -> tuple[int, dist.ProcessGroup | None]:
        """What connects this rank with those that hold the same, and the first of these; None where
        there is no other. Collective over all ranks.

        Args:
            columns: ranks of the pipeline that hold it, the first first.
            along: fields of ``Place`` along which pipelines do.
        """
        sets: dict[Place, list[int]] = defaultdict(list)
        apart = dict.fromkeys(along, 0)
        for at in columns:
            for rank, place in zip(self._layout.columns[at], self._layout.places, strict=True):
                sets[place._replace(**apart)].append(rank)
        return self._groups.root_and_group([*sets.values()])

    def _adopt(self, copies: Sequence[Tensor], at: tuple[int, ...]) -> list[_Member]:
        """Have copies of one tensor start with the values of the first; what is to be reduced."""
        first, *others = copies
        source, link = self._links[at, is_expert(sharding_of(first))]
        broadcast_from([first], source, link, self._groups)
        with torch.no_grad():
            for copy in others:
                local_tensor(copy).copy_(local_tensor(first))
        # Experts of one rank have the tokens of all along "ep", whose mean it is without them.
        trained = first.requires_grad and (others or link or self._layout.shares > 1)
        return [_Member(copies, link)] if trained else []

    def _lies(self, tensor: Tensor) -> Sharding | None:
        """How a tensor lies over ranks, of one that is sharded once it is gathered."""
        return self._sharded.get(id(tensor), sharding_of(tensor))

    def _check(self, shared: Sequence[Sequence[Holder]]) -> list[Tensor]:
        """Hold names, shapes, dtypes and shardings of this rank's tensors against those of others;
        collective. The parameters of which each rank along "tp" has the whole.
        """
        layout, everybody = self._layout, self._groups.everybody
        name = EXPERT if layout.experts else TENSOR
        sets = layout.sets("inner" if layout.experts else "tensor")
        group = next(ranks for ranks in sets if self._groups.members[self._groups.rank] in ranks)
        whole: dict[int, Tensor] = {}
        parts = 0
        for what, tensor in _named(self._modules):
            lies = self._lies(tensor)
            if lies is not None:
                parts += 1
                _check_lies(what, lies, name, group)
                for each in lies.mesh.get_all_groups():
                    self._groups.add_external_group(each)
            elif isinstance(tensor, nn.Parameter):
                whole[id(tensor)] = tensor
        forms = [f"{what}: {_form(tensor)}" for what, tensor in _named(self._modules)]
        tied = {holder: _form(parameter) for holder, parameter in self._named.items()}
        said = dict(zip(everybody.members, everybody.gather((forms, tied, parts)), strict=True))
        if len(group) > 1 and not any(count for _, _, count in said.values()):
            raise PipelineError(
                f"the mesh has {len(group)} ranks along {name!r}, and no parameter of any stage is "
                f"shared by them: let {_SHARING[name]}, or take a mesh without {name!r}"
            )
        built = {rank: forms for rank, (forms, _, _) in said.items()}
        _check_built(built, layout.peers, "replicas of the same stages")
        if layout.tensor_ranks > 1:
            _check_built(built, sets, "parts of the same stages")
        found = {holder: form for _, tied, _ in said.values() for holder, form in tied.items()}
        for holders in shared:
            if len({found[stage, name] for stage, name in holders}) > 1:
                listed = "; ".join(f"{n!r} of stage {at}: {found[at, n]}" for at, n in holders)
                raise PipelineError(
                    "shared parameters must have one shape and dtype and be all trained or all "
                    f"frozen; got {listed}"
                )
        return [*whole.values()]

    def check_moved(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuse optimizers that move tied parameters differently, which would come apart;
        collective over all ranks.

        Raises:
            PipelineError: names one, and what differs.
        """
        ways: dict[int, Mapping[str, str]] = {}
        for group in [] if optimizer is None else optimizer.param_groups:
            way = {key: repr(value) for key, value in group.items() if key not in PER_GROUP}
            way["what it goes by"] = f"{[*way]}"
            ways |= {id(parameter): way for parameter in group["params"]}
        own = {at: ways[id(tensor)] for at, tensor in self._named.items() if id(tensor) in ways}
        found: dict[Holder, Mapping[str, str]] = {}
        for said in self._groups.everybody.gather(own):
            found |= said
        for holders in self._shared:
            differing = difference({at: found[at] for at in map(tuple, holders) if at in found})
            if differing is not None:
                name, ((one, first), here), ((two, second), there) = differing
                raise PipelineError(
                    f"{first!r} of stage {one} and {second!r} of stage {two} are one parameter, "
                    f"and optimizers move them differently: {name} must be the same, and is {here} "
                    f"and {there}"
                )

    # --- in a step --------------------------------------------------------------------------------

    def is_counted(self, parameter: Tensor) -> bool:
        """Whether this rank counts what it has of a parameter where the model's elements are
        counted: of copies the first rank's.
        """
        lies, sharded = self._lies(parameter), id(parameter) in self._sharded
        apart = {
            "replicate": False,
            "tensor": lies is not None and lies.is_sharded_along(TENSOR),
            "inner": is_expert(lies) or sharded,
            "shard": sharded,
        }
        place = self._layout.place
        first = all(own or not getattr(place, name) for name, own in apart.items())
        return first and id(parameter) not in self._duplicates

    def check(self) -> None:
        """Refuse hooks of tied parameters, which would see the share of one stage where autograd
        shows the sum.

        Raises:
            PipelineError: names a parameter that has one.
        """
        for (stage, name), parameter in self._named.items():
            if has_tensor_hooks([parameter]):
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} has a hook of register_hook, and other "
                    "stages hold it too: no stage has the gradient that it should see. Let "
                    "optimizer.register_step_pre_hook change the gradient, on each rank that holds "
                    "it"
                )

    def _start(
        self, members: Sequence[_Member], dtype: torch.dtype, link: dist.ProcessGroup | None
    ) -> Wait:
        # The last numbers say which members have a gradient anywhere: without one, autograd leaves
        # None, and an optimizer passes the parameter over.
        sizes = [local_tensor(member.copies[0]).numel() for member in members] + [len(members)]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=members[0].copies[0].device)
        *parts, given = flat.split(sizes)
        for place, (member, part) in enumerate(zip(members, parts, strict=True)):
            for copy in member.copies:
                redistribute_gradient(copy)
                if copy.grad is not None:
                    gradient = local_tensor(copy.grad)
                    part.view(gradient.shape).add_(gradient)
                    given[place] = 1
        work = None
        if link is not None:
            with self._groups.as_lost_peer(_OTHERS):
                work = dist.all_reduce(flat, group=link, async_op=True)

        def wait() -> None:
            if work is not None:
                with self._groups.as_lost_peer(_OTHERS):
                    work.wait()
                self._synchronize()
            found = given.tolist()
            if self._layout.shares > 1:
                flat.div_(self._layout.shares)
            for member, part, there in zip(members, parts, found, strict=True):
                for number, copy in enumerate(member.copies):
                    local = part.view(local_tensor(copy).shape)
                    total = with_sharding_of(copy, local) if there else None
                    copy.grad = total.clone() if number and total is not None else total

        return wait

    def equalise_buffers(self) -> None:
        """Give all replicas the buffers of the first.

        Raises:
            LostPeerError: a rank that holds a replica did not take part.
        """
        for tensor in _tensors(self._modules):
            if not isinstance(tensor, nn.Parameter):
                self._adopt([tensor], (self._groups.rank,))


@torch.no_grad()
def broadcast_from(
    tensors: Iterable[Tensor], source: int, link: dist.ProcessGroup | None, groups: Groups
) -> None:
    """Take over the values of a rank, on all ranks that a link connects.

    Args:
        tensors: alike on all of them; of DTensors, what this rank has.
        source: whose, as the default process group numbers it.
        link: connects them; None does nothing.
        groups: the trainer's process groups.

    Raises:
        LostPeerError: one of them did not take part.
    """
    for tensor in map(local_tensor, tensors) if link is not None else ():
        if tensor.numel():
            values = tensor.detach().clone(memory_format=torch.contiguous_format)
            with groups.as_lost_peer(_OTHERS):
                # As bytes, for not every backend knows every dtype.
                dist.broadcast(values.view(-1).view(torch.uint8), src=source, group=link)
            tensor.copy_(values)


def is_expert(lies: Sharding | None) -> bool:
    """Whether a tensor that lies so has experts, of which ranks along "ep" have their own."""
    return lies is not None and lies.is_sharded_along(EXPERT)


def _named(modules: Modules) -> Iterator[tuple[str, Tensor]]:
    for stage, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"stage {stage}'s {name}", tensor


def _tensors(modules: Modules) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return list({id(tensor): tensor for _, tensor in _named(modules)}.values())


def _form(tensor: Tensor) -> str:
    """What must be the same on all ranks that hold a tensor."""
    trains = ", trained" if tensor.requires_grad else ""
    lies = sharding_of(tensor)
    over = "" if lies is None else f" over {lies}"
    return f"{TensorMeta.of(tensor)}{over}{trains}"


def _check_built(
    built: Mapping[int, Sequence[str]], sets: Iterable[Sequence[int]], what: str
) -> None:
    """Refuse ranks of a set that have other tensors than its first."""
    for one, *others in sets:
        for two in others:
            if built[one] != built[two]:
                there = next((each for each in built[one] if each not in built[two]), None)
                here = next((each for each in built[two] if each not in built[one]), None)
                raise PipelineError(
                    f"the ranks {one} and {two} hold {what}, which must be built alike: rank {one} "
                    f"has {there or 'nothing more'}, rank {two} has {here or 'nothing more'}"
                )


def _find(
    shared: Sequence[Sequence[Holder]], modules: Modules, stages: int
) -> dict[Holder, nn.Parameter]:
    """This rank's holders of shared parameters."""
    seen: set[Holder] = set()
    for holders in shared:
        if len(holders) < 2:
            raise PipelineError(
                f"a shared parameter needs two or more holders (stage, name); got {list(holders)}"
            )
        for stage, name in holders:
            if not 0 <= stage < stages:
                raise PipelineError(
                    f"shared parameter {name!r} is said to be on stage {stage}; "
                    f"the stages are 0 to {stages - 1}"
                )
            if (stage, name) in seen:
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} is named twice in shared_parameters; "
                    "put all its copies into one group"
                )
            seen.add((stage, name))
    found = {}
    for stage, name in seen:
        if stage in modules:
            parameters = dict(modules[stage].named_parameters(remove_duplicate=False))
            if name not in parameters:
                raise PipelineError(
                    f"stage {stage} has no parameter {name!r} to share; it has: "
                    f"{', '.join(parameters) or 'none'}"
                )
            found[stage, name] = parameters[name]
    return found


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
