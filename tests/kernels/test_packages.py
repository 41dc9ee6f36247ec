"""The package: importing needs no Triton, and code saved beside checkpoints may name what is gone."""

import subprocess
import sys
from typing import Any

import fox_kernels
import torch


def test_a_saved_checkpoint_may_name_what_to_prune(capsys):
    q, k, log_f = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 1, 8), -torch.rand(1, 5, 2)
    attend: Any = fox_kernels.forgetting_attention
    wanted = attend(q, k, k, log_f)
    capsys.readouterr()
    assert torch.equal(attend(q, k, k, log_f, prune=None), wanted)
    assert "prune is gone" not in capsys.readouterr().err
    assert torch.equal(attend(q, k, k, log_f, prune=-10.0), wanted)
    assert "prune is gone" in capsys.readouterr().err


def test_import_needs_no_triton():
    program = "import sys\nsys.modules['triton'] = None\nimport fox_kernels\n"
    program += "assert 'fox_kernels.forward_backward' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
