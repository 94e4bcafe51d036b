"""Check that all copies of a parameter, on several ranks, are built, tied and sharded equally."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from autosplit.errors import PipelineError, ShardedError
from autosplit.mesh.dimensions import EXPERT, TENSOR
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.torch_internals.dtensor import Sharding, sharding_of
from autosplit.trainer.stage_modules import Holder

SHARDING_ADVICE = {
    TENSOR: f"call parallelize_module(stage, mesh[{TENSOR!r}], plan) for each stage",
    EXPERT: f"make experts' parameters by distribute_tensor(weights, mesh[{EXPERT!r}], [Shard(0)])",
}
"""How to shard parameters along a dimension of the mesh, by its name."""


def find_holders(
    shared: Sequence[Sequence[Holder]], modules: Mapping[int, nn.Module], stages: int
) -> dict[Holder, nn.Parameter]:
    """Return the shared parameters that this rank has, by stage and name.

    Raises:
        PipelineError: ``shared`` names a stage or a parameter that does not exist, a parameter
            twice, or only one holder.
    """
    named: set[Holder] = set()
    for holders in shared:
        if len(holders) < 2:
            raise PipelineError(
                "a group of shared_parameters needs two or more members (stage, name); got "
                f"{list(holders)}"
            )
        for stage, name in holders:
            if not 0 <= stage < stages:
                raise PipelineError(
                    f"shared_parameters has {name!r} of stage {stage}, which does not exist; the "
                    f"stages are 0 to {stages - 1}"
                )
            if (stage, name) in named:
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} is named twice in shared_parameters; "
                    "put all its copies into one group"
                )
            named.add((stage, name))
    holders_here = {}
    for stage, name in named:
        if stage in modules:
            parameters = dict(modules[stage].named_parameters(remove_duplicate=False))
            if name not in parameters:
                raise PipelineError(
                    f"stage {stage} has no parameter {name!r} to share; it has: "
                    f"{', '.join(parameters) or 'none'}"
                )
            holders_here[stage, name] = parameters[name]
    return holders_here


def form_of(tensor: Tensor) -> str:
    """Describe the properties of a tensor that must be equal for all of its copies."""
    trained = ", trained" if tensor.requires_grad else ""
    sharding = sharding_of(tensor)
    over = "" if sharding is None else f" over {sharding}"
    return f"{TensorMeta.of(tensor)}{over}{trained}"


def stage_tensors(modules: Mapping[int, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name for error texts, tensor) of each parameter and buffer of the stages."""
    for stage, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"stage {stage}'s {name}", tensor


def forms_of(modules: Mapping[int, nn.Module]) -> list[str]:
    """Text with name and form of each parameter and buffer, see ``form_of``."""
    return [f"{name}: {form_of(tensor)}" for name, tensor in stage_tensors(modules)]


def check_built_alike(
    forms: Mapping[int, Sequence[str]], sets: Iterable[Sequence[int]], relation: str
) -> None:
    """Check that all ranks of a set have the same tensors.

    Args:
        forms: maps each rank to its tensors' names and forms, as texts.
        sets: the sets of ranks.
        relation: text for errors: what the ranks of a set hold, such as "replicas of the same
            stages".
    """
    for first, *peers in sets:
        for peer in peers:
            if forms[first] != forms[peer]:
                missing = next((form for form in forms[first] if form not in forms[peer]), None)
                extra = next((form for form in forms[peer] if form not in forms[first]), None)
                raise PipelineError(
                    f"the ranks {first} and {peer} hold {relation}, which must be built alike: "
                    f"rank {first} has {missing or 'nothing more'}, rank {peer} has "
                    f"{extra or 'nothing more'}"
                )


def check_tied_forms(
    shared: Sequence[Sequence[Holder]], forms: Mapping[tuple[int, str], str]
) -> None:
    """Check that all holders of a tied parameter have it with equal properties (``form_of``)."""
    for holders in shared:
        if len({forms[stage, name] for stage, name in holders}) > 1:
            listed = "; ".join(f"{name!r} of stage {at}: {forms[at, name]}" for at, name in holders)
            raise PipelineError(
                "all copies of a shared parameter must have one shape and dtype, and be all "
                f"trained or all frozen; got {listed}"
            )


def is_expert(sharding: Sharding | None) -> bool:
    """Whether a tensor of this sharding holds experts: each rank along "ep" has different ones."""
    return sharding is not None and sharding.is_sharded_along(EXPERT)


def check_sharding(name: str, sharding: Sharding, dimension: str, ranks: tuple[int, ...]) -> None:
    """Check that a DTensor is sharded along the trainer's mesh.

    Args:
        name: the tensor's name.
        sharding: the tensor's sharding.
        dimension: the dimension of the trainer's mesh along which DTensors must be sharded, "tp" or
            "ep".
        ranks: the ranks along ``dimension`` that include this rank.

    Raises:
        ShardedError: the tensor's mesh is not ``ranks`` along ``dimension``, or each rank along
            "ep" has a copy of the tensor.
    """
    names = [dimension_name for dimension_name, _ in sharding.by_dimension()]
    fits = names == [dimension] and sharding.ranks == tuple(sorted(ranks))
    if fits and dimension == EXPERT and not is_expert(sharding):
        raise ShardedError(
            f"{name} is a DTensor of which each rank along {dimension!r} has a copy ({sharding}): "
            "leave it a plain parameter, whose gradient is averaged over these ranks"
        )
    if fits:
        return
    expected = (
        f"this trainer shards tensors over the ranks {list(ranks)}"
        if len(ranks) > 1
        else f"the trainer has no mesh with {TENSOR!r} or {EXPERT!r}"
    )
    advised = next((axis for axis in names if axis in SHARDING_ADVICE), dimension)
    raise ShardedError(
        f"{name} is a DTensor over the ranks {list(sharding.ranks)} ({sharding}), but {expected}: "
        f"{SHARDING_ADVICE[advised]}, with the mesh that is passed to PipelineTrainer, "
        f"mesh=init_device_mesh(..., mesh_dim_names=('pp', {advised!r}))"
    )
