"""The example models: stages are parts of the whole, and they learn."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosplit.errors import PipelineError
from examples import models
from examples.decoder import Decoder
from examples.workload import Workload

TINY: dict[str, Any] = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 48, "seq": 16}
FACTORIES: dict[str, Callable[[], Workload]] = {
    "llama": lambda: models.llama_workload(**TINY),
    "llama_tied": lambda: models.llama_workload(**TINY, tied=True),
    "mlp": lambda: models.mlp_workload(features=64, width=64, layers=4, microbatch_size=16),
    "convnet": lambda: models.convnet_workload(width=4, layers=4, image=8, microbatch_size=4),
}


@pytest.fixture(params=FACTORIES)
def workload(request: pytest.FixtureRequest) -> Workload:
    return FACTORIES[request.param]()


def test_stages_one_after_the_other_are_the_whole_model(workload: Workload) -> None:
    stages = 3
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


def test_a_workload_can_be_sent_to_another_process(workload: Workload) -> None:
    copy = pickle.loads(pickle.dumps(workload))
    mine, theirs = workload.batch_fn(3, 2), copy.batch_fn(3, 2)
    assert all(map(torch.equal, mine, theirs))
    weights = workload.stage_fn(1, 2).state_dict()
    assert all(torch.equal(weights[k], v) for k, v in copy.stage_fn(1, 2).state_dict().items())


def test_a_tied_head_is_one_parameter_in_one_stage_and_two_copies_in_several() -> None:
    workload = models.llama_workload(**TINY, tied=True)
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
    assert models.llama_workload(**TINY).shared_parameters(3) == ()


@pytest.mark.parametrize("name", ["llama", "mlp", "convnet"])
def test_a_whole_model_puts_out_its_loss(name: str) -> None:
    workload: Workload = getattr(models, f"{name}_workload")()
    model, (inputs, targets) = getattr(models, name)()
    loss = workload.loss_fn(workload.stage_fn(0, 1)(inputs), targets)
    assert torch.equal(model(inputs, targets), loss)


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
        models.llama_workload(**{**TINY, **settings})
    assert str(error.value).startswith(message)
