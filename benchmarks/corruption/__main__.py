"""``python -m benchmarks.corruption`` tries every fault and writes its README.md."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
