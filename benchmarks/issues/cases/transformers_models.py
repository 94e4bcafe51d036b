"""Models of transformers as they come."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from .. import gradients
from ..case import ENGINE, Case, Thread
from ..schedules import CPU, chunks

_MICROBATCHES = 2


class _Logits(nn.Module):
    """Only for the gradients to compare with: the report calls the model itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids)


def _loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def _model() -> tuple[nn.Module, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config), torch.randint(64, (4, 8))


def _stock() -> str:
    model, ids = _model()
    part = ids.chunk(_MICROBATCHES)[0]
    expected = gradients.plain([_Logits(model)], chunks(_MICROBATCHES, ids, ids), _loss)
    split = {"model.layers.0": SplitPoint.END}
    pipe = pipeline(
        model,
        mb_args=(),
        mb_kwargs={"input_ids": part, "attention_mask": torch.ones_like(part)},
        split_spec=split,
    )
    stage = pipe.build_stage(dist.get_rank(), CPU)
    schedule = Schedule1F1B(stage, _MICROBATCHES, loss_fn=_loss)
    if stage.is_first:
        schedule.step(input_ids=ids, attention_mask=torch.ones_like(ids))
    else:
        schedule.step(target=ids)
    found = {f"0.model.{n}": p.grad for n, p in stage.submod.named_parameters()}
    return gradients.check(found, expected)


def _ours() -> str:
    import autosplit

    from ..training import Trainer

    model, ids = _model()
    expected = gradients.plain([_Logits(model)], chunks(_MICROBATCHES, ids, ids), _loss)
    plan = autosplit.partition(
        model,
        {"input_ids": ids.chunk(_MICROBATCHES)[0]},
        cut_at=["model.layers.1"],
        microbatches=_MICROBATCHES,
        costs="estimate",
    )
    named = {f"0.model.{name}": p for name, p in model.named_parameters()}
    with Trainer(plan, _MICROBATCHES, _loss, named=named) as trainer:
        return gradients.check(trainer.step(({"input_ids": ids}, ids)), expected)


CASES = [
    Case(
        "models-of-transformers-with-rope",
        (Thread("pytorch/pytorch", 184361),),
        "a Llama that pipeline() has cut fails: a stage misses the rotary embedding",
        _stock,
        _ours,
        seen="Expected positional argument",
        by=ENGINE,
    ),
]
