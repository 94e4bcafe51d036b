"""Plans of the example's decoder by fixed costs of its blocks: cuts, rows, steps and peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import autosplit
from autosplit.pipeline import Transfer
from examples.decoder import Decoder, LlamaConfig

from .names import find

_REQUESTS: dict[str, dict[str, Any]] = {
    "1f1b": {"stages": 2, "microbatches": 4},
    "fused": {"stages": 2, "microbatches": 4, "split_backward": False},
    "four stages": {"stages": 4, "microbatches": 8},
    "gpipe": {"stages": 4, "microbatches": 4, "schedule": "gpipe"},
    "interleaved": {"stages": 4, "ranks": 2, "schedule": "interleaved"},
    "zb-v": {"stages": 4, "ranks": 2, "schedule": "zb-v"},
    "auto": {"stages": 3, "microbatches": 6, "schedule": "auto"},
    "by hand": {"cut_at": ["layers.2"], "microbatches": 4},
    "lean": {"stages": 2, "microbatches": 4, "memory": "lean"},
}
_LINKS = Transfer(0.01, 1e6, host=find("Link", "mesh")(0.01, 1e5))


def cases() -> Iterator[tuple[str, Any]]:
    """Each plan's fields, or why there is none."""
    for tied in (False, True):
        config = LlamaConfig(dim=32, layers=4, heads=4, kv_heads=4, hidden=64, seq=16, tied=tied)
        torch.manual_seed(0)
        model, tokens = Decoder(config), torch.randint(0, 256, (2, config.seq))
        costs = _costs(model, tokens)
        for name, options in _REQUESTS.items():
            case = f"{'tied' if tied else 'decoder'}/{name}"
            yield case, _planned(model, tokens, costs=costs, **options)
        limits = find("Limits", "planner")(1.4e6, links=_LINKS, measures=True)
        yield (
            f"{'tied' if tied else 'decoder'}/limit",
            _planned(model, tokens, costs=costs, stages=2, microbatches=4, limits=limits),
        )


def _costs(model: nn.Module, tokens: Tensor) -> Any:
    """Of as many blocks as there are, each unlike the others."""
    block, costs = find("BlockCost", "planner"), find("ModelCosts", "planner")
    blocks = autosplit.partition(model, tokens, stages=1, costs="estimate").made_for.blocks
    counted = range(len(blocks))
    return costs(
        tuple(
            block(1.0 + n % 3, 1.5, 1.0 + n % 2, 6e4 + 1e3 * n, 5e4, 2e4 * (1 + n % 4), 3.0)
            for n in counted
        ),
        tuple(4e3 + 100 * n for n in counted[1:]),
        0.25,
    )


def _planned(model: nn.Module, tokens: Tensor, **options: Any) -> Any:
    try:
        plan = autosplit.partition(model, tokens, rehearse=False, **options)
    except autosplit.AutosplitError as error:
        return f"refused: {error}"
    unbound = dataclasses.replace(plan, partition=None)
    return dataclasses.asdict(unbound)
