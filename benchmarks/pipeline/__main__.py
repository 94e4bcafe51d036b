"""``python -m benchmarks.pipeline`` measures and writes ``benchmarks/pipeline/README.md``."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
