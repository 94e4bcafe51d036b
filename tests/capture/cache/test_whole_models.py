"""Models as people have them are found again, and what is found computes the same."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autosplit
from autosplit.capture import joint_graph
from autosplit.capture.cache.split_graph_cache import VARIABLE

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGES = {"image_size": 8, "patch_size": 4, "num_labels": 2}

Case = tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]]]


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(3, 15).reshape(2, 6)
    return {"input_ids": ids, "labels": ids}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}


CASES: list[Case] = [
    ("llama", "AutoModelForCausalLM", {}, tokens),
    ("bert", "AutoModelForMaskedLM", {}, tokens),
    ("vit", "AutoModelForImageClassification", IMAGES, image),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setenv("AUTOSPLIT_REGIONS", "0")  # whole graphs are kept
    return tmp_path / "kept"


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[Tensor], autosplit.SplitModule]:
    """Gradients of a step under a fixed seed, and the split module."""
    torch.manual_seed(1)
    split = autosplit.split(model, fullgraph=True)
    split(**batch)["loss"].backward()
    split.backward_weight()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found, split


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_model_of_transformers_is_found_again(case: Case) -> None:
    """Its results are dataclasses that leave out what is None."""
    kind, family, sizes, inputs = case
    config = transformers.AutoConfig.for_model(kind, **SIZES, **sizes)
    model, batch = getattr(transformers, family).from_config(config).train(), inputs()
    torch.manual_seed(1)
    model(**batch).loss.backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    before = counters["autosplit"].copy()
    made, first = step(model, batch)
    read, second = step(model, batch)
    after = counters["autosplit"] - before
    assert (after["graph_miss"], after["graph_hit"], after["graph_bypass"]) == (1, 1, 0)
    assert "Graph cache: made and kept." in first.report()
    assert "Graph cache: found." in second.report()
    assert len(expected) == len(made) == len(read) > 10
    assert all(map(torch.equal, expected, made))
    assert all(map(torch.equal, expected, read))
    assert type(second(**batch)) is type(model(**batch))


class Checkpointed(nn.Module):
    """A region that is recomputed: Dynamo's graph holds another graph."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = scale

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.sin(self.first(x)) * self.scale))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": checkpoint(self.block, x, use_reentrant=False).sum()}


class Selective(Checkpointed):
    """A region of which a function says what is recomputed."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        context = functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
        )
        found = checkpoint(self.block, x, use_reentrant=False, context_fn=context)
        return {"loss": found.sum()}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class OwnBackward(Checkpointed):
    """A backward of the user's, which scales."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        apply: Callable[..., Tensor] = Scaled.apply
        return {"loss": apply(self.first(x), self.scale).sum()}


def outcome(model: nn.Module) -> tuple[str, Tensor]:
    """What the cache had, and a gradient."""
    x = torch.ones(2, 4, requires_grad=True)
    _, split = step(model, {"x": x})
    assert x.grad is not None
    return split.report().partition("Graph cache: ")[2].partition(".\n")[0], x.grad


@pytest.mark.parametrize("build", [Checkpointed, OwnBackward])
def test_a_graph_inside_the_graph_is_part_of_the_key(build: type[Checkpointed]) -> None:
    for scale in (2.0, 3.0):
        for expected in ("made and kept", "found"):
            model = build(scale)
            said, gradient = outcome(model)
            x = torch.ones(2, 4, requires_grad=True)
            model(x)["loss"].backward()
            assert said == expected
            assert torch.equal(gradient, x.grad)


def test_a_function_that_decides_what_is_recomputed_is_in_no_key() -> None:
    said, _ = outcome(Selective())
    assert said == "made anew by every process (a function decides what is recomputed)"


def test_why_a_graph_is_made_anew_is_said_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise TypeError("needs numbers")

    monkeypatch.setattr(joint_graph, "foresee", fail)
    before = counters["autosplit"]["graph_bypass"]
    _, split = step(Checkpointed(), {"x": torch.ones(2, 4, requires_grad=True)})
    assert counters["autosplit"]["graph_bypass"] == before + 1
    assert (
        "Graph cache: made anew by every process (its results are known only when it is traced "
        "(TypeError: needs numbers))." in split.report()
    )


def test_results_that_tracing_finds_to_be_others_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path
) -> None:
    foresee = joint_graph.foresee

    def wrongly(*args: Any) -> Any:
        found = foresee(*args)
        return type(found)(("another",), found.leaves, found.spec)

    monkeypatch.setattr(joint_graph, "foresee", wrongly)
    _, split = step(Checkpointed(), {"x": torch.ones(2, 4, requires_grad=True)})
    assert "(tracing found other results than were predicted)" in split.report()
    assert not folder.exists()
