"""Blocks that a model has several of are captured once a kind, with autograd's gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autosplit
from autosplit.capture import export
from autosplit.passes.analysis.operator_cost import weight_flops
from autosplit.runtime.gradient_dependence import GradientDependence
from tests.capture.regions.blocks import WIDTH, Block, Plain, Residual, Stack, kinds
from tests.semantics.against_autograd import assert_equals_autograd


class Dropping(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Careful(Residual):
    """Modes are entered and left in every block."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax(-1, keepdim=True) + 1
        with torch.autocast("cpu", torch.bfloat16):
            y = self.up(self.norm(x))
        return x + self.down(y.float()) / scale


class Checkpointed(Residual):
    """Two regions in each block are recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: torch.tanh(self.up(self.norm(x))), x, use_reentrant=False)
        return x + checkpoint(lambda y: torch.relu(self.down(y)), y, use_reentrant=False)


class Deciding(Plain):
    """Every block holds graphs of both branches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cond(x.sum() > 0, torch.cos, torch.sin, (x,)))


class Pair(Plain):
    """Two results, of which nobody reads the second: its gradient is none, and not zero."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), (x - x).log()


class Pairs(Stack):
    def __init__(self) -> None:
        super().__init__(Pair, 2)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class Detaching(Pairs):
    """What gets no gradient is read."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, other = layer(x)
            x = x + other.detach().isnan()
        return self.head(x)


class Listing(Stack):
    """All hidden states are returned: their gradients are summed in autograd's order."""

    def forward(self, x: Tensor) -> Any:
        states = [self.first(x)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return {"states": states, "head": self.head(states[-1])}


class InPlace(Stack):
    """The model writes into the output of a block."""

    def forward(self, x: Tensor) -> Any:
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x)
            total.add_(x)
            x = x.mul_(0.5)
        return self.head(total)


class Twice(Stack):
    """Every block is called twice."""

    def forward(self, x: Tensor) -> Any:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.head(x)


class Transposing(Stack):
    """Gradients of what blocks return are laid out in other ways than that."""

    def forward(self, x: Tensor) -> Any:
        x = x[:WIDTH]
        for layer in self.layers:
            x = layer(x).t().contiguous()
        return self.head(x)


class Modes(Stack):
    """Blocks are called under modes that the model enters."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = self.layers[0](self.layers[1](x))
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[2](self.layers[3](x))
        return self.head(x.float())


class Recomputed(Stack):
    """The model recomputes its blocks."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class TwoStacks(Stack):
    """An encoder, and a decoder that reads what it makes."""

    def __init__(self) -> None:
        super().__init__(count=2)
        self.decoder = nn.ModuleList(map(Plain, range(2)))

    def forward(self, x: Tensor) -> Any:
        y = x
        for layer in self.layers:
            x = layer(x)
        for layer in self.decoder:
            y = torch.sigmoid(layer(y)) + x
        return self.head(y)


class ReadAgain(Stack):
    """The model reads the inputs of blocks again, after their calls."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * x
        return self.head(x)


class Offset(Plain):
    """Reads its input once: a sum of gradients belongs to another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.5)


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Rounded(Plain):
    """Any custom function might return no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + Rounding.apply(x)


class Weighing(Stack):
    """The model reads a tensor that is neither parameter nor buffer."""

    weight = torch.linspace(2.5, 3.5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x * self.weight)
        return result * self.weight[1:]


BLOCKS = (
    Dropping,
    Careful,
    Checkpointed,
    Deciding,
)
REFUSED: dict[str, Callable[[], Stack]] = {
    "transposing": lambda: Transposing(count=2),
    "modes": lambda: Modes(count=4),
    "recomputed": lambda: Recomputed(count=2),
    "twice": lambda: Twice(count=2),
    "read by a function": lambda: ReadAgain(Rounded, 2),
}
READ_AGAIN: dict[str, Callable[[], Stack]] = {
    "later": lambda: ReadAgain(count=2),
    "once": lambda: ReadAgain(Offset, 2),
    "listing": lambda: Listing(count=2),
    "in place": lambda: InPlace(count=2),
    "two stacks": TwoStacks,
}


def batches() -> list[tuple[Tensor, ...]]:
    return [(torch.randn(5, WIDTH, requires_grad=True),) for _ in range(2)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda kind: kind.__name__)
def test_blocks(block: Block) -> None:
    split = assert_equals_autograd(Stack(block, 2), batches())
    assert kinds(split) == [2]


@pytest.mark.parametrize("model", [Pairs, Detaching])
def test_results_without_gradients_need_no_other_trace_of_the_model(model: type[Stack]) -> None:
    traced = mock.Mock(wraps=export.fullgraph_capture)
    with mock.patch.object(export, "fullgraph_capture", traced):
        assert kinds(assert_equals_autograd(model(), batches())) == [2]
    modules = [type(call.args[0]) for call in traced.call_args_list]
    assert modules.count(model) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_blocks_are_captured_with_models_that_do_more_than_call_them(name: str) -> None:
    assert kinds(assert_equals_autograd(REFUSED[name](), batches())) == []


def test_tensors_that_the_model_reads_are_constants_of_the_inlined_graphs() -> None:
    split = assert_equals_autograd(Weighing(count=2), batches())
    functions = split.functions[-1]
    assert kinds(split) == [2]
    for module in (*functions.graphs.graphs().values(), functions.source("backward")):
        for node in module.graph.find_nodes(op="get_attr"):
            assert torch.equal(getattr(module, str(node.target)), Weighing.weight)


@pytest.mark.parametrize("name", READ_AGAIN)
def test_gradients_of_inputs_that_models_read_again_are_summed_in_order(name: str) -> None:
    split = assert_equals_autograd(READ_AGAIN[name](), batches())
    assert len(kinds(split)) == 1


def test_blocks_that_are_the_models_own_submodules() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(Plain, range(2)))
    assert kinds(assert_equals_autograd(model, batches())) == [2]


def test_without_gradients() -> None:
    split = autosplit.split(Stack())
    x = torch.randn(5, WIDTH)
    with torch.no_grad():
        functions = split.capture(x)
        (result,) = functions.forward(dict(split.named_parameters()), [x]).outputs
        assert torch.equal(result, split.unsplit(x))
    assert kinds(split) == [3]


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSPLIT_REGIONS", "0")
    assert kinds(assert_equals_autograd(Stack(), batches())) == []


@pytest.mark.parametrize("memory", ["lean", 4096])
def test_settings_that_choose_among_weight_gradients_choose_among_all(memory: str | int) -> None:
    blocks = nn.Sequential(*map(Residual, range(4)))
    split = assert_equals_autograd(blocks, batches(), memory=memory)
    assert kinds(split) == []
    waiting, early = weight_flops(split.functions[-1].graphs)
    assert waiting >= 0.55 * (waiting + early) > 0


def test_deferred_tensors_are_those_without_regions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (x,) = batches()[0]
    kept = []
    for switch in ("1", "0"):
        monkeypatch.setenv("AUTOSPLIT_REGIONS", switch)
        split = autosplit.split(Stack())
        split(x).sum().backward()
        kept.append(split.pending_bytes)
    assert kept[0] == kept[1]


class Shifted(Plain):
    """A parameter whose gradient is what arrives, and two results: of the whole and of a part."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.shift = nn.Parameter(torch.randn(2, 3, WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return super().forward(x) + self.shift, y


class Parts(Stack):
    def __init__(self) -> None:
        super().__init__(Shifted)

    def forward(self, x: Tensor) -> Any:
        x, parts = self.first(x), []
        for layer in self.layers:
            x, part = layer(x)
            parts.append(part)
        return x, *parts


@pytest.mark.parametrize("model", [Stack, Parts])
def test_calls_of_blocks_tell_of_gradients_what_their_operators_do(model: type[Stack]) -> None:
    split = autosplit.split(model())
    split(torch.randn(2, 3, WIDTH, requires_grad=True))
    assert kinds(split) == [3]
    functions = split.functions[-1]
    received, outputs = functions.capture.inputs, [*enumerate(functions.output_names)]
    tangents = [(name, at) for at, name in outputs if name in functions.tangent_specs]
    ours = functions.dependence
    flat = GradientDependence(functions.graphs, received, tangents)
    assert ours.borrowed == flat.borrowed
    assert ours.borrowed or model is not Parts
    assert ours.inseparable == flat.inseparable
    assert ours.inseparable or model is not Parts
    for come in itertools.product([None, True], repeat=len(outputs)):
        assert ours.missing(come) == flat.missing(come)
        assert ours.inputs_given(come) == flat.inputs_given(come)


SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 11}
FAMILIES = {
    "gpt2": {"num_hidden_layers": 2},  # takes the cache by position
    "gemma2": {"num_hidden_layers": 2, "head_dim": 4, "sliding_window": 4},  # windows in turn
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_transformers(name: str) -> None:
    """As people call it: with a cache of keys and values."""
    transformers = pytest.importorskip("transformers")
    sizes = SIZES | FAMILIES[name] | {"max_position_embeddings": 8, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(name, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 11, (2, 6))
    split = autosplit.split(model)
    results, gradients, caches = [], [], []
    for face in (split, model):
        model.zero_grad()
        output = face(input_ids=ids, labels=ids)
        layers = output.past_key_values.layers
        keys = [layer.keys for layer in layers]
        (output.loss + keys[1].sum()).backward()
        results.append([output.loss, *keys])
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        caches.append([_plain_attributes(layer) for layer in layers])
    for one, other in (results, gradients):
        assert all(map(torch.equal, one, other))
    assert caches[0] == caches[1]
    # Layers with windows look like the others, and are captured with the model.
    assert kinds(split) == ([] if name == "gemma2" else [sizes["num_hidden_layers"]])


def _plain_attributes(layer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if not torch.is_tensor(value)}
