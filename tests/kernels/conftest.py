"""The environment of the tests of kernels."""

import os

# Triton 3.9 warns that its default will change; these tests record what fused multiply-adds give, as Triton 3.6 does.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
