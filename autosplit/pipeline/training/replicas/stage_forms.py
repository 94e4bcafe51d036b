"""Whether ranks that hold the same stages have built them alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.groups import Groups
from autosplit.torch_internals.dtensor import Sharding, is_dtensor


def check_alike(
    modules: Mapping[int, nn.Module], groups: Groups, sets: Sequence[Sequence[int]], what: str
) -> None:
    """Hold names, shapes, dtypes and shardings of this rank's tensors against those of others;
    collective over all ranks.

    Args:
        modules: this rank's stages by index.
        groups: the trainer's process groups.
        sets: of ranks that must have them alike.
        what: what these ranks hold.

    Raises:
        PipelineError: names two ranks and a tensor of each.
    """
    own = [
        f"stage {stage}'s {name}: {_form(tensor)}"
        for stage, module in modules.items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    everywhere = groups.everybody.gather(own)
    for first, *others in sets:
        for other in others:
            expected, came = everywhere[first], everywhere[other]
            if came != expected:
                here = next((each for each in came if each not in expected), "nothing more")
                there = next((each for each in expected if each not in came), "nothing more")
                raise PipelineError(
                    f"the ranks {first} and {other} hold {what}, which must "
                    f"be built alike: rank {first} has {there}, rank {other} has {here}"
                )


def _form(tensor: Tensor) -> str:
    trains = ", trained" if tensor.requires_grad else ""
    lies = f" over {Sharding.of(tensor)}" if is_dtensor(tensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{lies}{trains}"
