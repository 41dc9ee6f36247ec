"""vLLM engines as `retrofox.serving.vllm_run` makes them, on a CPU in the way of a GPU: our kernels, interpreted."""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from retrofox.serving import paged_attention, paged_rows, plugin, prefill, vllm_attention, vllm_run

plugin.current_platform = vllm_attention.current_platform = SimpleNamespace(is_cuda=lambda: True)
prefill.LONG = 16
paged_attention.PROGRAMS = 8  # parts of the keys are programs that the interpreter runs one by one
paged_rows.Paged.extra = 16  # type: ignore[assignment]  # vLLM plans its own kernels too: none on a CPU take 72

if __name__ == "__main__":
    vllm_run.run_program()
