"""``python -m benchmarks.batches`` measures and writes its README."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
