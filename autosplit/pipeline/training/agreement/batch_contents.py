"""Whether all ranks were given the same batch, as far as its values tell."""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from autosplit.pipeline.engine.groups import Groups

_BYTES = 2**21
"""Of a tensor, at most so many are looked at: spread over its samples."""
_OF_EACH = 2**14


def compare_contents(tensors: Mapping[str, Mapping[str, Tensor | None]], groups: Groups) -> None:
    """Warn on every rank where ranks of its pipeline were given other values; collective.

    No error: what a rank's stages do not take may be a stand-in.

    Args:
        tensors: what this rank was given, by part and path; None for a tensor left out.
        groups: the trainer's process groups.
    """
    if groups.ranks == 1:
        return
    own = {
        f"{name} {place}": digest(tensor)
        for name, part in tensors.items()
        for place, tensor in enumerate(part.values())
        if type(tensor) is Tensor
    }
    ranks_by: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, digests in enumerate(groups.gather(own)):
        for what, seen in digests.items():
            ranks_by[what][seen].append(groups.members[rank])
    differing = {what: list(by.values()) for what, by in ranks_by.items() if len(by) > 1}
    if differing:
        # The caller of ``step``, behind the runner.
        warnings.warn(_text(differing), UserWarning, stacklevel=7)


def summary_of(tensors: Iterable[Tensor | None]) -> int:
    """A number of 40 bits that stands for some of the values of each tensor, spread over the
    samples: little enough to be looked at in every step.
    """
    found = "".join(digest(each, _OF_EACH) for each in tensors if each is not None)
    return int.from_bytes(hashlib.sha256(found.encode()).digest()[:5])


def digest(tensor: Tensor, most: int = _BYTES) -> str:
    """Of the values, or of so many bytes of them that are spread over the samples."""
    values = tensor.detach()
    if values.dim() and values.nbytes > most:
        values = values[:: -(-values.nbytes // most)].flatten()[: most // values.itemsize]
    values = values.cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def _text(differing: Mapping[str, Sequence[Sequence[int]]]) -> str:
    parts = dict.fromkeys(what.partition(" ")[0] for what in differing)
    groups = next(iter(differing.values()))
    ranks = " and others on ".join(
        f"rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each))}" for each in groups
    )
    return (
        f"the ranks were given different batches: the {' and the '.join(parts)} have some values "
        f"on {ranks}. A step takes the inputs of the ranks whose stages take them and the targets "
        "of the last stage's rank, so that it trains on a mixture: give every rank the same batch, "
        "or leave out (None) what its stages do not take. Only the first batch is compared"
    )
