"""Trainer, accelerate and peft with a split model: weights as without it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from examples import accelerate_loop, transformers_trainer
from examples.accelerate_loop import Split, adapted
from examples.transformers_trainer import Windows, build

pytestmark = pytest.mark.filterwarnings("default")  # accelerate and torch have notes for each other


@pytest.fixture(autouse=True)
def _another_precision() -> Iterator[None]:
    """accelerate has one for a process, and refuses to change it."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def told(trainer: Any) -> list[tuple[Any, ...]]:
    keys = ("loss", "grad_norm", "eval_loss")
    return [tuple(row.get(key) for key in keys) for row in trainer.state.log_history]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bf16": True, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True},
    {"gradient_checkpointing": True, "optim": "adafactor", "label_smoothing_factor": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["fp32", "bf16", "checkpointing"])
def test_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    """Accumulated, clipped, evaluated, saved, and resumed from the middle."""
    inputs = {"use_cpu": True, "disable_tqdm": True, **options}
    plain = transformers_trainer.main(str(tmp_path / "plain"), split=False, **inputs)
    split = transformers_trainer.main(str(tmp_path / "split"), **inputs)
    assert differing(plain.model.state_dict(), split.model.state_dict()) == []
    assert told(plain) == told(split)
    model: Any = split.model
    assert model.functions
    last = tmp_path / "split" / "checkpoint-4"
    names = sorted(path.name for path in (tmp_path / "plain" / "checkpoint-4").iterdir())
    assert sorted(path.name for path in last.iterdir()) == names
    assert "config.json" in names
    if "eval_strategy" not in options:  # else the best may be an earlier one
        loaded = LlamaForCausalLM.from_pretrained(last)
        assert differing(loaded.state_dict(), split.model.state_dict()) == []
        half = str(tmp_path / "split" / "checkpoint-2")
        resumed = transformers_trainer.main(str(tmp_path / "again"), resume=half, **inputs)
        assert differing(resumed.model.state_dict(), split.model.state_dict()) == []


@pytest.mark.parametrize("split", ["first", "last"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prepares_before_or_after(split: Split, precision: str) -> None:
    plain, halves = build(), build()
    torch.manual_seed(1)
    expected = accelerate_loop.train(plain, precision=precision)
    torch.manual_seed(1)
    assert accelerate_loop.train(halves, split=split, precision=precision) == expected
    assert differing(plain.state_dict(), halves.state_dict()) == []


@pytest.mark.parametrize("split", ["first", "last"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_peft_adapts_before_or_after(tmp_path: Path, split: Split, dora: bool) -> None:
    torch.manual_seed(1)
    plain: Any = adapted("no", dora=dora)
    expected = accelerate_loop.train(plain)
    torch.manual_seed(1)
    halves: Any = adapted(split, dora=dora)
    result = accelerate_loop.train(halves)
    if dora:
        assert result == pytest.approx(expected, rel=1e-5)
    else:
        assert result == expected
        assert differing(plain.state_dict(), halves.state_dict()) == []
    kept = halves if split == "last" else halves.base_model.model
    assert kept.functions or "Deferred: the gradients of" in kept.report()  # DoRA is in parts
    halves.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(), tmp_path)
    assert differing(loaded.state_dict(), halves.state_dict()) == []


def test_a_trainer_saves_adapters_only(tmp_path: Path) -> None:
    trainer = transformers_trainer.Trainer(
        model=adapted("first"),
        args=transformers_trainer.TrainingArguments(
            str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        ),
        train_dataset=Windows(8, 16, seed=0),
    )
    trainer.train()
    names = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


def test_adapters_are_merged_into_the_model_that_was_split() -> None:
    model = autosplit.split(build())
    adapters: Any = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # type: ignore[arg-type]
    ids = Windows(2, 16, seed=0)[0]["input_ids"][None]
    adapters(input_ids=ids, labels=ids).loss.backward()
    merged: nn.Module = adapters.merge_and_unload()
    assert merged is model
    assert merged(input_ids=ids).logits.shape == (1, 16, 256)
