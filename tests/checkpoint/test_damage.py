"""Whatever is damaged is refused before anything is loaded."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from autosplit import CheckpointError
from autosplit.checkpoint import load_checkpoint, read_checkpoint
from tests.checkpoint import forms
from tests.checkpoint.checkpoint_workers import named, train, trainer, whole


def refused(path: Path, match: str) -> None:
    """Nothing is loaded, and the trainer can go on."""
    with trainer(whole(1), 2, ranks=1) as engine:
        earlier = named(engine)
        with pytest.raises(CheckpointError, match=match):
            load_checkpoint(engine, path)
        assert all(torch.equal(value, earlier[name]) for name, value in named(engine).items())
        train(engine, 0, 1)


def test_digests_are_compared(tmp_path: Path) -> None:
    path = forms.own(tmp_path)
    metadata, (file,) = path / ".metadata", path.rglob("*.distcp")
    for item, message in (
        (metadata, r"\.metadata: the file is damaged"),
        (file, "distcp is damaged"),
    ):
        content = item.read_bytes()
        changed = content.replace(b"lr", b"rl") if item is metadata else content[::-1]
        for other in (changed, content[:-1]):
            item.write_bytes(other)
            refused(path, f"{message}|is cut off")
        item.write_bytes(content)


def test_parts_that_do_not_cover_a_tensor_are_noticed(tmp_path: Path) -> None:
    """Torch's own reader leaves memory there as it is."""
    path = forms.distributed_wrapped(tmp_path)

    def changed(change: Callable[[Any], None], message: str) -> None:
        metadata = dcp.FileSystemReader(path).read_metadata()
        earlier = (path / ".metadata").read_bytes()
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        refused(path, message)
        (path / ".metadata").write_bytes(earlier)

    def entry(metadata: Any) -> Any:
        return metadata.state_dict_metadata["model.1.0.weight"]

    def places(metadata: Any) -> dict[str, Any]:
        return {index.fqn: info for index, info in metadata.storage_data.items()}

    changed(lambda m: entry(m).chunks.clear(), "the parts of .* do not add up to its shape")
    changed(lambda m: setattr(entry(m).chunks[0], "sizes", torch.Size([9, 8])), "outside its shape")
    changed(lambda m: setattr(entry(m).properties, "dtype", torch.float16), "expected .*float16")
    changed(
        lambda m: setattr(
            places(m)["model.1.0.weight"], "offset", places(m)["model.2.0.weight"].offset
        ),
        "overlap in",
    )


@pytest.mark.parametrize("write", [forms.one_file, forms.safetensors])
def test_integers_are_not_taken_for_weights(write: Callable[..., Path], tmp_path: Path) -> None:
    """As when the kind is changed in the header of a file whose values nobody can check."""
    integers = forms.state()["1.0.weight"].view(torch.int32)
    path = write(tmp_path, {**forms.state(), "1.0.weight": integers})
    refused(path, r"1\.0\.weight: expected torch\.float32, got torch.int32")


def test_tensors_without_values_are_refused(tmp_path: Path) -> None:
    for value in (torch.eye(8).to_sparse(), torch.empty(8, 8, device="meta")):
        path = forms.one_file(tmp_path, {**forms.state(), "1.0.weight": value})
        # torch 2.15 does not read sparse ones, and 2.11 warns of them.
        refused(path, "only dense tensors|[Ss]parse (tensor )?invariant")


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    earlier = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = forms.one_file(tmp_path)
    finally:
        torch.serialization.set_crc32_options(earlier)
    assert torch.equal(read_checkpoint(path)["1.0.weight"], whole(3)[1][0].weight)
