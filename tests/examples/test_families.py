"""The four families: sizes, data, and the same losses with and without split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit.errors import PipelineError
from examples import families
from examples.families import FAMILIES, PAPER, TINY, Family, by_hand
from examples.families.settings import ResNetSettings

DATA = {"resnet": "sklearn"}


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in DATA:
        pytest.importorskip(DATA[request.param])
    return str(request.param)


@pytest.fixture
def family(name: str) -> Family:
    return FAMILIES[name](**TINY[name])


@pytest.mark.parametrize(("kind", "millions"), [("bert", 335), ("mamba", 1372), ("resnet", 60.2)])
def test_paper_sizes(kind: str, millions: float) -> None:
    with torch.device("meta"):
        model, (example,) = families.paper_factory(kind)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(millions * 1e6, rel=0.01)
    assert example.is_meta
    assert example.shape[0] == PAPER[kind]["microbatch_size"]


def test_a_factory_takes_its_settings_and_refuses_others() -> None:
    model, (tokens,) = families.llama(**TINY["llama"], microbatch_size=3)
    assert tokens.shape == (3, TINY["llama"]["seq"])
    assert model(tokens).logits.shape == (*tokens.shape, TINY["llama"]["vocabulary"])
    with pytest.raises(PipelineError, match="unknown setting 'depth' of LlamaSettings"):
        families.llama(depth=3)
    with pytest.raises(PipelineError, match="unknown family 'gpt'; known: llama, bert"):
        families.factory("gpt")
    with pytest.raises(PipelineError, match="'3,x'"):
        _ = ResNetSettings(depths="3,x").resolutions


def test_layers_are_modules_and_cut_into_equal_counts(family: Family) -> None:
    model = family.build()
    assert all(isinstance(model.get_submodule(name), nn.Module) for name in family.layers)
    assert family.cut_by_hand(2) == (family.layers[2],)
    assert family.cut_by_hand(4) == family.layers[1:]
    with pytest.raises(PipelineError, match="4 layers over 5 stages"):
        family.cut_by_hand(5)


@pytest.mark.parametrize("stages", [1, 3])
def test_stages_by_hand_are_the_whole_model(name: str, family: Family, stages: int) -> None:
    cut = getattr(by_hand, name)(**TINY[name])
    modules = [cut.stage_fn(index, stages) for index in range(stages)]
    whole = family.build()
    inputs, targets = family.batch_fn(0, family.microbatch_size)
    x = inputs
    for module in modules:
        x = module(x)
    assert torch.equal(x, whole(inputs).logits)
    kept = [key for module in modules for key in module.state_dict()]
    tied = [{key for _, key in group} for group in cut.shared_parameters(stages)]
    assert sorted(kept) == sorted(whole.state_dict())
    cut.loss_fn(x, targets).backward()
    family.loss_fn(whole(inputs), targets).backward()
    grads = {key: p.grad for module in modules for key, p in module.named_parameters()}
    for key, parameter in whole.named_parameters():
        group = next((item for item in tied if key in item), {key})
        torch.testing.assert_close(sum(grads[item] for item in group), parameter.grad)
