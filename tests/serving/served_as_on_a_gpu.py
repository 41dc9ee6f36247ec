"""vLLM engines as `retrofox.serving.vllm_run` makes them, on a CPU in the way of a GPU: our kernels, interpreted."""

import os
import sys
import traceback
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from retrofox.serving import paged_kernels, plugin, prompts, vllm_attention, vllm_run

plugin.current_platform = vllm_attention.current_platform = SimpleNamespace(is_cuda=lambda: True)
prompts.LONG = 16
paged_kernels.PROGRAMS = 8  # parts of the keys are programs that the interpreter runs one by one
paged_kernels.Paged.extra = 16  # type: ignore[assignment]  # vLLM plans its own kernels too: none on a CPU take 72

if __name__ == "__main__":
    try:
        vllm_run.main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
