"""The cases are a plain module beside the tests, which importlib mode does not put on the path."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Triton 3.9 warns that its default will change; these tests record what fused multiply-adds give, as Triton 3.6 does.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
