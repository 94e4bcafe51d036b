"""Calls that NCCL needs and Gloo does not, tested with stand-ins for torch's."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autosplit.errors import PipelineError
from autosplit.mesh.costs import device_of_group
from autosplit.mesh.dimensions import RankLayout
from autosplit.ranks.fault_store import Fault, FaultStore
from autosplit.ranks.first_error import Guard, LostPeerError, RankActivity
from autosplit.ranks.groups import Groups, abort_groups, await_device
from autosplit.ranks.session import choose_device
from tests.kept_ranks import ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@ranks(3)
def test_each_direction_of_a_pair_has_a_group() -> None:
    """As under NCCL."""
    groups, rank = Groups(3, CPU, 30.0), dist.get_rank()
    _new = groups._new
    groups.connect([(1, 2)])
    groups.connect([(1, 2), (0, 2)])
    with (
        mock.patch.object(groups, "_backend", "nccl"),
        mock.patch.object(groups, "_new", lambda members, backend: _new(members, "gloo")),
        mock.patch.object(groups, "isend", wraps=groups.isend) as isend,
    ):
        groups.connect([(0, 1)])  # over NCCL there goes a message each way before a step
    assert isend.call_count == (rank != 2)
    remaining = [peer for peer in range(3) if peer != rank]
    buffers = [torch.zeros(1) for _ in remaining]
    works = [groups.irecv(buffer, peer) for buffer, peer in zip(buffers, remaining, strict=True)]
    works += [groups.isend(torch.tensor([10.0 * rank + peer]), peer) for peer in remaining]
    for item in works:
        assert item is not None
        item.wait()
    groups.destroy()
    assert [float(buffer) for buffer in buffers] == [10.0 * peer + rank for peer in remaining]


def test_groups_are_aborted_all_at_once() -> None:
    """Each waits for a device on which messages of the others hang."""
    all_begun = threading.Barrier(3)

    class Group:
        def abort(self) -> None:
            all_begun.wait(timeout=20)

    abort_groups([Group(), Group(), Group()])
    abort_groups([])


def test_external_groups_are_aborted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example groups of a mesh, in which tensor-parallel stages run collectives."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    groups, lent = Groups(1, CUDA, 30.0), mock.Mock()
    groups.add_external_group(lent)
    groups.close()
    lent.abort.assert_called_once_with()


def test_a_communicator_is_made_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its first message, when others may hold the device already."""
    built = mock.Mock()
    monkeypatch.setattr(dist, "new_group", built)
    groups = Groups(1, CUDA, 30.0)
    groups.new_group_of_sets([[0, 1]])
    assert built.call_args.kwargs["device_id"] == CUDA
    groups._new([0, 1], "gloo")
    assert built.call_args.kwargs["device_id"] is None


@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_with_nccl_is_on_the_gpu(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    """Also where ``get_backend`` says "undefined": the user left the backend to torch."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of_group() == CUDA
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of_group() == torch.device("cpu")


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch, "empty", lambda size, device: torch.zeros(size))  # as if there
    layout = RankLayout.alone(1)
    assert choose_device("cuda", layout) == CUDA
    assert choose_device("cuda:3", layout).index == 3
    with pytest.raises(PipelineError, match=r"of type 'cpu', but .* go to cuda:1: use init_device"):
        choose_device("cuda", replace(layout, device_type="cpu"))


def test_one_rank_goes_to_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = RankLayout.alone(1)
    with torch.device("meta"):
        assert choose_device(None, layout) == torch.device("cpu")  # for models without memory
    monkeypatch.setattr(torch, "get_default_device", lambda: CUDA)
    assert choose_device(None, layout) == CUDA


@ranks(2)
def test_control_stays_on_the_cpu_under_another_default_device() -> None:
    groups = Groups(2, CPU, 30.0)
    with torch.device("meta"):
        groups.barrier()
    groups.destroy()


class _Stream:
    """Is never done."""

    def query(self) -> bool:
        return False


def test_a_wait_for_the_device_ends_when_another_rank_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = FaultStore(dist.HashStore())  # type: ignore[attr-defined]  # documented, not in __all__
    guard = Guard(0, faults, lambda: None, RankActivity(), None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream())
    await_device(torch.device("cpu"), guard, 0.0)
    with pytest.raises(LostPeerError, match="for its device"):
        await_device(CUDA, guard, 0.0)
    faults.post(Fault(1, "1F0", "ValueError: bad weather"))
    with pytest.raises(LostPeerError, match="another rank failed"):
        await_device(CUDA, guard, 20.0)
