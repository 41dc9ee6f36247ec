"""The package: importing needs no Triton, and saved checkpoints find what they import."""

import subprocess
import sys
from typing import Any

import fox_kernels
import pytest
import torch

# names by which code saved beside a checkpoint imports: retrofox/model before the packages, and until the three files
SAVED = {
    "fused_append": ["append", "appends"],
    "fused_entry": ["entry"],
    "fused_gate": ["gate"],
    "fused_norm": ["head_norm"],
    "fused_rotary": ["rotary"],
    "fused_shift": ["shift"],
    "fused_support": ["available"],
    "decoding.append": ["append", "appends"],
    "decoding.fixed": ["decode_at", "decodes_at"],
    "decoding.lean": ["add_norm", "gate_rows", "leans", "silu_mul"],
    "layer.entry": ["entry"],
    "layer.gate": ["gate"],
    "layer.norm": ["head_norm"],
    "layer.rotary": ["rotary"],
    "layer.shift": ["shift"],
    "layer.support": ["available"],
}


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
    for name in ("fused_append", "fused_gate", "decoding.lean"):
        what = SAVED[name][0]
        program += (
            f"try:\n    from fox_kernels.{name} import {what}\nexcept ImportError: pass\nelse: raise SystemExit(1)\n"
        )
    run(program)


def test_import_needs_no_triton():
    program = "import sys\nsys.modules['triton'] = None\nimport fox_kernels\n"
    run(program + "assert 'fox_kernels.forward_backward' not in sys.modules")
