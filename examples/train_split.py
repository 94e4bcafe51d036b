"""Wrap a model and train it: ``python -m examples.train_split``.

The loop is an ordinary one with a line more: ``backward()`` stops at the input gradients, and
``backward_weight()`` fills ``.grad`` when it suits, here after two microbatches.
"""

from __future__ import annotations

import torch

import autosplit
from examples.decoder import Decoder, LlamaConfig, next_byte_loss
from examples.text import batch


def main(steps: int = 10) -> list[float]:
    config = LlamaConfig(dim=64, layers=2, heads=4, kv_heads=4, hidden=128, seq=64)
    model = autosplit.split(Decoder(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        for microbatch in range(2):
            inputs, targets = batch(2 * step + microbatch, size=4, seq=config.seq)
            loss = next_byte_loss(model(inputs), targets)
            (loss / 2).backward()
        held = model.pending_bytes
        model.backward_weight()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.3f}, held for the weights {held / 2**20:.1f} MiB")
    return losses


if __name__ == "__main__":
    main()
