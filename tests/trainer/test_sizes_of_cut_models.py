"""Microbatches of other sizes than the example's, in a model that the trainer has cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autosplit.errors import BatchError
from autosplit.pipeline import StageOptions
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline.trainer_options import grouped

VOCABULARY = 16
LENGTHS = [[5, 9, 7], [8, 8], [12, 3, 10]]
"""The lengths of the microbatches of each step; the model is cut for a length of 8."""


class Attending(nn.Module):
    """Attention over tokens; reads sizes, drops in training, and branches on long texts."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)
        self.drop = nn.Dropout(drop)

    def forward(self, tokens: Tensor) -> Tensor:
        samples, length = tokens.shape
        x = self.embedding(tokens) + torch.arange(length, device=tokens.device)[:, None] / 8
        for layer in self.layers:
            heads = layer(x).view(samples, length, 2, 4).transpose(1, 2)
            attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            x = x + self.drop(attended.transpose(1, 2).reshape((*x.size()[:-1], 8)))
            if length > 11:
                x = x / 2
        return self.head(x)


def model(drop: float = 0.0) -> Attending:
    torch.manual_seed(0)
    return Attending(drop)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(samples: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randint(VOCABULARY, (samples, length), generator=generator)


def listed(lengths: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [(tokens(2, n, seed), tokens(2, n, seed + 1)) for n in lengths]


def trainer(drop: float = 0.0, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model(drop),
        loss_fn,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        **grouped(
            stages=2,
            example=tokens(2, 8),
            microbatches=4,
            timeout=60.0,
            stage_options=StageOptions(planning={"costs": "estimate", "cut_at": ["layers.1"]}),
            **options,
        ),
    )


def assert_parameters(engine: PipelineTrainer, whole: nn.Module) -> None:
    for module in engine.modules.values():
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name


def captures(engine: PipelineTrainer) -> list[int]:
    stages: Any = engine.stages.values()
    return [len(stage.captured) for stage in stages]


class Plain:
    """The model, trained by plain autograd in this process."""

    def __init__(self) -> None:
        self.whole = model()
        self._optimizer = torch.optim.SGD(self.whole.parameters(), lr=0.05)

    def step(self, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        losses = losses_of(self.whole, pairs)
        for loss in losses:
            (loss / len(pairs)).backward(retain_graph=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses.detach()


def losses_of(whole: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([loss_fn(whole(x), y) for x, y in pairs])


@ranks(2)
def test_lists_of_other_lengths_have_the_bits_of_plain_autograd() -> None:
    """Also after a batch that the model cannot take, which is refused."""
    plain, wrong = Plain(), (tokens(2, 8)[None], tokens(2, 8))
    with trainer() as engine:
        for step, lengths in enumerate(LENGTHS):
            pairs = listed(lengths, step)
            losses = plain.step(pairs)
            for call in (engine.step, engine.evaluate):
                with pytest.raises(BatchError, match="number of dimensions must be the same"):
                    call(microbatches=[wrong])
            if step % 2:
                assert torch.equal(engine.evaluate(microbatches=pairs), losses)
            assert torch.equal(engine.step(microbatches=pairs), losses)
            assert_parameters(engine, plain.whole)
        # For the example's length, for short texts, and for those on which the model branches.
        assert captures(engine) == [3]


@ranks(2)
def test_dropout_is_that_of_one_process_at_every_length() -> None:
    pairs = [listed([8, 5]), listed([3, 9, 7], 1)]
    expected = [torch.zeros(len(lists)) for lists in pairs]
    if dist.get_rank() == 0:  # the other rank would do the same
        with trainer(drop=0.5, ranks=1) as alone:
            for step, losses in enumerate(expected):
                torch.manual_seed(step)
                losses.copy_(alone.step(microbatches=pairs[step]))
    for losses in expected:
        dist.broadcast(losses, 0)
    with trainer(drop=0.5) as engine:
        for step, losses in enumerate(expected):
            torch.manual_seed(step)
            assert torch.equal(engine.step(microbatches=pairs[step]), losses)


@ranks(2)
def test_a_smaller_last_batch_and_other_microbatch_sizes_are_trained() -> None:
    """Of ten samples, which are cut into three, three, three and one."""
    whole, x, y = model(), tokens(10, 8), tokens(10, 8, 1)
    expected = losses_of(whole, [*zip(x.split(3), y.split(3), strict=True)])
    expected.mean().backward()
    with trainer() as engine:
        assert torch.equal(engine.evaluate((x, y)), expected.detach())
        assert torch.equal(engine.forward_backward((x, y)), expected.detach())
        for gradients in engine.gradients().values():
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, whole.get_parameter(name).grad)


@ranks(2)
def test_replicas_take_lists_of_different_lengths() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    share, whole = mesh["dp_replicate"].get_local_rank(), model()
    lists = [[[8, 8], [5, 9, 7]], [[11, 3], [8]]]
    with trainer(mesh=mesh, schedule="zb-h1") as engine:
        for step, lengths in enumerate(lists):
            pairs = [listed(of_list, 2 * step + at) for at, of_list in enumerate(lengths)]
            losses = losses_of(whole, pairs[0] + pairs[1])
            losses.mean().backward()
            of_rank = losses.detach()[share * len(pairs[0]) :][: len(pairs[share])]
            assert torch.equal(engine.forward_backward(microbatches=pairs[share]), of_rank)
        for module in engine.modules.values():
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)


class Pooled(nn.Module):
    """Pools over positions; the head scales by a number that depends on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.linear(self.embedding(tokens))).mean(1)
        return self.head(x) * (2 if tokens.shape[1] > 11 else 3)


def pooled_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets[:, 0])


def test_a_stage_that_cannot_see_which_branch_was_taken_is_refused() -> None:
    whole = Pooled()
    with PipelineTrainer(
        whole,
        pooled_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        stages=2,
        ranks=1,
        example=tokens(2, 8),
        microbatches=4,
        stage_options=StageOptions(planning={"costs": "estimate", "cut_at": ["head"]}),
    ) as engine:
        for lengths in ([8, 8], [5, 9]):
            pairs = listed(lengths)
            expected = torch.stack([pooled_loss(whole(x), y) for x, y in pairs])
            assert torch.equal(engine.step(microbatches=pairs), expected.detach())
        with pytest.raises(BatchError, match="stage 1 computes other operations"):
            engine.step(microbatches=listed([12, 8]))
        assert torch.equal(engine.step(microbatches=pairs), expected.detach())


class WithLoss(nn.Module):
    """Called by keywords; computes its loss itself, beside other outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model()

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(ids) * mask[..., None]
        return {"loss": loss_fn(logits, labels), "logits": logits}


def test_a_model_with_its_own_loss_is_called_by_keywords_at_every_length() -> None:
    whole = WithLoss()

    def batch(samples: int, length: int) -> dict[str, Tensor]:
        ids, labels = tokens(samples, length), tokens(samples, length, 1)
        return {"ids": ids, "mask": (ids > 2).float(), "labels": labels}

    with PipelineTrainer(
        whole,
        lambda output, _: output["loss"],
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        stages=2,
        ranks=1,
        example=batch(2, 8),
        microbatches=2,
        stage_options=StageOptions(planning={"costs": "estimate", "cut_at": ["body.layers.1"]}),
    ) as engine:
        inputs = [batch(*shape) for shape in [(2, 5), (3, 11), (4, 9)]]
        expected = torch.stack([whole(**keywords)["loss"] for keywords in inputs]).detach()
        pairs = [(keywords, torch.zeros(len(keywords["labels"]))) for keywords in inputs]
        assert torch.equal(engine.step(microbatches=pairs), expected)


class Passing(nn.Module):
    """Returns an input that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model()

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(ids), labels


def test_a_model_returns_an_input_that_it_does_not_read_at_every_length() -> None:
    whole = Passing()
    with PipelineTrainer(
        whole,
        lambda output, _: loss_fn(*output),
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        stages=2,
        ranks=1,
        example={"ids": tokens(2, 8), "labels": tokens(2, 8, 1)},
        microbatches=2,
        stage_options=StageOptions(planning={"costs": "estimate", "cut_at": ["body.layers.1"]}),
    ) as engine:
        for lengths in ([8, 8], [5, 9], [7, 10]):
            pairs = listed(lengths)
            expected = torch.stack([loss_fn(*whole(*pair)) for pair in pairs]).detach()
            rows = [({"ids": ids, "labels": labels}, torch.zeros(2)) for ids, labels in pairs]
            assert torch.equal(engine.step(microbatches=rows), expected)
