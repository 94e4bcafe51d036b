"""``python -m autosplit``, for torchrun."""

from .cli import main

main()
