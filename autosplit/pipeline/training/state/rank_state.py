"""One rank's share of the model in training.

Parts of tensors: what ranks that share the tensors of a stage have of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError, ShardedError
from autosplit.mesh.dimensions import SHARD, TENSOR
from autosplit.mesh.exact_norm import sum_of_squares
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.training.replicas.model_replicas import Completion, ModelReplicas
from autosplit.pipeline.training.replicas.replicated_stages import ReplicatedStages
from autosplit.pipeline.training.replicas.sharded_stages import ShardedStages
from autosplit.pipeline.training.replicas.stage_forms import check_alike
from autosplit.pipeline.training.stage_modules import StageSource, own_modules
from autosplit.torch_internals.dtensor import Sharding, is_dtensor, lay_gradient_out, local_tensor

from .tied_parameters import Holder, SharedParameters


class TensorParts:
    """What this rank's stages have to do with those that have other parts of the same tensors.

    Parameters that are not shared by these ranks, of which each has a copy (or of those that are
    sharded over others, of its shard), start with the values of the first. Creating one is
    collective over all ranks.

    Args:
        modules: this rank's stages by index.
        groups: the trainer's process groups.
        sharded: by ``id``, parameters of ``fully_shard``, each with how it lies over ranks when it
            is gathered: None where a rank has the whole then.

    Raises:
        ShardedError: a DTensor over other ranks than those of "tp" in the trainer's mesh.
        PipelineError: no tensor of the model is shared by ranks, though the mesh has "tp"; or they
            have not built their stages alike.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        groups: Groups,
        sharded: Mapping[int, Sharding | None],
    ) -> None:
        layout = groups.layout
        self._place = layout.place
        own = groups.everybody.rank
        group = next(ranks for ranks in layout.tensor_groups if own in ranks)
        shared = 0
        copies: dict[int, Tensor] = {}
        for stage, name, tensor in _tensors(modules):
            lies = Sharding.of(tensor) if is_dtensor(tensor) else None
            lies = sharded.get(id(tensor), lies)
            if lies is not None:
                shared += 1
                _check_lies(f"stage {stage}'s {name}", lies, group)
                for each in lies.mesh.get_all_groups():
                    groups.watch_lent(each)
            elif isinstance(tensor, nn.Parameter):
                copies[id(tensor)] = local_tensor(tensor)
        if len(group) > 1:
            if not any(groups.everybody.gather(shared)):
                raise PipelineError(
                    f"the mesh has {len(group)} ranks along {TENSOR!r}, and no parameter of any "
                    "stage is shared by them: let each stage be parallelize_module(stage, "
                    f"mesh[{TENSOR!r}], plan), or take a mesh without {TENSOR!r}"
                )
            check_alike(modules, groups, layout.tensor_groups, "parts of the same stages")
            self._adopt(list(copies.values()), groups, group[0])

    def is_counted(self, parameter: Tensor) -> bool:
        """Whether this rank counts what it has of a parameter where the model's elements are
        counted: of copies the first rank's.
        """
        lies = Sharding.of(parameter).by_dimension() if is_dtensor(parameter) else []
        # What two dimensions shard has a placement of another kind along one of them.
        sharded = {name for name, placement in lies if not placement.is_replicate()}
        places = {SHARD: self._place.shard, TENSOR: self._place.tensor}
        return all(name in sharded or not at for name, at in places.items())

    def lay_gradients_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have the gradients of DTensors lie as these do; collective over their ranks."""
        for parameter in parameters:
            lay_gradient_out(parameter)

    @torch.no_grad()
    def _adopt(self, copies: Sequence[Tensor], groups: Groups, first: int) -> None:
        """Take over the first rank's values of what each has a copy of."""
        link = groups.of_several(groups.layout.tensor_groups)
        for tensor in copies:
            if not tensor.numel():
                continue
            values = tensor.detach().clone(memory_format=torch.contiguous_format)
            with groups.losing("the ranks that share its tensors"):
                # As bytes, for not every backend knows every dtype.
                dist.broadcast(values.view(-1).view(torch.uint8), src=first, group=link)
            tensor.copy_(values)


def _tensors(modules: Mapping[int, nn.Module]) -> Iterator[tuple[int, str, Tensor]]:
    for stage, module in modules.items():
        for space in (module.named_parameters(), module.named_buffers()):
            for name, tensor in space:
                yield stage, name, tensor


def _check_lies(what: str, lies: Sharding, group: tuple[int, ...]) -> None:
    names = [name for name, _ in lies.by_dimension()]
    if names == [TENSOR] and lies.ranks == tuple(sorted(group)):
        return
    here = (
        f"the ranks {list(group)} share tensors here"
        if len(group) > 1
        else (f"the trainer has no mesh with {TENSOR!r}")
    )
    raise ShardedError(
        f"{what} is a DTensor over the ranks {list(lies.ranks)} ({lies}), and {here}: give "
        f"parallelize_module the dimension {TENSOR!r} of the mesh that PipelineTrainer gets, "
        f"mesh=init_device_mesh(..., mesh_dim_names=('pp', {TENSOR!r})) and mesh[{TENSOR!r}]"
    )


class RankState:
    """This rank's stage modules and trainable parameters, kept equal with their replicas.

    Creating one is collective over all ranks.

    Args:
        stages: all stages.
        shared: groups of (stage, parameter name); every group is one parameter of the model.
        schedule: says which rank holds which stage.
        groups: the trainer's process groups.
        device: where the stages go.
        settled: waits until the device has done what it was given.

    Attributes:
        modules: by stage.
        parameters: those that need a gradient, each once.
        replicas: makes gradients means over replicas of the pipeline.
        sharded: the stages that are sharded.
        reducing: whether this is inside ``reduced``.

    Raises:
        PipelineError: a stage that is no module, or what ``ShardedStages``, ``TensorParts``,
            ``ReplicatedStages`` and ``SharedParameters`` refuse; or stages are sharded of which
            other ranks hold copies that they do not reduce with them.
    """

    def __init__(
        self,
        stages: StageSource,
        shared: Sequence[Sequence[Holder]],
        schedule: Schedule,
        groups: Groups,
        device: torch.device,
        settled: Callable[[], None],
    ) -> None:
        self.modules = own_modules(stages, schedule.held(groups.rank), device)
        self.sharded = ShardedStages(self.modules, groups)
        if self.sharded:
            _refuse_beside_shards(shared, schedule)
        self._parts = TensorParts(self.modules, groups, self.sharded.parameters)
        self._copies = ReplicatedStages(self.modules, schedule, groups)
        self._shared = SharedParameters(shared, self.modules, schedule, groups, settled)
        self.replicas = ModelReplicas(
            self.modules, groups, settled, self._shared.is_shared, self.sharded
        )
        self.reducing = False
        self.parameters = _trainable(self.modules.values())
        # Of replicas, the first one's are counted.
        self._counted = [
            parameter
            for parameter in self.parameters
            if groups.layout.place.replicate == 0
            and not self._shared.is_duplicate(parameter)
            and self._parts.is_counted(parameter)
        ]
        self._known = frozenset(map(id, self.parameters))

    def steady(self) -> AbstractContextManager[None]:
        """Refuse what would set the copies of a stage apart; see ``ReplicatedStages``."""
        return self._copies.steady()

    def check(self) -> None:
        """Refuse parameters that are trained now and were not when this was made: no optimizer
        moves them, no norm counts them and no copies are kept equal.

        Raises:
            PipelineError: names one.
        """
        self.sharded.check()
        self.sharded.free_all()
        for stage, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise PipelineError(
                        f"parameter {name!r} of stage {stage} was unfrozen, added or replaced "
                        "after the trainer was built, and its optimizer does not know it: build a "
                        "new trainer, or put values into the parameters that are there "
                        "(load_state_dict without assign=True)"
                    )

    def squares(self) -> Tensor:
        """This rank's part of the ``sum_of_squares`` of the model's gradients."""
        return sum_of_squares(self._counted)

    @contextlib.contextmanager
    def reduced(self, completions: Sequence[Completion], *, timed: bool) -> Iterator[None]:
        """Give every copy of a parameter the sum of the gradients that come inside, and all
        replicas of the pipeline their mean; see ``SharedParameters`` and ``ModelReplicas``.
        """
        with self.replicas.averaging(completions, timed=timed), self._shared.summing():
            self.reducing = True
            try:
                yield
            finally:
                self.reducing = False
        self._parts.lay_gradients_out(self.parameters)

    def complete(self, completion: Completion, *, last: bool) -> None:
        """Start to reduce gradients, which are in ``.grad``.

        Args:
            completion: whose.
            last: whether all of the stage are there.
        """
        if last:
            self._shared.complete(completion[0])
        self.replicas.ready(completion)

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """The gradients, by stage and by parameter name within the stage."""
        return {
            index: {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            for index, module in self.modules.items()
        }


def _refuse_beside_shards(shared: Sequence[Sequence[Holder]], schedule: Schedule) -> None:
    what = "are shared by several stages (shared_parameters)" if shared else ""
    if schedule.mirror is not None:
        what = f"have two copies under schedule {schedule.name!r}"
    if what:
        raise PipelineError(
            f"parameters that fully_shard has sharded {what}, whose gradients would have to be "
            "summed across both: take 'dp_replicate' in place of 'dp_shard', or stages that have "
            "parameters of their own under a schedule with one copy of each"
        )


def _trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Parameters that need a gradient, each once."""
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(found.values())
