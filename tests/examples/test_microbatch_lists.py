"""Examples whose steps have lists of microbatches train on two ranks as in one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from examples import packed_documents, reward_weighted
from tests.kept_ranks import ranks


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@ranks(2)
def test_packed_documents() -> None:
    torch.manual_seed(0)
    (loss,) = packed_documents.train(steps=1)
    assert abs(loss - math.log(packed_documents.WORDS)) < 1.0


@ranks(2)
def test_answers_weighted_by_rewards() -> None:
    torch.manual_seed(0)
    losses = reward_weighted.train(steps=10)
    assert losses[-1] < losses[0]
    if dist.get_rank() == 0:  # the other rank would do the same
        torch.manual_seed(0)
        assert losses == reward_weighted.train(steps=10, ranks=1)
