"""What NCCL needs that Gloo does not, without a GPU: by stand-ins for torch's calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autosplit.pipeline.communication.communicators import await_device
from autosplit.pipeline.communication.faults import Board, Fault, Guard, LostPeerError

CUDA = torch.device("cuda", 1)


class _Stream:
    """Is never done."""

    def query(self) -> bool:
        return False


def test_a_wait_for_the_device_ends_when_another_rank_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Board(dist.HashStore())  # type: ignore[attr-defined]  # documented, not in __all__
    guard = Guard(0, board, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream())
    await_device(torch.device("cpu"), guard, 0.0)
    with pytest.raises(LostPeerError, match="for its device"):
        await_device(CUDA, guard, 0.0)
    board.post(Fault(1, "1F0", "ValueError: bad weather"))
    with pytest.raises(LostPeerError, match="another rank failed"):
        await_device(CUDA, guard, 20.0)
