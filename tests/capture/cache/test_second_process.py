"""What one process has made is found by another, in which hashes are others, untraced."""

from __future__ import annotations

import pathlib

import pytest

from autosplit.capture.cache.split_graph_cache import VARIABLE
from tests.capture.cache.programs import run_forked, run_spawned

LAYERS = """
import torch, autosplit
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
)
split = autosplit.split(model)
split(torch.arange(12.0).reshape(3, 4)).sum().backward()
split.backward_weight()
found = counters["autosplit"]
print(found["graph_hit"], found["graph_miss"], found["call_hit"])
print(model[0].weight.grad.sum().item())
found.clear()
"""

LENGTHS = """
import torch, autosplit
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
split = autosplit.split(model)
for length in (3, 5, 9, 4):
    split(torch.ones(2, length, 4)).mean().backward()
split.backward_weight()
found = counters["autosplit"]
print(found["graph_hit"], found["graph_miss"], found["graph_bypass"], len(split.functions))
print(model[0].weight.grad.sum().item())
found.clear()
"""

LLAMA = """
import torch, transformers, autosplit
torch.set_num_threads(1)
torch.manual_seed(0)
config = transformers.AutoConfig.for_model(
    "llama", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    vocab_size=32, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
model = transformers.AutoModelForCausalLM.from_config(config).train()
ids = torch.arange(3, 15).reshape(2, 6)
split = autosplit.split(model)
split(input_ids=ids, labels=ids).loss.backward()
split.backward_weight()
print(split.report().partition("Graph cache: ")[2].partition(".")[0])
print(sum(p.grad.double().sum().item() for p in model.parameters()))
"""


def test_a_second_process_finds_what_the_first_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    programs = LAYERS, LENGTHS, LLAMA
    made = [run_forked(program).splitlines()[-2:] for program in programs]
    read = [text.splitlines()[-2:] for text in run_spawned(*programs)]
    assert [said for said, _ in made] == ["0 1 0", "0 2 0 2", "made and kept"]
    assert [said for said, _ in read] == ["1 0 1", "2 0 0 2", "found"]
    assert [value for _, value in made] == [value for _, value in read]
