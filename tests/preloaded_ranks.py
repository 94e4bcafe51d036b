"""Imports of ranks, and their first capture, for the process that `tests.interpreters` starts them
from; and how little they measure, also where an example or a page launches them.
"""

from __future__ import annotations

import torch
import torch.distributed.tensor.debug

import autosplit
import autosplit.mesh.costs
import autosplit.planner.costs
import autosplit.torch_internals.fsdp_view
import examples.language_model  # noqa: F401
from tests.kept_ranks import measure_cheaply, search_cheaply

measure_cheaply()
search_cheaply()


def split_once() -> None:
    """Fill the caches of torch and of autosplit that each rank fills with its first step."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    autosplit.split(module)(torch.ones(2, 2)).sum().backward()
    torch._dynamo.reset()


if not torch.backends.cuda.is_built():  # autograd's threads for GPUs would not survive a fork
    split_once()
