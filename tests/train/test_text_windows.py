"""Windows of a text: every one once a pass, the same whenever a step asks for its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from autosplit.errors import PipelineError
from autosplit.train.preparation import TextWindows, read_tokens


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
