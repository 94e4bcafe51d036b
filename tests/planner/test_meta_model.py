"""Meta models have no parameters in memory, and everything else as it should be; their values are
the same however many stages there are.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autosplit import PlanError
from autosplit.planner.meta_model import (
    initial_values,
    materialise_stage,
    meta_model,
    named_tensors,
    stand_in_tensors,
)


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
    buffers = dict(real.named_buffers())
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()


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
    module: list[nn.Module] = []

    def factory() -> nn.Module:
        thread = threading.Thread(target=lambda: module.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    assert meta_model(factory).weight.is_meta
    assert not module[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta  # and the hook is gone


def test_a_factory_without_a_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"must return an nn\.Module.* got a int"):
        meta_model(lambda: 3)


def test_stand_ins_have_the_right_form_and_go_away() -> None:
    model = meta_model(Tables)
    earlier = named_tensors(model)
    with stand_in_tensors(model):
        for name, tensor in named_tensors(model).items():
            assert tensor.device.type == "cpu"
            assert tensor.shape == earlier[name].shape
            assert tensor.stride() == earlier[name].stride()
            assert isinstance(tensor, nn.Parameter) == isinstance(earlier[name], nn.Parameter)
        assert model.head.weight is model.embed.weight
        assert model.angles is earlier["angles"]
    assert all(tensor is earlier[name] for name, tensor in named_tensors(model).items())


def test_stand_ins_elsewhere_are_one_element() -> None:
    model = meta_model(Tables)
    with stand_in_tensors(model, "meta"):  # in place of an accelerator
        weight = model.head.weight
        assert weight.shape == (11, 6)
        assert weight.untyped_storage().nbytes() == weight.element_size()
        assert weight is model.embed.weight


def test_parameters_that_have_moved_have_stand_ins_beside_the_others() -> None:
    model = Tables()
    weight = model.head.weight
    with stand_in_tensors(model, "meta", moved=True):  # in place of an accelerator
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not model.angles.is_meta
    assert model.head.weight is weight


class Scaled(nn.Module):
    """Initialised by its modules, by ``_init_weights``, and by its constructor afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 30)
        self.inner = nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30))
        self.head = nn.Linear(30, 40, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(40, 40)
        self.gain = nn.Parameter(torch.full((3,), 0.5))
        self.apply(self._init_weights)
        with torch.no_grad():
            self.out.weight.mul_(100)
        self.register_buffer("angles", torch.arange(6.0).cos(), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)


def copied() -> nn.Module:
    """Its layers are copies, and the constructor writes to them once more."""
    return nn.Transformer(8, 2, 2, 1, 16, batch_first=True)


def from_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=30)
    return transformers.MambaForCausalLM(config)


FACTORIES = [Scaled, copied, from_transformers]


def all_at_once(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    return initial_values(model, [name for name, _ in model.named_parameters()], seed=seed)


@pytest.mark.parametrize("factory", FACTORIES)
def test_values_are_the_same_a_few_at_a_time(factory: Callable[[], nn.Module]) -> None:
    model = meta_model(factory)
    whole = all_at_once(model)
    names = list(whole)
    for count in (2, 5):
        for part in (names[i::count] for i in range(count)):
            values = initial_values(model, part)
            assert list(values) == part
            assert all(torch.equal(values[name], whole[name]) for name in part)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("factory", FACTORIES)
def test_values_are_distributed_as_the_constructor_has_them(
    factory: Callable[[], nn.Module],
) -> None:
    values = all_at_once(meta_model(factory))
    for name, expected in factory().named_parameters():
        std, mean = torch.std_mean(expected)
        if expected.numel() >= 64 or std == 0:
            torch.testing.assert_close(values[name].std(), std, rtol=0.4, atol=1e-6)
            torch.testing.assert_close(values[name].mean(), mean, rtol=0, atol=std.item() + 1e-6)


def test_a_model_that_came_onto_meta_otherwise_has_no_values() -> None:
    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(PlanError, match=r"initialises gain, angles: .*autosplit\.meta_model\(f"):
        initial_values(model, ["gain", "angles"])


def test_another_model_from_the_factory_is_refused() -> None:
    sizes = iter([3, 4])
    model = meta_model(lambda: nn.Linear(next(sizes), 2))
    with pytest.raises(PlanError, match=r"another model.*weight"):
        initial_values(model, ["bias"])


def test_materialise_fills_a_stage_in_place() -> None:
    model = meta_model(Scaled)
    expected = all_at_once(model)
    stage = copy.deepcopy(model)
    stage.out = nn.Linear(1, 1)  # real, so it stays
    kept = stage.out.weight
    assert materialise_stage(stage, partial(initial_values, model)) is stage
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert not parameter.is_meta
        if not name.startswith("out."):
            assert torch.equal(parameter, expected[name])
    assert stage.head.weight is stage.embed.weight
    assert stage.out.weight is kept
