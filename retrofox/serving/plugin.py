"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes before it reads a config."""

from __future__ import annotations

from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform

from retrofox.fox_spec import FoxSpec
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.serving.installed import wrong_vllm
from retrofox.serving.refusals import NATIVE, SERVED, refusal, rope_refusal, settings_refusal


def register() -> None:
    """Makes converted models known to vLLM, those that it can't serve with the reason; `retrofox` registers configs."""
    for base_type, prefix in SUPPORTED.items():
        name = f"Fox{prefix}ForCausalLM"
        served = name if base_type in SERVED else f"Fox{SUPPORTED[SERVED[0]]}ForCausalLM"  # `Checks` then refuses it
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, f"retrofox.serving.vllm_models:{served}")
        native = NATIVE.get(base_type, ("", ""))[1]
        MODELS_CONFIG_MAP[name] = _checks(MODELS_CONFIG_MAP.get(native, VerifyAndUpdateConfig))


def _checks(native: Any) -> Any:
    class Checks(native):
        """Says what can't be served while the configuration is made; the base's own changes come first."""

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            native.verify_and_update_config(vllm_config)
            check(vllm_config)

    return Checks


def check(vllm_config: Any) -> None:
    """Raises ValueError where a converted model can't run under this configuration of vLLM."""
    model = vllm_config.model_config
    config, spec = model.hf_config, FoxSpec.from_dict(model.hf_config.fox)
    cuda = current_platform.is_cuda()
    why = wrong_vllm() or refusal(config.model_type.removeprefix("fox_"), spec, paged=cuda)
    why = why or settings_refusal(vllm_config) or rope_refusal(config, spec)
    if not (cuda or current_platform.is_cpu()):
        why = why or "gates are served on NVIDIA GPUs and CPUs only"
    if why is not None:
        raise ValueError(f"retrofox can't serve {model.model}: {why}")
