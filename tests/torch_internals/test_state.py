"""Parameters and buffers as they are registered now."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autosplit
from autosplit.torch_internals.state import StateReader, any_referenced


def test_a_reader_sees_tensors_and_submodules_that_were_added_replaced_or_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3, bias=False)))
    reader = StateReader(model)

    def check() -> None:
        state = dict([*model.named_parameters(), *model.named_buffers()])
        read = reader.read()
        assert read.keys() == state.keys()
        assert all(read[name] is tensor for name, tensor in state.items())

    check()
    model[0].bias = nn.Parameter(model[0].bias.detach().clone())
    check()
    model[1].register_parameter("scale", nn.Parameter(model[0].bias.detach().clone()))
    check()
    del model[1].scale
    check()
    model[1].register_buffer("mean", model[0].bias.detach().clone())
    check()
    model[1][0] = nn.Linear(2, 3)
    check()
    model[1][0]._parameters = dict(nn.Linear(2, 3)._parameters)
    check()
    model[1].append(nn.Linear(3, 3))
    check()
    model[1].append(nn.Sequential(nn.Linear(3, 3)))
    check()
    model[1][2].append(nn.Linear(3, 3))
    check()
    del model[1]
    check()


def test_a_reader_returns_the_same_object_until_a_tensor_or_its_name_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reader = StateReader(model)
    first = reader.read()
    assert reader.read() is first
    model[1].bias = nn.Parameter(model[1].bias.detach().clone())
    second = reader.read()
    assert second is not first
    assert first["1.bias"] is not second["1.bias"]
    model.add_module("last", model[1])
    delattr(model, "1")
    assert [*reader.read()] == ["0.weight", "0.bias", "last.weight", "last.bias"]
    model[0].register_parameter("scale", model[0].weight)
    del model[0].weight
    assert [*reader.read()] == ["0.bias", "0.scale", "last.weight", "last.bias"]


def test_a_reader_without_some_parameters_reads_those_that_are_there() -> None:
    model = nn.Linear(2, 2, bias=False)
    reader = StateReader(model)
    state = reader.read()
    assert [*state] == ["weight"]
    assert reader.read() is state


def test_a_call_reads_the_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    split, x = autosplit.split(nn.Linear(3, 3)), torch.randn(2, 3)
    split(x)
    reads, read = [], StateReader.read

    def counted(reader: StateReader) -> object:
        reads.append(reader)
        return read(reader)

    monkeypatch.setattr(StateReader, "read", counted)
    split(x)
    assert len(reads) == 1
    split.unsplit.weight = nn.Parameter(torch.zeros(3, 3))
    assert torch.equal(split(x), split.unsplit(x))
    assert len(reads) == 2


def test_a_look_for_references_to_gradients_leaves_no_references() -> None:
    parameters = [*nn.Linear(2, 2).parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    users = [storage_users(parameter.grad) for parameter in parameters]
    assert not any_referenced([parameter.grad for parameter in parameters])
    assert [storage_users(parameter.grad) for parameter in parameters] == users
    view = parameters[1].grad.view(2, 1)
    assert any_referenced([parameter.grad for parameter in parameters])
    del view
    assert not any_referenced([parameter.grad for parameter in parameters])


def storage_users(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(torch._C._storage_address(tensor))
