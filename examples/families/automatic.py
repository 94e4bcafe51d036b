"""The four families with their losses and data, to be cut by measured cost.

`llama`, `bert`, `mamba` and `resnet` are factories for `autosplit compare`.
"""

from __future__ import annotations

from torch import Tensor

from examples.families import FAMILIES
from examples.workload import WithLoss

Example = tuple[WithLoss, tuple[Tensor, Tensor]]


def with_loss(name: str, **overrides: object) -> Example:
    """A family that puts out its loss, and a microbatch of its data."""
    family = FAMILIES[name](**overrides)
    return WithLoss(family.build(), family.loss_fn), family.batch_fn(0, family.microbatch_size)


def llama(**overrides: object) -> Example:
    """Settings: LlamaSettings."""
    return with_loss("llama", **overrides)


def bert(**overrides: object) -> Example:
    """Settings: BertSettings."""
    return with_loss("bert", **overrides)


def mamba(**overrides: object) -> Example:
    """Settings: MambaSettings."""
    return with_loss("mamba", **overrides)


def resnet(**overrides: object) -> Example:
    """Settings: ResNetSettings."""
    return with_loss("resnet", **overrides)
