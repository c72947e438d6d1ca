"""DESIGN's import rule: edgevit → profiles → converters, and nothing points back up; no import loop; a light runner."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("edgevit", "converters", "profiles")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in OURS
    for path in sorted((ROOT / package).rglob("*.py"))
}
# What `profiles` may take from `converters`.
PROFILES_MAY_IMPORT = {"converters.artifact", "converters.run", "converters.errors", "converters.signature"}


def imports(module: str, *, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports, as absolute names; `from package import module` counts as the module."""
    tree = ast.parse(FILES[module].read_text())
    names: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in FILES else str(node.module))
    return names


def test_there_is_something_to_check():
    assert {"converters.artifact", "profiles.store", "edgevit.cli"} <= set(FILES)


@pytest.mark.parametrize("module", FILES)
def test_nothing_points_back_up(module):
    ours = {name for name in imports(module) if name.split(".")[0] in OURS}
    if module.startswith("converters"):
        assert all(name.startswith("converters") for name in ours), ours
    if module.startswith("profiles"):
        assert {name for name in ours if not name.startswith("profiles")} <= PROFILES_MAY_IMPORT, ours


def test_no_import_loop():
    graph = {module: imports(module, top_level_only=True) & set(FILES) for module in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_runner_needs_only_numpy_and_a_runtime():
    allowed = set(sys.stdlib_module_names) | {"numpy", "onnxruntime", "ai_edge_litert", "tflite_runtime"}
    assert {name.split(".")[0] for name in imports("profiles.runner")} <= allowed
