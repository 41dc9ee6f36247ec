"""The packages: imports point one way, importing needs no Triton, and saved checkpoints find what they import."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import fox_kernels
import pytest
import torch

ROOT = Path(fox_kernels.__file__).parent
# a package or flat module imports only from levels above its own line
LEVELS = [
    {"determinism", "options", "saved_checkpoints"},
    {"host"},
    {"arguments"},
    {"chunked"},
    {"reference", "chunked_operator"},
    {"common"},
    {"plain", "layer"},
    {"hopper", "decoding"},
    {"forward_backward"},
    {"autograd"},
    {"api"},
]
# names by which code saved beside a checkpoint imports (retrofox/model before the packages)
SAVED = {
    "fused_append": ["append", "appends"],
    "fused_entry": ["entry"],
    "fused_gate": ["gate"],
    "fused_norm": ["head_norm"],
    "fused_rotary": ["rotary"],
    "fused_shift": ["shift"],
    "fused_support": ["available"],
}


def imports(path: Path) -> set[str]:
    """Return the packages and flat modules of fox_kernels that a file imports, anywhere in it."""
    found, here = set(), list(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level]
            module = (node.module or "").split(".") if node.module else []
            names = [base + module] if base + module else [[x.name] for x in node.names]
            found |= {x[0] for x in names}
    return found


def test_imports_point_one_way():
    level = {name: n for n, names in enumerate(LEVELS) for name in names}
    for path in ROOT.rglob("*.py"):
        here = path.relative_to(ROOT).with_suffix("").parts[0]
        if here == "__init__":
            continue
        for name in imports(path) - {here}:
            assert level[name] < level[here], f"{path.relative_to(ROOT)} imports {name}"


def test_no_circle_of_modules():
    edges: dict[str, set[str]] = {}
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in ROOT.rglob("*.py")}
    for path in ROOT.rglob("*.py"):
        here = list(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level and here != ["__init__"]:
                base = ".".join(
                    [*here[: len(here) - node.level], *((node.module or "").split(".") if node.module else [])]
                )
                targets = {f"{base}.{x.name}".strip(".") for x in node.names} | {base}
                edges.setdefault(".".join(here), set()).update(targets & names)
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(edges.get(name, ())):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


def run(program: str) -> None:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_saved_checkpoint_finds_what_it_imports():
    pytest.importorskip("triton", reason="Triton is not installed here")
    run("\n".join(f"from fox_kernels.{name} import {', '.join(x)}" for name, x in SAVED.items()))


def test_a_saved_checkpoint_may_name_what_to_prune(capsys):
    q, k, log_f = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 1, 8), -torch.rand(1, 5, 2)
    attend: Any = fox_kernels.forgetting_attention
    wanted = attend(q, k, k, log_f)
    capsys.readouterr()
    assert torch.equal(attend(q, k, k, log_f, prune=None), wanted)
    assert "prune is gone" not in capsys.readouterr().err
    assert torch.equal(attend(q, k, k, log_f, prune=-10.0), wanted)
    assert "prune is gone" in capsys.readouterr().err


def test_without_triton_a_saved_checkpoint_gets_the_import_error_that_it_expects():
    program = "import sys\nsys.modules['triton'] = None\n"
    for name in ("fused_append", "fused_gate"):
        what = SAVED[name][0]
        program += (
            f"try:\n    from fox_kernels.{name} import {what}\nexcept ImportError: pass\nelse: raise SystemExit(1)\n"
        )
    run(program)
