"""F run again from its inputs: the same results, bit for bit, and nothing done twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autosplit import SplitError, Stage
from tests.zoo import CASES, Made

MODELS = {
    **{name: CASES[name].build for name in ("attention", "counter", "in_place")},
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)),
}


def _batch(name: str) -> Tensor:
    return CASES[name].batch() if name in CASES else torch.randn(5, 6)


def _results(stage: Stage, batches: list[Tensor], again: tuple[int, ...]) -> dict[str, Tensor]:
    """Whatever comes of some microbatches, of which those of ``again`` are recomputed."""
    torch.manual_seed(5)
    results: dict[str, Tensor | None] = {}
    for m, batch in enumerate(batches):
        keep = "inputs" if m in again else "saved"
        (results[f"output {m}"],) = stage.forward(m, [batch.clone()], keep=keep)
        torch.rand(3)  # other stages draw as well
    for m in range(len(batches)):
        if m in again:
            stage.recompute(m)
        grad = torch.ones_like(results[f"output {m}"])
        (results[f"input {m}"],) = stage.backward_input(m, [grad])
        stage.backward_weight(m)
    results["generator"] = torch.get_rng_state()
    stage.publish()
    results |= {f"gradient {name}": p.grad for name, p in stage.module.named_parameters()}
    results |= dict(stage.module.named_buffers())
    return {name: tensor for name, tensor in results.items() if tensor is not None}


@pytest.mark.parametrize("name", MODELS)
def test_everything_is_bit_for_bit_as_without(name: str) -> None:
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    batches = [_batch(name) for _ in range(3)]
    example = batches[0].clone().requires_grad_(batches[0].is_floating_point())
    expected = _results(Stage(model, [example]), batches, ())
    result = _results(Stage(twin, [example]), batches, (0, 2))
    assert result.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(result[key], tensor), key


def dropped_weight() -> nn.Module:
    """Draws where its weight lies, whose input may lie elsewhere."""
    return Made(
        lambda m, x: x.to(m.weight.device) * nn.functional.dropout(m.weight),
        weight=nn.Parameter(torch.ones(64)),
    )


def test_generators_of_where_the_weights_lie_are_put_back() -> None:
    stage = Stage(dropped_weight(), [torch.ones(64, device="cpu", requires_grad=True)])
    (output,) = stage.forward(0, [torch.ones(64, device="cpu")], keep="inputs")
    torch.rand(3)
    stage.recompute(0)
    (grad,) = stage.backward_input(0, [torch.ones(64)])
    assert torch.equal(grad.to(output.device), output)


def test_autocast_of_the_forward_counts() -> None:
    grads = []
    for keep in ("saved", "inputs"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(5, 6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stage = Stage(model, [torch.zeros(5, 6, requires_grad=True)])
            (output,) = stage.forward(0, [x], keep=keep)
        if keep == "inputs":
            stage.recompute(0)
        stage.backward(0, [torch.ones_like(output)])
        grads.append(dict(stage.gradients))
    assert output.dtype is torch.bfloat16
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name])


def test_only_inputs_are_held_until_then() -> None:
    stage = Stage(
        nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 3)),
        [torch.zeros(5, 6, requires_grad=True)],
    )
    x = torch.randn(5, 6)
    stage.forward(0, [x])
    whole = stage.saved_bytes
    stage.forward(1, [x], keep="inputs")
    assert stage.saved_bytes == whole  # the two have their input in common
    stage.backward(0, [torch.ones(5, 3)])
    assert stage.saved_bytes == 4 * 5 * 6
    gone = StorageWeakRef(x.untyped_storage()).expired
    del x
    assert not gone()
    stage.recompute(1)
    assert stage.saved_bytes == whole
    received = stage.detach_held(1)
    assert sum(tensor.numel() for tensor in received) == whole
    stage.attach_held(1, received)
    del received
    stage.backward(1, [torch.ones(5, 3)])
    assert gone()
    assert stage.saved_bytes == 0


def test_calls_out_of_turn() -> None:
    stage = Stage(nn.Linear(3, 2), [torch.zeros(4, 3, requires_grad=True)])
    stage.forward(0, [torch.randn(4, 3)])
    with pytest.raises(SplitError, match="stage 0: microbatch 0 does not wait to be recomputed"):
        stage.recompute(0)
    stage.forward(1, [torch.randn(4, 3)], keep="inputs")
    for call in (stage.backward, stage.backward_input):
        with pytest.raises(
            SplitError, match=r"microbatch 1 kept its inputs only; call recompute\(1"
        ):
            call(1, [torch.ones(4, 2)])
    with pytest.raises(SplitError, match="microbatch 1 has run its forward"):
        stage.forward(1, [torch.randn(4, 3)])
    with pytest.raises(SplitError, match="microbatch 1 holds nothing that could be moved"):
        stage.held(1)
    stage.reset()
    assert stage.saved_bytes == 0


@pytest.mark.parametrize("what", ["input", "parameter"])
def test_a_tensor_written_since_the_forward_is_named(what: str) -> None:
    model = nn.Linear(3, 2)
    stage = Stage(model, [torch.zeros(4, 3, requires_grad=True)])
    x = torch.randn(4, 3)
    stage.forward(0, [x], keep="inputs")
    with torch.no_grad():
        (x if what == "input" else model.bias).add_(1.0)
    name = "bias" if what == "parameter" else r"\w*"
    with pytest.raises(SplitError, match=f"between the forward and its backward: {name}"):
        stage.recompute(0)


def test_a_module_without_a_backward_has_nothing_to_recompute() -> None:
    stage = Stage(nn.Linear(3, 2).requires_grad_(False), [torch.zeros(4, 3)])
    stage.forward(0, [torch.randn(4, 3)], keep="inputs")
    stage.recompute(0)
    assert stage.saved_bytes == 0
