"""The four families cut by hand into stages of equal layer counts.

`llama`, `bert`, `mamba` and `resnet` each return a Workload, whose stages are transformers' own
modules under their own names. What a stage does not hold passes its input on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from examples.families import FAMILIES, Family
from examples.stages import stage_layers
from examples.workload import Workload


@dataclass(frozen=True)
class Ends:
    """What the first and the last stage have besides layers.

    Attributes:
        first: names of what only the first stage has.
        last: names of what only the last stage has.
        enter: what the first stage does up to the end of its layers.
        go_on: the same of the others.
        leave: what the last stage does after its layers.
        tied: names of the embedding's and the head's weight, which may be one.
    """

    first: tuple[str, ...]
    last: tuple[str, ...]
    enter: Callable[[Any, Tensor], Tensor]
    go_on: Callable[[Any, Tensor], Tensor]
    leave: Callable[[Any, Tensor], Tensor]
    tied: tuple[str, str] | None = None


ENDS: Mapping[str, Ends] = {
    "llama": Ends(
        ("model.embed_tokens",),
        ("model.norm", "lm_head"),
        lambda stage, ids: stage.model(input_ids=ids).last_hidden_state,
        lambda stage, x: stage.model(inputs_embeds=x).last_hidden_state,
        lambda stage, x: stage.lm_head(x),
        ("model.embed_tokens.weight", "lm_head.weight"),
    ),
    "bert": Ends(
        ("bert.embeddings",),
        ("cls",),
        lambda stage, ids: stage.bert(ids).last_hidden_state,
        lambda stage, x: stage.bert.encoder(x).last_hidden_state,
        lambda stage, x: stage.cls(x),
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ),
    "mamba": Ends(
        ("backbone.embeddings",),
        ("backbone.norm_f", "lm_head"),
        lambda stage, ids: stage.backbone(input_ids=ids).last_hidden_state,
        lambda stage, x: stage.backbone(inputs_embeds=x).last_hidden_state,
        lambda stage, x: stage.lm_head(x),
        ("backbone.embeddings.weight", "lm_head.weight"),
    ),
    "resnet": Ends(
        ("resnet.embedder",),
        ("resnet.pooler", "classifier"),
        lambda stage, x: stage.resnet.encoder(stage.resnet.embedder(x)).last_hidden_state,
        lambda stage, x: stage.resnet.encoder(x).last_hidden_state,
        lambda stage, x: stage.classifier(stage.resnet.pooler(x)),
    ),
}


class PassOn(nn.Module):
    """In the place of a module that another stage holds."""

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return x


class HandCut(nn.Module):
    """Stage ``index`` of ``stages``: tokens or pixels, or hidden states in; hidden states or
    logits out."""

    def __init__(self, name: str, family: Family, index: int, stages: int) -> None:
        super().__init__()
        ends, whole = ENDS[name], family.build()
        mine = {family.layers[each] for each in stage_layers(len(family.layers), index, stages)}
        others = [layer for layer in family.layers if layer not in mine]
        self._first, self._last = index == 0, index == stages - 1
        others += () if self._first else ends.first
        others += () if self._last else ends.last
        for other in others:
            whole.set_submodule(other, PassOn())
        for child, module in whole.named_children():
            self.add_module(child, module)
        self._ends = ends

    def forward(self, x: Tensor) -> Tensor:
        x = self._ends.enter(self, x) if self._first else self._ends.go_on(self, x)
        return self._ends.leave(self, x) if self._last else x


def workload(name: str, **overrides: object) -> Workload:
    """A family with its data, to be trained in stages."""
    family = FAMILIES[name](**overrides)
    return Workload(
        stage_fn=functools.partial(HandCut, name, family),
        loss_fn=family.loss_fn,
        batch_fn=family.batch_fn,
        microbatch_size=family.microbatch_size,
        shared_parameters=functools.partial(_tied_parameters, name, family),
    )


def llama(**overrides: object) -> Workload:
    """Settings: LlamaSettings."""
    return workload("llama", **overrides)


def bert(**overrides: object) -> Workload:
    """Settings: BertSettings."""
    return workload("bert", **overrides)


def mamba(**overrides: object) -> Workload:
    """Settings: MambaSettings."""
    return workload("mamba", **overrides)


def resnet(**overrides: object) -> Workload:
    """Settings: ResNetSettings."""
    return workload("resnet", **overrides)


def _tied_parameters(name: str, family: Family, stages: int) -> Sequence[Sequence[tuple[int, str]]]:
    tied = ENDS[name].tied
    if tied is None or stages == 1 or not getattr(family.settings, "tied", False):
        return ()
    embedding, head = tied
    return (((0, embedding), (stages - 1, head)),)
