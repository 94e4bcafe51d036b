"""Skeletons have no parameters in memory, and everything else as it should be."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from autosplit import PlanError
from autosplit.planner.meta_model import (
    meta_model,
    named_buffers,
    named_tensors,
    stand_in_tensors,
)
from tests.interpreters import printed_by


class Tables(nn.Module):
    """Tied weights, buffers of both kinds, a frozen parameter and one that has an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((6,), 3.0), requires_grad=False)
        self.norm.weight.kind = "norm"  # type: ignore[attr-defined]
        self.register_buffer("angles", torch.arange(6.0).cos(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)) * self.scale * self.angles)


def test_parameters_are_meta_and_buffers_real() -> None:
    model, real = meta_model(Tables), Tables()
    for (name, parameter), (other, expected) in zip(
        model.named_parameters(), real.named_parameters(), strict=True
    ):
        assert name == other
        assert parameter.is_meta
        assert isinstance(parameter, nn.Parameter)
        assert parameter.shape == expected.shape
        assert parameter.stride() == expected.stride()
        assert parameter.requires_grad == expected.requires_grad
    assert model.norm.weight.kind == "norm"
    buffers = named_buffers(real)
    assert all(torch.equal(b, buffers[name]) for name, b in named_buffers(model).items())
    assert named_buffers(model).keys() == buffers.keys()


def test_tied_parameters_stay_tied() -> None:
    def before_registration() -> nn.Module:
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        weight = nn.Parameter(torch.zeros(2, 2))
        model[0].weight, model[1].weight = weight, weight
        return model

    model = meta_model(Tables)
    assert model.head.weight is model.embed.weight
    model = meta_model(before_registration)
    assert model[0].weight is model[1].weight


def test_parameters_of_other_threads_stay_real() -> None:
    made: list[nn.Module] = []

    def factory() -> nn.Module:
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    assert meta_model(factory).weight.is_meta
    assert not made[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta  # and the hook is gone


def test_a_factory_may_return_inputs_too() -> None:
    model, inputs = meta_model(lambda: (nn.Linear(2, 2), torch.ones(1, 2)))
    assert model.weight.is_meta
    assert torch.equal(inputs, torch.ones(1, 2))


def test_a_factory_without_a_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"must return an nn\.Module.* got a int"):
        meta_model(lambda: 3)


def test_stand_ins_have_the_right_form_and_go_away() -> None:
    model = meta_model(Tables)
    before = named_tensors(model)
    with stand_in_tensors(model):
        for name, tensor in named_tensors(model).items():
            assert tensor.device.type == "cpu"
            assert tensor.shape == before[name].shape
            assert tensor.stride() == before[name].stride()
            assert isinstance(tensor, nn.Parameter) == isinstance(before[name], nn.Parameter)
        assert model.head.weight is model.embed.weight
        assert model.angles is before["angles"]
    assert all(tensor is before[name] for name, tensor in named_tensors(model).items())


def test_stand_ins_elsewhere_are_one_element() -> None:
    model = meta_model(Tables)
    with stand_in_tensors(model, "meta"):  # in place of an accelerator
        weight = model.head.weight
        assert weight.shape == (11, 6)
        assert weight.untyped_storage().nbytes() == weight.element_size()
        assert weight is model.embed.weight


def test_stand_ins_leave_after_an_error() -> None:
    model = meta_model(Tables)
    with pytest.raises(KeyError), stand_in_tensors(model):
        raise KeyError
    assert model.head.weight.is_meta


LARGE = """
import resource
import torch
from torch import nn
from autosplit.planner.meta_model import meta_model, stand_in_tensors

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
build = lambda: nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))
model = meta_model(build)
torch.use_deterministic_algorithms(True)  # has torch fill fresh memory
with stand_in_tensors(model):
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ru_maxrss has other units")
def test_a_gigabyte_of_parameters_takes_none() -> None:
    layer = 4096 * 4096 * 4 // 1024
    assert int(printed_by(LARGE)) < 3 * layer
