"""``python -m benchmarks.mesh`` measures and writes ``benchmarks/mesh/README.md``."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
