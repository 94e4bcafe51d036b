"""The example models: stages are parts of the whole, and they learn."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.compare import Workload
from autosplit.errors import PipelineError
from examples import models
from examples.decoder import Attention, Decoder, LlamaConfig, RMSNorm, Rotary
from examples.stages import stage_layers

TINY: dict[str, Any] = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 48, "seq": 16}
FACTORIES: dict[str, Callable[[], Workload]] = {
    "llama": lambda: models.llama(**TINY),
    "llama_tied": lambda: models.llama(**TINY, tied=True),
    "mlp": lambda: models.mlp(features=64, width=64, layers=4, microbatch_size=16),
    "convnet": lambda: models.convnet(width=4, layers=4, image=8, microbatch_size=4),
}


@pytest.fixture(params=FACTORIES)
def workload(request: pytest.FixtureRequest) -> Workload:
    return FACTORIES[request.param]()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_one_after_the_other_are_the_whole_model(workload: Workload, stages: int) -> None:
    whole = workload.stage_fn(0, 1)
    inputs, targets = workload.batch_fn(0, workload.microbatch_size)
    x = inputs
    for index in reversed(range(stages)):
        for name, value in workload.stage_fn(index, stages).state_dict().items():
            assert torch.equal(value, whole.state_dict()[name]), name
    for index in range(stages):
        x = workload.stage_fn(index, stages)(x)
    output = whole(inputs)
    assert torch.equal(x, output)
    assert torch.equal(workload.loss_fn(x, targets), workload.loss_fn(output, targets))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_holds_its_part_of_the_parameters(workload: Workload, stages: int) -> None:
    names = list(workload.stage_fn(0, 1).state_dict())
    parts = [list(workload.stage_fn(index, stages).state_dict()) for index in range(stages)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(parts)


def test_building_leaves_the_callers_generator_alone(workload: Workload) -> None:
    state = torch.get_rng_state()
    workload.stage_fn(0, 2)
    workload.batch_fn(0, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_workload_can_be_sent_to_another_process(workload: Workload) -> None:
    copy = pickle.loads(pickle.dumps(workload))
    mine, theirs = workload.batch_fn(3, 2), copy.batch_fn(3, 2)
    assert all(map(torch.equal, mine, theirs))
    weights = workload.stage_fn(1, 2).state_dict()
    assert all(torch.equal(weights[k], v) for k, v in copy.stage_fn(1, 2).state_dict().items())


def test_the_loss_falls(workload: Workload) -> None:
    model = workload.stage_fn(0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(20):
        inputs, targets = workload.batch_fn(step, 2 * workload.microbatch_size)
        loss = workload.loss_fn(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3]), losses


@pytest.mark.parametrize("tied", [False, True])
def test_the_untrained_decoder_guesses_bytes_evenly(tied: bool) -> None:
    workload = models.llama(**{**TINY, "dim": 128}, tied=tied)
    inputs, targets = workload.batch_fn(0, 4)
    loss = workload.loss_fn(workload.stage_fn(0, 1)(inputs), targets)
    assert loss.item() == pytest.approx(math.log(256), rel=0.03)


def test_a_tied_head_is_one_parameter_in_one_stage_and_two_copies_in_several() -> None:
    workload = models.llama(**TINY, tied=True)
    whole = workload.stage_fn(0, 1)
    assert isinstance(whole, Decoder)
    assert whole.embedding is not None
    assert whole.head is not None
    assert whole.head.weight is whole.embedding.weight
    assert "head.weight" not in dict(whole.named_parameters())
    assert workload.shared_parameters(1) == ()

    first, last = workload.stage_fn(0, 3), workload.stage_fn(2, 3)
    ((one, other),) = workload.shared_parameters(3)
    assert (one, other) == ((0, "embedding.weight"), (2, "head.weight"))
    assert torch.equal(first.get_parameter(one[1]), last.get_parameter(other[1]))
    assert models.llama(**TINY).shared_parameters(3) == ()


def test_seeds_change_the_weights() -> None:
    one, other = (models.llama(**TINY, seed=seed).stage_fn(0, 1) for seed in (0, 1))
    same = [
        name
        for name, value in one.named_parameters()
        if torch.equal(value, other.get_parameter(name))
    ]
    assert [name for name in same if "norm" not in name] == []


def test_the_decoder_does_not_look_ahead() -> None:
    model = Decoder(LlamaConfig(**TINY))
    inputs = torch.arange(16)[None]
    changed = inputs.clone()
    changed[0, 9] = 255
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


def test_the_rotation_keeps_lengths_and_depends_on_the_distance_only() -> None:
    rotary = Rotary(head_dim=8, seq=12, base=10000.0)
    query, key = torch.randn(8), torch.randn(8)
    turned = rotary(query.expand(12, 8))
    torch.testing.assert_close(turned.norm(dim=-1), query.norm().expand(12))
    scores = turned @ rotary(key.expand(12, 8)).T
    torch.testing.assert_close(scores[5, 2], scores[10, 7])
    assert not torch.isclose(scores[5, 2], scores[5, 3])


def test_rms_norm_matches_torch() -> None:
    x = torch.randn(3, 8)
    norm = RMSNorm(8, eps=1e-6)
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (8,), norm.weight, 1e-6))


def test_query_heads_share_key_and_value_heads_in_order() -> None:
    grouped = Attention(LlamaConfig(**TINY))
    full = Attention(LlamaConfig(**{**TINY, "kv_heads": 4}))
    weights = grouped.state_dict()
    for name in ("key.weight", "value.weight"):
        heads = weights[name].view(2, 8, 32)
        weights[name] = heads[[0, 0, 1, 1]].reshape(32, 32)
    full.load_state_dict(weights)
    x, rotary = torch.randn(2, 16, 32), Rotary(8, 16, 10000.0)
    torch.testing.assert_close(grouped(x, rotary), full(x, rotary))


def test_bfloat16_autocast_runs() -> None:
    model, (inputs,) = models.llama_whole(**TINY)
    with torch.autocast("cpu", torch.bfloat16):
        low: Tensor = model(inputs)
    assert low.dtype is torch.bfloat16
    torch.testing.assert_close(low.float(), model(inputs), atol=0.05, rtol=0.05)


def test_llama_whole_is_the_workloads_model() -> None:
    model, (inputs,) = models.llama_whole(**TINY)
    workload = models.llama(**TINY)
    assert torch.equal(inputs, workload.batch_fn(0, 2)[0])
    assert torch.equal(model(inputs), workload.stage_fn(0, 1)(inputs))


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (5, 3, [[0, 1], [2, 3], [4]]),
        (3, 3, [[0], [1], [2]]),
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_layers_are_divided_evenly(layers: int, stages: int, expected: list[list[int]]) -> None:
    assert [list(stage_layers(layers, index, stages)) for index in range(stages)] == expected


def test_more_stages_than_layers_are_refused(workload: Workload) -> None:
    with pytest.raises(PipelineError) as error:
        workload.stage_fn(0, 5)
    assert str(error.value) == (
        "cannot divide 4 layers over 5 stages; use at most 4 stages or at least 5 layers"
    )


def test_a_stage_that_does_not_exist_is_refused(workload: Workload) -> None:
    with pytest.raises(PipelineError, match=r"^stage index must be in 0\.\.1, got 2$"):
        workload.stage_fn(2, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 30}, "dim must be a multiple of 2 * heads = 8, got 30"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"kv_heads": 0}, "heads must be a multiple of kv_heads, got 4 and 0"),
        ({"depth": 3}, "unknown setting 'depth' of LlamaConfig; known: vocabulary, dim, layers"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(PipelineError) as error:
        models.llama(**{**TINY, **settings})
    assert str(error.value).startswith(message)
