"""Parts of tensors: what ranks that share the tensors of a stage have of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError, ShardedError
from autosplit.mesh.dimensions import SHARD, TENSOR
from autosplit.pipeline.engine.messages.process_groups import Groups
from autosplit.pipeline.training.replicas.stage_forms import check_alike
from autosplit.torch_internals.dtensor import Sharding, is_dtensor, lay_gradient_out, local_tensor


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
        link = groups.tensor_parts()
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
