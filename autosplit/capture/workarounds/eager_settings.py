"""Settings under which Dynamo and AOTAutograd trace the operators of eager mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import fx

from autosplit.torch_internals.version import TORCH

from .kernel_overrides import traced_as_registered
from .linalg_checks import without_tokens
from .recurrent_layers import without_fused_recurrence
from .symbolic_products import products_by_twos
from .tangent_layout import gradients_apart

# numpy.random draws what it draws in eager; torch's generator would draw instead.
AS_IN_EAGER: dict[str, Any] = {"use_numpy_random_stream": True}
"""Settings of Dynamo."""

if TORCH < (2, 12):
    # A parameter that is frozen or thawed is noticed, though it stays where it was in its module.
    AS_IN_EAGER |= {
        "use_recursive_dict_tags_for_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
    }


@contextlib.contextmanager
def as_eager(module: fx.GraphModule, decompositions: object = None) -> Iterator[None]:
    """While a graph of Dynamo is traced by AOTAutograd:

    - random operators stay though nobody reads them. They move the generator; without them all
      that is drawn later would differ from eager's for the same seed. Not so where operators are
      decomposed for a backend, which draws in a way of its own;
    - the backward runs outside of the autocast that its forward ran in;
    - checks of linear algebra are operators like others, without tokens;
    - recurrent layers are traced without the fused kernel, which its fake does not match;
    - gradients of outputs that overlap themselves do not;
    - sizes that are symbols are multiplied by twos;
    - kernels that somebody registered for torch's operators are traced through.
    """
    drawing = {} if decompositions is not None else {"fallback_random": True}
    with (
        torch._inductor.config.patch(drawing),
        torch._functorch.config.patch(backward_pass_autocast="off"),
        without_fused_recurrence(module),
        without_tokens(),
        gradients_apart(),
        products_by_twos(),
        traced_as_registered(),
    ):
        yield
