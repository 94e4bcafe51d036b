"""Initial values: the model's own, and the same however many stages there are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autosplit import PlanError
from autosplit.planner.initialise import Initialiser, materialise_stage
from autosplit.planner.meta_model import meta_model, named_buffers, named_tensors


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
    return Initialiser(model, seed=seed)([name for name, _ in model.named_parameters()])


@pytest.mark.parametrize("factory", FACTORIES)
def test_values_are_the_same_a_few_at_a_time(factory: Callable[[], nn.Module]) -> None:
    model = meta_model(factory)
    whole = all_at_once(model)
    names = list(whole)
    for count in (2, 5):
        for part in (names[i::count] for i in range(count)):
            values = Initialiser(model)(part)
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


def test_the_seed_decides() -> None:
    model = meta_model(Scaled)
    torch.manual_seed(1)
    one = all_at_once(model, seed=1)
    state = torch.get_rng_state()
    two = all_at_once(model, seed=1)
    other = all_at_once(model, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["out.weight"], other["out.weight"])


def test_init_comes_last() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 7.0)

    values = Initialiser(meta_model(Scaled), fill)(["out.weight", "out.bias", "gain"])
    assert (values["out.weight"] == 7).all()
    assert 0 < values["out.bias"].std() < 1
    assert (values["gain"] == 0.5).all()


def on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


def test_a_model_built_on_meta_is_initialised_by_its_modules() -> None:
    model = on_meta(lambda: Scaled().inner)
    names = [*dict(model.named_parameters()), *named_buffers(model)]
    values = Initialiser(model)(names)
    assert 0.05 < values["0.weight"].std() < 0.2
    assert (values["1.running_var"] == 1).all()
    assert values["1.num_batches_tracked"] == 0
    part = Initialiser(model)(["0.bias"])
    assert torch.equal(part["0.bias"], values["0.bias"])
    assert all(tensor.is_meta for tensor in named_tensors(model).values())


def test_init_weights_of_the_module_above_is_used() -> None:
    values = Initialiser(on_meta(Scaled))(["out.weight"])
    assert 0.005 < values["out.weight"].std() < 0.02


def test_what_nobody_initialises_is_named() -> None:
    model = on_meta(Scaled)
    with pytest.raises(PlanError, match=r"nothing initialises gain, angles: .*init=.*angles: buff"):
        Initialiser(model)(["gain", "out.weight", "angles"])

    def init(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            module.gain.fill_(2.0)

    assert (Initialiser(model, init)(["gain"])["gain"] == 2).all()


def test_another_model_from_the_factory_is_refused() -> None:
    sizes = iter([3, 4])
    model = meta_model(lambda: nn.Linear(next(sizes), 2))
    with pytest.raises(PlanError, match=r"another model.*weight"):
        Initialiser(model)(["bias"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(PlanError, match="no parameter or buffer nose"):
        Initialiser(meta_model(Scaled))(["nose"])


def test_materialise_fills_a_stage_in_place() -> None:
    model = meta_model(Scaled)
    expected = all_at_once(model)
    stage = copy.deepcopy(model)
    stage.out = nn.Linear(1, 1)  # real, so it stays
    kept = stage.out.weight
    assert materialise_stage(stage, Initialiser(model)) is stage
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert not parameter.is_meta
        if not name.startswith("out."):
            assert torch.equal(parameter, expected[name])
    assert stage.head.weight is stage.embed.weight
    assert stage.out.weight is kept


def test_materialise_keeps_dtype_and_freezing() -> None:
    model = meta_model(Scaled).bfloat16()
    model.gain.requires_grad_(False)
    stage = materialise_stage(copy.deepcopy(model), Initialiser(model))
    assert {p.dtype for p in stage.parameters()} == {torch.bfloat16}
    assert not stage.gain.requires_grad
    assert stage.out.weight.requires_grad


def test_materialise_needs_values_only_for_meta() -> None:
    module = nn.Linear(2, 2)
    assert materialise_stage(module, None) is module
    with pytest.raises(PlanError, match=r"weight, bias: on the meta device.*initialise\(\)"):
        materialise_stage(meta_model(lambda: nn.Linear(2, 2)), None)
