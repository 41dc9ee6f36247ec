"""The shape of the package, read from its source: imports point one way, no circles, no hidden imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = (
    *("version", "registration", "support", "config_values", "acceleration", "model"),
    *("spec_values", "fox_spec", "half_lives", "families", "config", "anatomy", "loading", "planning", "serving"),
    *("surgery", "data", "parallel", "heads", "conversion", "generation", "training", "evaluation"),
    *("reporting", "hub", "cli", "__main__"),
)
KERNELS_ORDER = (
    *("determinism", "options", "host", "arguments", "chunked", "reference"),
    *("common", "triton", "layer", "hopper", "decoding", "forward_backward", "autograd", "choose_backend", "api"),
)
"""Rooms from the ground up: each may import itself and those before it."""
FREE = ("cli",)
"""Rooms whose functions import, so that `retrofox --help` needs no torch."""


def modules(package: str = "retrofox", beside: Path = ROOT) -> dict[str, Path]:
    """Dotted name -> file of every module of a package, those that travel to the Hub included."""
    found = {}
    for file in sorted((beside / package).rglob("*.py")):
        parts = file.relative_to(beside).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


KERNELS = modules("fox_kernels", ROOT / "kernels")
ORDERS = {"retrofox": ORDER, "fox_kernels": KERNELS_ORDER}


def imports(name: str, file: Path) -> list[tuple[str, bool]]:
    """(imported module, whether inside a function) of a module's imports from its own package, type checkers' aside."""
    top = name.split(".")[0]
    known, found = KERNELS if top == "fox_kernels" else modules(), []
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            targets = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                names = [f"{base}.{alias.name}" for alias in child.names]
                targets = [full if full in known else base for full in names]
            found.extend((target, inside) for target in targets if target.split(".")[0] == top)
            visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(file.read_text(encoding="utf-8")), False)
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_every_room_has_its_place_in_the_order():
    assert {room(name) for name in modules()} - {"__init__"} == set(ORDER)
    assert {room(name) for name in KERNELS} - {"__init__"} == set(KERNELS_ORDER)


@pytest.mark.parametrize(("name", "file"), (modules() | KERNELS).items(), ids=list(modules() | KERNELS))
def test_imports_point_downwards(name: str, file: Path):
    if room(name) == "__init__":
        return  # the package itself imports on first use only; test_cli holds it to that
    order = ORDERS[name.split(".")[0]]
    allowed = {"__init__", *order[: order.index(room(name)) + 1]}
    upwards = sorted({target for target, _ in imports(name, file) if room(target) not in allowed})
    assert not upwards, f"{name} imports {upwards}, which lie above it"


@pytest.mark.parametrize(("name", "file"), modules().items(), ids=list(modules()))
def test_no_function_hides_an_import_of_ours(name: str, file: Path):
    hidden = sorted({target for target, inside in imports(name, file) if inside})
    assert not hidden or room(name) in FREE, f"{name} imports {hidden} inside a function"


@pytest.mark.parametrize("package", [modules(), KERNELS], ids=["retrofox", "fox_kernels"])
def test_there_are_no_circles(package: dict[str, Path]):
    graph = {name: {t for t, _ in imports(name, file)} - {name} for name, file in package.items()}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(graph.get(name, ())):
                walk(target, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_few_modules_stand_beside_the_packages():
    assert len(list((ROOT / "retrofox").glob("*.py"))) <= 12


def test_no_kernel_takes_more_than_25_arguments():
    for name, file in (modules() | KERNELS).items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list):
                assert len(node.args.args) <= 25, f"{name}.{node.name} takes {len(node.args.args)}: group them"
