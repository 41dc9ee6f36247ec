"""What can't be served is said in one line, with what to do."""

from types import SimpleNamespace

import pytest
import torch

from retrofox import FoxSpec
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.serving.refusals import SERVED, refusal, rope_refusal, settings_refusal

CASES = {
    "fp8 cache": ({"cache_dtype": "fp8_e5m2"}, "a fp8_e5m2 cache would round the gates' sums away"),
    "a cache of another dtype": ({"dtype": torch.float32, "cache_dtype": "bfloat16"}, "leave --kv-cache-dtype at auto"),
    "float16": ({"dtype": torch.float16}, "add --dtype bfloat16"),
    "ranks for neither": ({"tensor_parallel_size": 2}, "9 query heads and 3 kv heads don't split over 2 ranks"),
    "ranks for queries": ({"tensor_parallel_size": 6, "heads": (12, 4)}, "4 kv heads don't split over 6 ranks"),
    "ranks for keys": ({"tensor_parallel_size": 8, "heads": (12, 4)}, "12 query heads"),
    "context parallelism": ({"prefill_context_parallel_size": 2}, "context parallelism"),
    "speculation": ({"speculative_config": "any"}, "--speculative-config"),
    "quantised": ({"quant_config": "any"}, "serve it in bfloat16"),
    "adapters": ({"lora_config": "any"}, "`retrofox merge` them first"),
    "microbatches": ({"enable_dbo": True}, "--enable-dbo"),
    "pooling": ({"runner_type": "pooling"}, "only text generation"),
}
SETTINGS = {
    "tensor_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_dbo": False,
    "cache_dtype": "auto",
    "dtype": torch.bfloat16,
    "runner_type": "generate",
    "speculative_config": None,
    "lora_config": None,
    "quant_config": None,
    "heads": (9, 3),
}


def refused(**changes):
    every = SimpleNamespace(**SETTINGS | changes)
    every.hf_config = SimpleNamespace(num_attention_heads=every.heads[0], num_key_value_heads=every.heads[1])
    every.model_config = every.parallel_config = every.cache_config = every  # vLLM keeps them apart
    return settings_refusal(every)


@pytest.mark.parametrize("name", CASES)
def test_a_setting_under_which_gates_would_be_lost_is_refused_in_a_line(name):
    settings, said = CASES[name]
    why = refused(**settings)
    assert why is not None
    assert said in why
    assert "\n" not in why


@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_parallel_size": 3}, {"tensor_parallel_size": 9}, {"dtype": torch.float32, "cache_dtype": "float32"}],
    ids=str,
)
def test_other_settings_are_served(settings):
    assert refused(**settings) is None


def test_shifts_are_refused_and_the_other_parts_served():
    assert refusal("llama", FoxSpec(pro=("qk-norm", "output-norm", "output-gate"))) is None
    for part in ("k-shift", "v-shift"):
        assert f"{part} needs each token's unshifted predecessor" in str(refusal("llama", FoxSpec(pro=(part,))))


def test_families_are_served_or_named_as_not_served():
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "smollm3", "mixtral"} <= set(SERVED)
    for family in SUPPORTED:
        why = refusal(family, FoxSpec())
        assert (why is None) == (family in SERVED)
        assert why is None or f"converted {family} models are not served yet" in why


def test_a_horizon_is_served_by_our_own_kernels_and_refused_where_vllms_attend():
    spec = FoxSpec(horizon=9.0)
    assert refusal("llama", spec, paged=True) is None
    why = str(refusal("llama", spec, paged=False))
    assert "horizon 9 is served on NVIDIA GPUs only" in why
    assert "use `retrofox generate`" in why
    assert refusal("llama", FoxSpec(), paged=False) is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_changes_with_the_length_is_refused_unless_all_of_it_is_kept(kind):
    for parameters in ({"rope_type": kind}, {"full_attention": {"rope_type": kind}, "sliding_attention": {}}):
        config = SimpleNamespace(rope_parameters=parameters)
        assert f"RoPE of kind {kind} changes with" in str(rope_refusal(config, FoxSpec(rope="partial")))
        assert rope_refusal(config, FoxSpec(rope="keep")) is None
    for static in ("default", "linear", "llama3", "yarn"):
        assert rope_refusal(SimpleNamespace(rope_parameters={"rope_type": static}), FoxSpec(rope="partial")) is None
