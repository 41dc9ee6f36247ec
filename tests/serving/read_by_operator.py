"""vLLM engines as `retrofox.serving.vllm_run` makes them, whose prompts are read on a CPU as a GPU reads long ones."""

import os
import sys
import traceback

from retrofox.serving import prompts, vllm_attention, vllm_run

vllm_attention.StepBuilder.pays = True  # type: ignore[assignment]
prompts.LONG = 16

if __name__ == "__main__":
    try:
        vllm_run.main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
