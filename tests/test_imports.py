"""Imports run one way: from the stages down to the records, never up, never in a circle; and light
where it counts."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "g2d_jax"

ROOMS = [
    "records config runtime",
    "models data losses rewards study",
    "sampler training scoring",
    "session",
    "rollouts",
    "stages",
    "report recipes sweep plan pipeline commands cli __main__",
]
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms.split()}
SIDEWAYS = {("data", "g2d_jax.rewards.extract"), ("frontier", "g2d_jax.study.stats")}
"""What one part of level 1 may import of another: data the final answer of a solution, the
bootstrap means of rows."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


MODULES = {
    module_name(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.parent.name != "configs"
}


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports anywhere in it, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}, line {node.lineno}: write the import with its full name"
            )
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return {name for name in found if name == "g2d_jax" or name.startswith("g2d_jax.")}


IMPORTS = {name: imports(path) for name, path in MODULES.items()}


def part(module: str) -> str:
    """The room a module is in: "g2d_jax.data.fields" is in data. The package itself is in "" and
    below all."""
    return [*module.split("."), ""][1]


def test_imports_never_go_up():
    assert {name for names in IMPORTS.values() for name in names} <= MODULES.keys()
    level = {"": -1, **LEVELS}  # of every room
    upward = {
        (name, other)
        for name in MODULES
        for other in IMPORTS[name]
        if level[part(other)] > level[part(name)]
    }
    assert not upward


def test_what_a_run_imports_knows_no_wing():
    """Reports, studies, plans and what is shared read records on disk, or a run that is over."""
    wings = set(ROOMS[-1].split())
    wheel = [name for name in MODULES if part(name) and part(name) not in wings]
    assert not {(name, other) for name in wheel for other in IMPORTS[name] if part(other) in wings}
    assert "stages" in {part(name) for name in wheel}


def test_parts_of_level_1_stand_alone():
    sideways = {
        (part(name), other)
        for name in MODULES
        for other in IMPORTS[name]
        if LEVELS.get(part(name)) == LEVELS.get(part(other)) == 1 and part(other) != part(name)
    }
    assert sideways <= SIDEWAYS


def test_no_circles():
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError with the circle
    rooms: dict[str, set[str]] = {}
    for module, found in IMPORTS.items():
        rooms.setdefault(part(module), set()).update(
            {part(other) for other in found} - {part(module)}
        )
    graphlib.TopologicalSorter(rooms).prepare()


def test_jax_is_not_imported():
    code = """
import importlib, sys
for module in ("g2d_jax", "g2d_jax.rewards.worker", "g2d_jax.recipes.config_load", "g2d_jax.report.frame"):
    importlib.import_module(module)
    assert "jax" not in sys.modules, module
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, timeout=60)
