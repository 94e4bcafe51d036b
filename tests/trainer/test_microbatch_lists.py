"""A step takes any list of microbatches: other lengths, another number of them, objects."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autosplit.errors import BatchError
from autosplit.ranks.control import Control
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline.trainer_options import grouped

VOCABULARY, WIDTH = 16, 8
LENGTHS = [[5, 9, 7], [3, 4], [12, 3, 8, 8, 10, 11], [6] * 4]
"""The lengths of the microbatches of each step."""

Pair = tuple[Tensor, Tensor]


class Embedding(nn.Module):
    """The first stage: embeds tokens, attends, and drops."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[:, None]
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]
        return self.drop(torch.tanh(self.linear(x)))


def stage(index: int, drop: float = 0.0) -> nn.Module:
    torch.manual_seed(index)
    return nn.Linear(WIDTH, VOCABULARY) if index else Embedding(drop)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def listed(lengths: list[int], seed: int = 0) -> list[Pair]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    shapes = [(2, length) for length in lengths]
    return [
        (
            torch.randint(VOCABULARY, shape, generator=generator),
            torch.randint(VOCABULARY, shape, generator=generator),
        )
        for shape in shapes
    ]


def trainer(drop: float = 0.0, **options: Any) -> PipelineTrainer:
    arguments = {"microbatches": 4, "timeout": 60.0, **options}
    return PipelineTrainer(
        [stage(index, drop) for index in range(2)],
        loss_fn,
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        **grouped(**arguments),
    )


class Plain:
    """Both stages, trained by plain autograd in this process.

    Attributes:
        modules: the stages by index.
    """

    def __init__(self) -> None:
        self.modules = {index: stage(index) for index in range(2)}
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=0.5)

    def losses(self, pairs: list[Pair]) -> list[Tensor]:
        return [loss_fn(self.modules[1](self.modules[0](x)), y) for x, y in pairs]

    def evaluate(self, pairs: list[Pair]) -> Tensor:
        return torch.stack(self.losses(pairs)).detach()

    def step(self, pairs: list[Pair], weights: list[float] | None = None) -> Tensor:
        """Train the weighted mean of the losses, which are returned."""
        losses, weights = self.losses(pairs), weights or [1.0] * len(pairs)
        for loss, weight in zip(losses, weights, strict=True):
            loss.backward(torch.tensor(weight / sum(weights)))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).detach()


def assert_parameters(engine: PipelineTrainer, other: Any) -> None:
    for index, module in engine.modules.items():
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, other[index].get_parameter(name)), (index, name)


def captures(engine: PipelineTrainer) -> set[int]:
    stages: Any = engine.stages.values()
    return {len(engine_stage.captured) for engine_stage in stages}


def test_bits_of_plain_autograd_with_one_capture_for_all_lengths_and_counts() -> None:
    plain = Plain()
    with trainer(ranks=1) as engine:
        for step, lengths in enumerate(LENGTHS):
            pairs = listed(lengths, step)
            assert torch.equal(engine.evaluate(microbatches=pairs), plain.evaluate(pairs))
            counts = engine.measure(None, lambda logits, _: logits.shape[1], microbatches=pairs)
            assert counts == lengths
            expected = plain.step(pairs)
            assert torch.equal(engine.step(microbatches=pairs), expected)
            assert_parameters(engine, plain.modules)
            metrics = engine.metrics()
            assert metrics["loss"] == pytest.approx(float(expected.mean()))
            tokens = metrics["tokens_per_s"] * metrics["seconds"]
            assert tokens == pytest.approx(2 * sum(lengths))
        assert captures(engine) == {1}


@pytest.mark.parametrize("options", [{"schedule": "zb-h1"}, {"schedule": "1f1b", "weights": "2bp"}])
@ranks(2)
def test_two_ranks_have_the_bits_of_plain_autograd_without_messages_about_lengths(
    options: dict[str, Any],
) -> None:
    rank, gather, plain = dist.get_rank(), Control.gather, Plain()
    with (
        trainer(**options) as engine,
        mock.patch.object(Control, "gather", autospec=True, side_effect=gather) as gathers,
    ):
        for step, lengths in enumerate(LENGTHS):
            pairs, weights = listed(lengths, step), [float(length) for length in lengths]
            gathers.reset_mock()
            losses = engine.step(microbatches=pairs, weight=weights)
            assert torch.equal(losses, plain.step(pairs, weights))
            assert (gathers.call_count == 0) == (step > 0)
            assert_parameters(engine, plain.modules)
        parts = [(x if rank == 0 else None, y if rank == 1 else None) for x, y in pairs]
        assert torch.equal(engine.evaluate(microbatches=parts), plain.evaluate(pairs))
        pairs = listed([13, 4])
        assert torch.equal(engine.step_async(microbatches=pairs).wait(), plain.step(pairs))
        assert captures(engine) == {1}


@ranks(2)
def test_two_ranks_drop_as_one() -> None:
    with trainer(0.5) as engine, trainer(0.5, ranks=1) as alone:
        for step, lengths in enumerate(LENGTHS):
            pairs, losses = listed(lengths, step), []
            for each in (engine, alone):
                torch.manual_seed(step)
                losses.append(each.step(microbatches=pairs))
            assert torch.equal(*losses)
            assert_parameters(engine, alone.modules)
        assert torch.equal(engine.evaluate(microbatches=pairs), alone.evaluate(microbatches=pairs))


@ranks(2)
def test_replicas_take_lists_of_different_lengths() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    share, plain = mesh["dp_replicate"].get_local_rank(), Plain()
    with trainer(mesh=mesh) as engine:
        for step, weighted in itertools.product(range(2), (False, True)):
            lists = [listed([5, 9, 7], step), listed([3 + step, 4], 10 + step)]
            losses = engine.evaluate(microbatches=lists[share])
            torch.testing.assert_close(losses, plain.evaluate(lists[share]))
            weights = [[float(x.numel()) if weighted else 1.0 for x, _ in pairs] for pairs in lists]
            expected = plain.step([*lists[0], *lists[1]], [*weights[0], *weights[1]])
            losses = engine.step(
                microbatches=lists[share], weight=weights[share] if weighted else None
            )
            torch.testing.assert_close(losses, expected[3 * share :][: len(lists[share])])
            numbers = torch.tensor([*weights[0], *weights[1]])
            mean = (expected * numbers).sum() / numbers.sum()
            assert engine.metrics()["loss"] == pytest.approx(float(mean))
            for index, module in engine.modules.items():
                for name, parameter in module.named_parameters():
                    torch.testing.assert_close(parameter, plain.modules[index].get_parameter(name))


SHORT = "microbatch 1 does not fit stage 1: stage 1 cannot take its inputs"
LISTS: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "empty": (([],), ("must be a list of pairs (inputs, targets), at least one",)),
    "a target that does not fit": (
        ([listed([6])[0], (listed([4])[0][0], listed([3])[0][1])],),
        (SHORT,),
    ),
    "another dtype": (
        ([listed([6])[0], (torch.zeros(2, 6), listed([6])[0][1])],),
        ("microbatches[1].inputs is a tensor of 2 dimensions and float32, but microbatches[0]",),
    ),
    "no targets": (
        ([(listed([6])[0][0], None)],),
        ("rank 1 refuses its batch: microbatches[0]: a stage", "microbatches[0]: a stage of this"),
    ),
    "lists of other lengths": (
        (listed([6, 2]), listed([6, 2, 4])),
        ("rank 0 passes a list of 2 microbatches, and rank 1 passes a list of 3",),
    ),
    "other sizes": (
        (listed([6, 2]), listed([6, 3])),
        ("microbatches[1].inputs is int64[2, 2] on rank 0 and int64[2, 3] on rank 1",),
    ),
}


@ranks(2)
def test_a_list_that_one_rank_refuses_is_refused_on_all_before_anything_runs() -> None:
    rank, plain = dist.get_rank(), Plain()
    with trainer() as engine:
        for later in (False, True):
            for lists, texts in LISTS.values():
                with pytest.raises(BatchError) as caught:
                    engine.step(microbatches=lists[rank % len(lists)])
                expected = texts[rank % len(texts)]
                assert expected in str(caught.value), later
            for weight in ([1.0, 2.0], [1.0, 0.0, 1.0]):
                with pytest.raises(BatchError, match="weight"):
                    engine.step(microbatches=listed([6, 2, 4]), weight=weight)
            pairs = listed([6, 2, 4])
            assert torch.equal(engine.step(microbatches=pairs), plain.step(pairs))
        assert_parameters(engine, plain.modules)


@dataclasses.dataclass
class Documents:
    """Tokens with a bias for each, and a factor."""

    tokens: Tensor
    bias: Tensor
    factor: float


class FromDocuments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = stage(0)

    def forward(self, documents: Documents) -> Tensor:
        x = self.embedding(documents.tokens)
        return x * documents.factor + documents.bias[..., None]


def test_inputs_and_targets_are_any_objects() -> None:
    modules = nn.ModuleList([FromDocuments(), stage(1)])
    lists = [
        [
            (Documents(x, torch.rand(x.shape), factor), {"labels": y})
            for (x, y), factor in zip(listed(lengths), itertools.cycle([0.5, 2.0]))
        ]
        for lengths in LENGTHS[:2]
    ]

    def loss(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return loss_fn(logits, targets["labels"])

    with PipelineTrainer(
        modules,
        loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        microbatches=4,
        ranks=1,
    ) as engine:
        for pairs in lists:
            expected = torch.stack([loss(modules[1](modules[0](x)), y) for x, y in pairs]).detach()
            assert torch.equal(engine.step(microbatches=pairs), expected)
        assert captures(engine) == {1, 3}  # a number needs captures of its own


def test_objects_that_a_stage_cannot_take_are_refused() -> None:
    pairs = listed([6, 2])
    (x, y), *_ = pairs
    lists = {
        "an object of class dict": [({"x": x}, y) for x, y in pairs],
        "an object of class ndarray": [(x.numpy(), y) for x, y in pairs],
        "an object of class str": [("text", y) for _, y in pairs],
        "a tensor, an object of class dict": [(x, {"y": y}) for x, y in pairs],
        "sparse tensor": [(x.to_sparse(), y) for x, y in pairs],
        "meta device": [(x.to("meta"), y) for x, y in pairs],
    }
    with trainer(ranks=1) as engine:
        engine.step(microbatches=pairs)
        for text, microbatches in lists.items():
            with pytest.raises(BatchError, match=rf"(?s)microbatch.*{text}"):
                engine.step(microbatches=microbatches)
        for arguments in ({"batch": (x, y)}, {"target": y}):
            with pytest.raises(BatchError, match="got both"):
                engine.step(**arguments, microbatches=pairs)
        engine.step(microbatches=pairs)


def test_a_batch_that_does_not_divide_has_a_smaller_last_microbatch() -> None:
    (x, y), *_ = listed([6])
    for limit in (None, "1GiB"):
        plain = Plain()
        with trainer(ranks=1, memory_limit=limit) as engine:
            for rows in (8, 7, 5):
                batch = x.repeat(4, 1)[:rows], y.repeat(4, 1)[:rows]
                cut = [*zip(*(part.chunk(4) for part in batch), strict=True)]
                assert torch.equal(engine.step(batch), plain.step(cut))
            assert_parameters(engine, plain.modules)


@ranks(2)
def test_an_evaluation_refuses_a_microbatch_by_its_number_and_the_next_one_runs() -> None:
    plain = Plain()
    with trainer() as engine:
        pairs = listed([5, 9, 7])
        (ids, targets), others = pairs[1], [pairs[0], pairs[2]]
        misfits = {
            "stage 0": (ids + VOCABULARY, targets),  # no such token
            "stage 1": (ids, targets[:, 1:]),
        }
        for stage_name, misfit in misfits.items():
            for _ in range(2):  # the second time, the plan of the step is known
                with pytest.raises(BatchError, match=f"microbatch 1 does not fit {stage_name}: "):
                    engine.evaluate(microbatches=[pairs[0], misfit, pairs[2]])
            assert torch.equal(engine.evaluate(microbatches=pairs), plain.evaluate(pairs))
            with pytest.raises(BatchError, match=f"microbatch 2 does not fit {stage_name}: "):
                engine.measure(
                    None, lambda logits, _: logits.shape[1], microbatches=[*others, misfit]
                )
        counts = engine.measure(None, lambda logits, _: logits.shape[1], microbatches=pairs)
        assert counts == [5, 9, 7]
        assert torch.equal(engine.step(microbatches=pairs), plain.step(pairs))
