"""Language models of transformers or a function, and windows of text for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BartConfig,
    BertConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from autosplit.errors import PipelineError
from autosplit.train.language_model import TrainSettings, load_model
from autosplit.train.preparation import TextWindows, read_tokens

# --- what MODEL may be, and what is said of what it may not ---------------------------------------


def tiny(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16,
    }  # fmt: skip
    return LlamaConfig(**(values | changes))


def settings(model: object, **options: Any) -> TrainSettings:
    return TrainSettings(str(model), Path("text"), 2, **options)


def saved(config: PreTrainedConfig, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


def test_a_folder_and_its_config_give_a_model_in_float32_without_memory(tmp_path: Path) -> None:
    saved(tiny(dtype="bfloat16"), tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        found = load_model(settings(path))
        assert type(found.model).__name__ == "LlamaForCausalLM"
        assert not found.model.config.use_cache
        assert {(p.dtype, p.is_meta) for p in found.model.parameters()} == {(torch.float32, True)}
        assert (found.tokenizer, found.weights) == (None, None)


def test_a_function_of_the_users_gives_a_model_too() -> None:
    found = load_model(settings("tests.train.models:causal", overrides={"width": "8"}))
    assert found.model.get_parameter("0.weight").shape == (256, 8)
    assert found.model.get_parameter("0.weight").is_meta


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (json.dumps({"model_type": "of_mine"}), r"no causal language model of .*model.*of_mine"),
        (json.dumps(T5Config().to_dict()), r"no causal language model of .*Unrecognized config"),
        ("{", r"no causal language model of .*config"),
    ],
)
def test_configs_that_transformers_refuses(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(PipelineError, match=said) as caught:
        load_model(settings(tmp_path))
    assert len(str(caught.value)) < 600


def test_models_that_see_what_they_predict(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 128}
    with pytest.raises(PipelineError, match=r"'bert' sees the tokens that.*\"is_decoder\": true"):
        load_model(settings(saved(BertConfig(**sizes), tmp_path / "encoder")))
    decoder = saved(BertConfig(**sizes, is_decoder=True), tmp_path / "decoder")
    both = saved(BartConfig(d_model=16, encoder_layers=1, decoder_layers=1), tmp_path / "both")
    for folder, name in ((decoder, "BertLMHeadModel"), (both, "BartForCausalLM")):
        assert type(load_model(settings(folder)).model).__name__ == name


def test_names_of_models_on_the_hub_are_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"no folder 'gpt2'.*save_pretrained\(folder\)"):
        load_model(settings("gpt2"))
    with pytest.raises(PipelineError, match="--set is for MODULE:FUNCTION"):
        load_model(settings(saved(tiny(), tmp_path), overrides={"layers": "3"}))


def test_a_text_that_the_model_has_no_embeddings_for(tmp_path: Path) -> None:
    model = load_model(settings(saved(tiny(), tmp_path)))
    model.check_tokens(torch.tensor([127]), 16)
    with pytest.raises(PipelineError, match=r"gave token 128.*vocabulary of 128: .*129 or more"):
        model.check_tokens(torch.tensor([3, 128]), 16)
    with pytest.raises(PipelineError, match=r"17 tokens.*16 positions: --length 16"):
        model.check_tokens(torch.tensor([3]), 17)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 6}, r"6 windows cannot be cut into 4 equal microbatches: --batch 4"),
        ({"learning_rate": 0.0}, "--lr is a positive number; got 0.0"),
        ({"every": 2}, "--every has no effect without --checkpoint"),
        ({"resume": True}, "--resume has no effect without --checkpoint"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        settings("model", **options)


# --- windows of a text: every one once a pass, the same whenever a step asks for its own ----------


def test_a_pass_has_every_window_once_and_the_next_in_another_order() -> None:
    windows = TextWindows(torch.arange(41), length=4, batch=2)
    assert (windows.count, windows.steps_of_a_pass) == (10, 5)
    passes = [[windows.of_step(5 * each + step)[0] for step in range(5)] for each in range(2)]
    starts = [torch.cat(each)[:, 0].tolist() for each in passes]
    assert [sorted(each) for each in starts] == [list(range(0, 40, 4))] * 2
    assert starts[0] != starts[1]


def test_targets_are_one_token_later_and_a_batch_may_reach_into_the_next_pass() -> None:
    windows = TextWindows(torch.arange(13), length=4, batch=5)
    inputs, targets = windows.of_step(1)
    assert inputs.shape == (5, 4)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(windows.of_step(1)[0], inputs)
    both = torch.cat([windows.of_step(0)[0], inputs])[:, 0].tolist()
    assert [sorted(both[at : at + 3]) for at in (0, 3, 6)] == [[0, 4, 8]] * 3


def test_a_text_that_is_too_short_says_for_what_it_would_do() -> None:
    TextWindows(torch.arange(5), length=4, batch=1).of_step(0)
    with pytest.raises(
        PipelineError, match=r"has 5 tokens.*--length 5 takes 6.*--length 4 at most"
    ):
        TextWindows(torch.arange(5), length=5, batch=1)


def test_tokens_are_bytes_or_those_of_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a bé a")
    assert read_tokens(file, None).tolist() == [97, 32, 98, 195, 169, 32, 97]
    model = Tokenizer(WordLevel({"a": 0, "bé": 1, "?": 2}, unk_token="?"))
    model.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    assert read_tokens(file, tokenizer).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty: there is nothing to train on"),
        (b" \n", "is empty: there is nothing to train on"),
        (b"\x80\x02}q", r"no UTF-8 text \(invalid start byte at byte 0\): give plain text"),
        (b"PK\0\0", r"null characters \(the first at byte 2\): give plain text"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(PipelineError, match=said):
        read_tokens(file, None)


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"cannot read the text.*No such file"):
        read_tokens(tmp_path / "none", None)
