"""The cases are a plain module beside the tests, which importlib mode does not put on the path."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Triton 3.9 warns that its default will change; these tests record what fused multiply-adds give, as Triton 3.6 does.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture(scope="module")
def report(request):
    """What `in_interpreter` of the test's own file returns, run in a process with Triton's interpreter on.

    The interpreter has to be on before the kernels are imported.
    """
    runner = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(runner), str(request.path)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
