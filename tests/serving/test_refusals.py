"""What can't be served is said in one line, with what to do."""

from types import SimpleNamespace

import pytest

from retrofox import FoxSpec
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.serving.refusals import SERVED, Settings, refusal, rope_refusal

CASES = {
    "fp8 cache": ({"cache_dtype": "fp8"}, "a fp8 cache would round the gates' sums away"),
    "fp8 cache of another kind": ({"cache_dtype": "fp8_e5m2"}, "leave --kv-cache-dtype at auto"),
    "a cache of another dtype": ({"dtype": "float32", "cache_dtype": "bfloat16"}, "a bfloat16 cache would round"),
    "float16": ({"dtype": "float16"}, "add --dtype bfloat16"),
    "ranks": ({"tensor_parallel": 2}, "9 query heads and 3 kv heads don't split over 2 ranks"),
    "context parallelism": ({"context_parallel": 2}, "context parallelism"),
    "speculation": ({"speculative": True}, "--speculative-config"),
    "adapters": ({"lora": True}, "`retrofox merge` them first"),
    "microbatches": ({"microbatches": True}, "--enable-dbo"),
    "pooling": ({"generates": False}, "only text generation"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_setting_under_which_gates_would_be_lost_is_refused_in_a_line(name):
    settings, said = CASES[name]
    why = refusal("llama", FoxSpec(), 9, 3, Settings(**settings))
    assert why is not None
    assert said in why
    assert "\n" not in why


@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_ranks_that_split_the_heads_are_served(ranks):
    assert refusal("llama", FoxSpec(), 9, 3, Settings(tensor_parallel=ranks)) is None


def test_shifts_are_refused_and_the_other_parts_served():
    assert refusal("llama", FoxSpec(pro=("qk-norm", "output-norm", "output-gate")), 4, 2, Settings()) is None
    for part in ("k-shift", "v-shift"):
        assert f"{part} needs each token's unshifted predecessor" in str(
            refusal("llama", FoxSpec(pro=(part,)), 4, 2, Settings())
        )


def test_families_are_served_or_named_as_not_served():
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "smollm3", "mixtral"} <= set(SERVED)
    for family in SUPPORTED:
        why = refusal(family, FoxSpec(), 4, 2, Settings())
        assert (why is None) == (family in SERVED)
        assert why is None or f"converted {family} models are not served yet" in why


def test_a_horizon_is_served_by_our_own_kernels_and_refused_where_vllms_attend():
    spec = FoxSpec(horizon=9.0)
    assert refusal("llama", spec, 4, 2, Settings(paged=True)) is None
    why = str(refusal("llama", spec, 4, 2, Settings(paged=False)))
    assert "horizon 9 is served on NVIDIA GPUs only" in why
    assert "use `retrofox generate`" in why
    assert refusal("llama", FoxSpec(), 4, 2, Settings(paged=False)) is None


@pytest.mark.parametrize("ranks", [6, 8])  # 4 kv heads don't split over 6, 12 query heads not over 8
def test_heads_of_which_only_one_kind_splits_over_the_ranks_are_refused(ranks):
    assert f"12 query heads and 4 kv heads don't split over {ranks} ranks" in str(
        refusal("llama", FoxSpec(), 12, 4, Settings(tensor_parallel=ranks))
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", "torch.float32"])
def test_a_cache_of_the_models_own_dtype_is_served(dtype):
    settings = Settings(dtype=dtype, cache_dtype=dtype.removeprefix("torch."))
    assert refusal("llama", FoxSpec(), 4, 2, settings) is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_changes_with_the_length_is_refused_unless_all_of_it_is_kept(kind):
    for parameters in ({"rope_type": kind}, {"full_attention": {"rope_type": kind}, "sliding_attention": {}}):
        config = SimpleNamespace(rope_parameters=parameters)
        assert f"RoPE of kind {kind} changes with" in str(rope_refusal(config, FoxSpec(rope="partial")))
        assert rope_refusal(config, FoxSpec(rope="keep")) is None
    for static in ("default", "linear", "llama3", "yarn"):
        assert rope_refusal(SimpleNamespace(rope_parameters={"rope_type": static}), FoxSpec(rope="partial")) is None
