"""``python -m benchmarks.faults`` tries every fault and writes ``benchmarks/faults/README.md``."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
