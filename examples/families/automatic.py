"""The four families whole, to be cut by measured cost.

`llama`, `bert`, `mamba` and `resnet` are factories for `autosplit compare`, as those in `by_hand`.
"""

from __future__ import annotations

from dataclasses import replace

from autosplit.compare import Workload
from examples.families import FAMILIES, by_hand


def workload(name: str, **overrides: object) -> Workload:
    """A family with its data; the by-hand stages are there to check gradients by."""
    return replace(by_hand.workload(name, **overrides), model_fn=FAMILIES[name](**overrides).build)


def llama(**overrides: object) -> Workload:
    """Settings: LlamaSettings."""
    return workload("llama", **overrides)


def bert(**overrides: object) -> Workload:
    """Settings: BertSettings."""
    return workload("bert", **overrides)


def mamba(**overrides: object) -> Workload:
    """Settings: MambaSettings."""
    return workload("mamba", **overrides)


def resnet(**overrides: object) -> Workload:
    """Settings: ResNetSettings."""
    return workload("resnet", **overrides)
