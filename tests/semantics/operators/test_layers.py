"""Layers of torch with operators of their own: attention, recurrent cells, linear algebra."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, Stage
from autosplit.torch_internals import TORCH
from tests.gradients import assert_same_gradients
from tests.semantics.against_autograd import assert_equals_autograd, leaves, within
from tests.zoo import Made, layered

# --- linear algebra that checks whether it succeeded: split as anything else, and it still checks


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, torch.ones(4, 4)),
    "cholesky": torch.linalg.cholesky,
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0],
    "eig": lambda a: torch.view_as_real(torch.linalg.eig(a)[0]).square().sum(-1),
}
RAISING = ("inv", "solve", "cholesky")


def algebra(*names: str) -> nn.Module:
    def forward(model: Any, x: Tensor) -> Any:
        h = model.linear(x)
        square = h @ h.mT + torch.eye(4)
        return {name: model.second(FUNCTIONS[name](square)) for name in names}

    return layered(forward)


def test_split_in_one_graph() -> None:
    split = assert_equals_autograd(algebra(*FUNCTIONS), leaves(4, 4), fullgraph=True)
    (functions,) = split.functions
    assert functions.late_parameters


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "eager") for name in RAISING), ("inv", "inductor")]
)
def test_raises_as_in_eager_mode(name: str, backend: str) -> None:
    if TORCH < (2, 12) and backend == "inductor":
        pytest.skip("Inductor of torch 2.11 leaves the check out, in torch.compile, too")
    model = Made(lambda m, x: FUNCTIONS[name](x * m.weight), weight=nn.Parameter(torch.ones(4, 4)))
    split = autosplit.split(copy.deepcopy(model), fullgraph=True, backend=backend)
    split(torch.eye(4)).sum().backward()
    with pytest.raises(torch.linalg.LinAlgError) as theirs:
        model(torch.zeros(4, 4))
    with pytest.raises(torch.linalg.LinAlgError) as ours:
        split(torch.zeros(4, 4))
    assert str(ours.value) == str(theirs.value)


def test_checks_of_the_backward_stay_in_the_backward() -> None:
    split = autosplit.split(algebra("eig"), fullgraph=True)
    graphs = split.capture(torch.randn(4, 4)).graphs.graphs()
    check = torch.ops.aten._linalg_check_errors.default
    results = [n for n, g in graphs.items() if g.graph.find_nodes(op="call_function", target=check)]
    assert "forward" not in results
    assert {"backward", "backward_input"} <= {*results}


# --- products of groups of rows, each with a matrix of its own: what experts do -------------------


def mixture(experts: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=1, num_key_value_heads=2, num_local_experts=3
    )
    if not hasattr(config, "_experts_implementation"):
        pytest.skip("this transformers has loops over experts only")
    config._experts_implementation = experts
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


def test_experts_of_transformers_by_the_advice() -> None:
    """A loop over those that have tokens is no graph; the error says what is one."""
    ids = torch.randint(20, (2, 6))
    with pytest.raises(CaptureError, match="experts_implementation='grouped_mm'"):
        autosplit.split(mixture("eager"), fullgraph=True)(input_ids=ids)
    split = autosplit.split(mixture("grouped_mm"), fullgraph=True)
    split(input_ids=ids)
    assert "Deferred: 100.0 %" in split.report()


# --- recurrent layers: one graph, or in parts around what torch traces otherwise ------------------


CASES: dict[str, dict[str, Any]] = {
    "LSTM": {"num_layers": 2, "batch_first": True},
    "GRU": {"bidirectional": True},
    "RNN": {"bias": False, "nonlinearity": "relu"},
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "dropout": {"num_layers": 2, "dropout": 0.5},
    "coarse": {"dtype": torch.bfloat16},
}


def layers(name: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return getattr(nn, name)(4, 4, **CASES[name], **options)


@pytest.mark.parametrize("name", CASES)
def test_equals_autograd(name: str) -> None:
    batch = [(torch.randn(2, 2, 4),) for _ in range(2)]
    # Autograd runs a fused kernel where there is one.
    split = assert_equals_autograd(layers(name), batch, compare=within(2e-6))
    whole = name != "LSTM" or TORCH >= (2, 13)
    assert len(split.functions) == whole


@pytest.mark.parametrize("kind", OTHERWISE)
def test_recurrent_layers_that_torch_traces_otherwise(kind: str) -> None:
    layer = layers("GRU", **OTHERWISE[kind])
    batch = [(torch.randn(2, 2, 4, dtype=layer.weight_hh_l0.dtype),) for _ in range(2)]
    assert_equals_autograd(Followed(layer), batch)
    with pytest.raises(CaptureError, match=r"gru.*nn\.Dropout between single layers"):
        autosplit.split(layer, fullgraph=True)(*batch[0])


class Followed(nn.Module):
    """A recurrent layer between two products."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        dtype = layer.weight_hh_l0.dtype
        self.first = nn.Linear(4, 4, dtype=dtype)
        self.inner, self.head = layer, nn.Linear(8, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.first(x))[0])


def test_models_in_parts_with_a_state_of_their_own() -> None:
    batch = [tuple(torch.randn(1, 3, 4).requires_grad_() for _ in range(2)) for _ in range(2)]
    model = Made(
        lambda m, *given: (torch._dynamo.graph_break(), m.gru(*given))[1], gru=nn.GRU(4, 4)
    )
    assert_equals_autograd(model, batch, compare=within(2e-6))


def test_torch_compile() -> None:
    model = layers("RNN")
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="autosplit", fullgraph=True)
    batch = torch.randn(2, 2, 4)
    with torch._dynamo.config.patch(allow_rnn=True):
        for module in (compiled, plain):
            for output in [module(batch)[0], module(batch)[0]]:
                output.square().sum().backward()
    autosplit.backward_weight(model)
    assert_same_gradients(model, plain, exact=False)


# --- layers of torch that look at the values of an attention mask ---------------------------------


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
OPEN = torch.zeros(5, 5)


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 1)


def batch(*masks: Tensor) -> list[dict[str, Tensor]]:
    return [{"src": torch.randn(2, 5, 8), "mask": mask} for mask in masks]


TRUTH = [CAUSAL.isinf(), torch.zeros(5, 5, dtype=torch.bool)]


@pytest.mark.parametrize("masks", [(CAUSAL, OPEN), (OPEN, CAUSAL), TRUTH], ids=str)
def test_a_graph_for_any_mask(masks: tuple[Tensor, ...]) -> None:
    split = assert_equals_autograd(encoder(), batch(*masks), fullgraph=True)
    assert len(split.functions) == 1


def test_the_kernel_is_that_for_causal_masks_where_the_caller_says_so() -> None:
    split = autosplit.split(encoder().eval(), fullgraph=True)
    for options in ({"is_causal": True}, {}):
        split(torch.randn(2, 5, 8), mask=CAUSAL, **options)
        graph = split.functions[-1].graphs.forward.graph
        (result,) = [n for n in graph.nodes if "scaled_dot_product" in str(n.target)]
        assert (True in result.args) is bool(options)


MASKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "buffer": lambda m, x: m.mask,
    "made": lambda m, x: nn.Transformer.generate_square_subsequent_mask(x.shape[1]),
    "random": lambda m, x: torch.where(torch.rand(5, 5) > 2, -torch.inf, 0.0),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_of_the_module(kind: str) -> None:
    inputs = [(torch.randn(2, 5, 8),) for _ in range(2)]
    model = Made(
        lambda m, x: m.encoder(x, mask=MASKS[kind](m, x)),
        encoder=encoder(),
        mask=nn.Buffer(CAUSAL.clone()),
    )
    split = assert_equals_autograd(model, inputs, fullgraph=True)
    assert len(split.functions) == 1


def test_a_stage_takes_masks() -> None:
    module = Made(lambda m, x, mask: m.encoder(x, mask=mask), encoder=encoder().eval())
    x = torch.randn(2, 5, 8)
    stage = Stage(module, (x, OPEN))
    for microbatch, mask in enumerate((CAUSAL, OPEN)):
        (output,) = stage.forward(microbatch, [x.clone(), mask.clone()])
        assert torch.allclose(output, module(x, mask), atol=1e-6)
