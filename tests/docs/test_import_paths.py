"""README and docs import each public name from one module."""

from __future__ import annotations

import pathlib
import re
from collections import defaultdict

import autosplit
import autosplit.checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMPORT = re.compile(r"^from (autosplit[.\w]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def test_each_name_has_one_import_path() -> None:
    paths = defaultdict(set)
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")):
        for module, several, one in IMPORT.findall(page.read_text()):
            for name in re.findall(r"\w+", several or one):
                paths[name].add(module)
    assert "PipelineTrainer" in paths
    assert {name: modules for name, modules in paths.items() if len(modules) > 1} == {}


def test_functions_that_the_package_does_not_export_have_their_module() -> None:
    hidden = {*autosplit.checkpoint.__all__} - {*autosplit.__all__}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = page.read_text()
        inline = set(re.findall(r"`([a-z]\w+)[^`\n]*`", text)) & hidden
        assert inline <= set(re.findall(r"`autosplit\.checkpoint\.(\w+)", text)), page
