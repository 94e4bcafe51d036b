"""Export checkpoints as safetensors files, which transformers and other libraries load."""

from __future__ import annotations

from pathlib import Path

from autosplit.errors import CheckpointError

from .reading import read_checkpoint


def export_safetensors(
    path: str | Path, folder: str | Path, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write the model of a checkpoint as one or several safetensors files. The files and an index
    have the names that ``from_pretrained(...)`` of transformers reads. The model's configuration is
    not written: ``model.config.save_pretrained(folder)`` does that.

    The process must have memory for the whole model. huggingface_hub writes the files.

    Args:
        path: see ``read_checkpoint``.
        folder: the folder of the files; created if needed.
        max_shard_size: the most bytes of a file, as a number or a text such as ``"5GB"``.

    Raises:
        CheckpointError: the checkpoint cannot be read, or huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import save_torch_state_dict
    except ImportError as error:
        raise CheckpointError(
            "writing safetensors needs huggingface_hub: pip install 'autosplit[safetensors]'"
        ) from error
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(read_checkpoint(path), folder, max_shard_size=max_shard_size)
