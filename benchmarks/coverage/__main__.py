"""``python -m benchmarks.coverage`` compares and writes its ``README.md`` and ``docs/tried.md``."""

import logging
import warnings

import torch

from .page import PAGE

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)  # it logs graph breaks
    PAGE.main()
