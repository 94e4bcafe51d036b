"""``python -m benchmarks.fuzz`` measures and writes ``benchmarks/fuzz/README.md``."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
