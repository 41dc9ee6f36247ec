"""What a test's file does in a process with Triton's interpreter on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def report(request) -> dict:
    """What `in_interpreter` of the test's own file, or of the one it names, returns with Triton's interpreter on.

    The interpreter has to be on before the kernels are imported: it runs in a process of its own.
    """
    runner = Path(__file__).parent / "kernels" / "interpreted.py"
    file = getattr(request.module, "IN_INTERPRETER", request.path)
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(runner), str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
