from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from autosplit.capture.workarounds.operators import multiply_sizes_pairwise


def test_a_product_that_was_not_traced_is_one_of_twos() -> None:
    """As DTensor computes the sizes of what a rank has: of a sequence half of its length."""

    def halved(x: Tensor) -> Tensor:
        with disable_proxy_modes_tracing():
            size = 2 * x.shape[0] * ((x.shape[1] + 1) // 2) * x.shape[2]
        return x.new_ones(size + 1)

    with multiply_sizes_pairwise():
        traced = make_fx(halved, tracing_mode="symbolic")(torch.ones(4, 6, 3))
    assert traced(torch.ones(5, 9, 7)).shape == (2 * 5 * 5 * 7 + 1,)
