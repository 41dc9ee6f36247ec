"""`FoxSpec`, the description of a retrofit: the `fox:` section of a recipe and of a converted model's config.json."""

from __future__ import annotations

import copy
import logging
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from retrofox.model.configuration_fox import FoxFields
from retrofox.spec_values import NUMBERS, check_number, half_life_of, one_of, open_heads_of, parts_of, wavelengths_of

logger = logging.getLogger(__name__)
ROPE_MODES = ("interpolate", "keep", "partial", "drop")
GATE_KINDS = ("data", "bias", "fixed", "none")
GATE_INITS = ("open", "slopes", "measured", "alibi")
PRO_PARTS = ("qk-norm", "output-norm", "output-gate", "k-shift", "v-shift")
OFFICIAL = "official"
"""Beside Pro parts: QK-norm and shifts to the last digit as the authors' code computes them."""

ROPE_FACTOR = 8.0
"""Times the trained length to which rope "interpolate" stretches the slowest pairs."""

PRESETS: dict[str, tuple[dict[str, Any], str]] = {
    "fox-stretch": ({}, "gates; fast rotary pairs as they are, slow ones stretched: retrofox's defaults"),
    "fox-llama": ({"rope": "drop", "sink_tokens": 0}, "FoX (LLaMA): gates, no RoPE"),
    "fox-pro": ({"rope": "drop", "sink_tokens": 0, "pro": PRO_PARTS}, "FoX (Pro): gates, the Pro parts, no RoPE"),
    "transformer-llama": ({"rope": "keep", "gate": "none"}, "Transformer (LLaMA): RoPE, no gates: the base itself"),
    "transformer-pro": (
        {"rope": "keep", "gate": "none", "pro": PRO_PARTS},
        "Transformer (Pro): Pro parts, RoPE, no gates",
    ),
    "alibi": ({"rope": "drop", "gate": "fixed", "init": "alibi", "sink_tokens": 0}, "fixed gates with ALiBi's slopes"),
    "drope": ({"rope": "drop", "gate": "none"}, "DroPE: neither RoPE nor gates"),
}
"""Name of a published system -> the fields that differ from FoxSpec(), and a description. The systems are those of
Lin et al. (ICLR 2025), Press et al. (2022, ALiBi) and arXiv 2512.12167 (DroPE)."""

STATE = ("anneal_to", "anneal_tokens", "annealed_tokens", "layer_pairs", "base", "base_revision", "version")
"""Fields that conversion and training fill in."""

MEASURED = (1 / 512, 1 / 8)
"""Default half-lives of init "measured", in trained lengths: 16 to 1024 tokens of 8192."""

OPEN = (1 / 2, 128.0)
"""Default half-lives beside stretched pairs, in trained lengths, as in recipes/smollm2-stretch.yaml (4096 to 1Mi)."""


@dataclass
class FoxSpec(FoxFields):
    """The whole description of a retrofit: positions, gates, sinks and Pro parts.

    With f_t = sigmoid(w_f . x_t + b_f) and c_t = sum_{l<=t} log f_l, attention logits become
    s_ij = scale * q_i.k_j + (c_i - c_j), the second term absent for sink tokens (Lin et al., ICLR 2025, eq. 3).

    Args:
        rope: "interpolate": pairs with wavelengths near the trained length or longer are slowed by up to `rope_factor`,
            fast ones stay as they are (the ramp of YaRN, see `interpolated`); "keep" every rotary pair; "drop" all;
            "partial" keeps the pairs whose wavelength is at most `max_wavelength`. None = "partial" where
            max_wavelength is given, else "interpolate".
        rope_factor: "interpolate": how many times the trained length the slowest pairs are stretched to; None = 8.
        rope_length: "interpolate": tokens of the base's training context, which decides the pairs that are slowed;
            None = as its config says.
        beta_fast: "interpolate": pairs that turn this often within rope_length, or more often, stay as they are.
        beta_slow: "interpolate": pairs that turn this often, or less, are slowed by the whole rope_factor, those
            between the two by part of it; as high as beta_fast: a step.
        max_wavelength: "partial": tokens; None = a quarter of the length the base was trained to.
        layer_max_wavelength: per-layer override in tokens (0 drops every pair of that layer, inf keeps all), as a
            mapping such as {0: .inf, 20: 0}.
        layer_pairs: "partial": pairs that single layers keep, whatever their wavelength; pair 0 is the fastest (state
            of models that an earlier version calibrated).
        anneal_to: which rotary pairs fade, "partial" or "drop"; this and the next two are state of models that an
            earlier version trained with rope "anneal".
        anneal_tokens: in which they were to be gone.
        annealed_tokens: by which they had faded.
        gate: "data" (w_f and b_f learned), "bias" (b_f only), "fixed" (b_f frozen: ALiBi), "none" (no gate).
        gate_heads: "query" (a gate for each query head) or "kv" (one for all query heads that share a key).
        init: "open" (f = 1: the base model; gates so open get no gradient and don't train), "slopes" (half-lives
            log-spaced over the heads of each layer), "measured" (log-spaced over the model's kv heads, in order of
            their attention distance on a text), "alibi" (ALiBi's slopes: log f = -2^(-8h/H) for head h of H,
            interpolated as ALiBi does where H is no power of two). "calibrated" is the old name of "measured".
        half_life: (shortest, longest) in tokens; None = (1 / 512, 1 / 8) of the base's length with init "measured",
            else (1 / 2, 128) with rope "interpolate", else (1 / 32, 8). A time constant T of
            the FoX paper, f = exp(-1/T), is a half-life of T ln 2.
        max_half_life: tokens: heads that are not open forget at least this fast, whatever the text says, log f =
            log sigmoid(w_f . x + b_f) - ln 2 / max_half_life. With a horizon, a layer without open heads then sees no
            key beyond horizon * max_half_life / ln 2 tokens, and vLLM keeps no more of it. None = no bound.
        open_heads: kv heads that start open, with a half-life of 128 times the base's length, and that a budget
            spares: [[layer, kv head], ...], or with init "measured" how many: those that attend most to facts planted
            in a text.
        sink_tokens: first positions of each document whose keys are exempt from decay; 0 is the paper's FoX.
        pro: parts of FoX (Pro): "qk-norm", "output-norm", "output-gate", "k-shift", "v-shift". As in
            the authors' code, "official" makes QK-norm's eps 1e-5 and shifts a document's first token towards 0.
        log_n: if set, logits of position i are scaled by max(1, ln(i + 1) / ln(log_n)), log_n in tokens.
        horizon: nats, above 0: a key counts for a query only while c_i - c_j > -horizon; beyond, it is masked, in
            training and generation alike. Sink tokens and a query's own key always count. None = none is masked.
        base: model id or path the weights come from (filled in by convert).
        base_revision: commit of `base` on the Hub, if known.
        version: retrofox version that converted the model.

    Raises:
        ValueError: a field has a value outside the ones above, or no effect beside the others.
    """

    preset: str | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if value is not None or getattr(FoxSpec, name) is not None:
                check_number(name, value)
        self.rope = self.rope or ("interpolate" if self.max_wavelength is None else "partial")
        if self.init == "calibrated":
            if self.version is None:
                logger.warning("init calibrated is the old name of measured: queries are no longer refitted")
            self.init = "measured"
        one_of("rope", self.rope, ROPE_MODES if self.version is None else (*ROPE_MODES, "anneal"))
        one_of("gate", self.gate, GATE_KINDS)
        one_of("gate_heads", self.gate_heads, ("query", "kv"))
        one_of("init", self.init, GATE_INITS)
        self.pro = parts_of(self.pro, PRO_PARTS, OFFICIAL)
        self.layer_max_wavelength = wavelengths_of(self.layer_max_wavelength)
        self.layer_pairs = {int(layer): tuple(pairs) for layer, pairs in self.layer_pairs.items()}
        self.open_heads = open_heads_of(self.open_heads, self.init == "measured")
        if self.half_life is not None:
            self.half_life = half_life_of(self.half_life)
        self.horizon = None if self.horizon is None else float(self.horizon)
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} must not be below beta_slow {self.beta_slow}")
        if self.version is not None:  # a conversion's own: resolved, every field filled in
            return
        if self.pro == ("official",):
            raise ValueError("pro: official changes qk-norm, k-shift and v-shift: add one of them, or drop it")
        for name, other in idle_fields(self.rope, self.gate, self.init).items():
            known, value = FoxSpec.__dataclass_fields__[name], getattr(self, name)
            if value != (known.default if known.default_factory is MISSING else known.default_factory()):
                raise ValueError(
                    f"{name}: {other} {getattr(self, other)} leaves it without effect: drop one of them; got {value}"
                )

    @classmethod
    def from_dict(cls, values: Any) -> FoxSpec:
        """Builds a spec from the `fox` section of a config; an unknown key is an error that names the nearest one."""
        if not isinstance(values, dict):
            raise ValueError(f"the fox section must be a mapping of keys to values, got a {type(values).__name__}")
        if values.get("prune") is not None:
            logger.warning("prune is gone: it approximated attention to all keys, which is computed; see horizon")
        # yarn_layers was written for a day, at 0 without effect
        of_old = ("prune", "yarn_layers") if values.get("yarn_layers") == 0 else ("prune",)
        values = {key: value for key, value in values.items() if key not in of_old}
        known = [f.name for f in fields(cls)]
        for key in (key for key in values if key not in known):
            one_of("a key of fox", key, [name for name in known if name not in STATE])
        preset = values.get("preset")
        if preset == "fox-partial":  # of checkpoints from before the name was changed
            preset = "fox-stretch"
        if preset is not None:
            one_of("preset", preset, PRESETS)
        start = {} if preset is None else PRESETS[preset][0]
        given = {key: value for key, value in values.items() if key != "preset"}
        chosen = {"rope": None, "gate": cls.gate, "init": cls.init, **start, **given}
        idle = idle_fields(chosen["rope"], chosen["gate"], chosen["init"])  # the preset's own of these give way
        spec = cls(**{**{key: value for key, value in start.items() if key not in idle}, **given})
        spec.preset = preset
        return spec

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: plain lists, numbers and strings, layer numbers as strings."""
        values = asdict(self)
        values["pro"] = list(self.pro)
        values["half_life"] = None if self.half_life is None else list(self.half_life)
        if not isinstance(self.open_heads, int):
            values["open_heads"] = [list(head) for head in self.open_heads]
        values["layer_max_wavelength"] = {str(k): v for k, v in self.layer_max_wavelength.items()}
        values["layer_pairs"] = {str(k): list(v) for k, v in self.layer_pairs.items()}
        return values

    def resolved(self, trained_length: int) -> FoxSpec:
        """This spec with its None defaults filled in from the length (tokens) the base model was trained to."""
        spec = copy.deepcopy(self)
        spec.rope_factor = ROPE_FACTOR if spec.rope_factor is None else spec.rope_factor
        spec.rope_length = float(trained_length) if spec.rope_length is None else spec.rope_length
        if spec.max_wavelength is None:
            spec.max_wavelength = trained_length / 4
        if spec.half_life is None and spec.init != "alibi":
            shortest, longest = OPEN if spec.rope == "interpolate" else (1 / 32, 8.0)
            if spec.init == "measured":
                shortest, longest = MEASURED
            spec.half_life = (max(1.0, trained_length * shortest), trained_length * longest)
        return spec


def idle_fields(rope: str | None, gate: str, init: str) -> dict[str, str]:
    """Field of a FoxSpec that these values of three others leave without effect -> which of the three does so."""
    idle: dict[str, str] = {}
    if rope != "interpolate":
        idle |= dict.fromkeys(("rope_factor", "rope_length", "beta_fast", "beta_slow"), "rope")
    if rope in ("keep", "drop", "interpolate"):
        idle["max_wavelength"] = "rope"
    idle |= dict.fromkeys(("anneal_to", "anneal_tokens", "annealed_tokens"), "rope")  # state, see FoxSpec
    if init == "open":
        idle |= dict.fromkeys(("half_life", "max_half_life", "open_heads", "horizon"), "init")
    if init == "alibi":
        idle["half_life"] = "init"
    if gate == "none":
        starts = ("half_life", "max_half_life", "open_heads", "init", "gate_heads")
        idle |= dict.fromkeys((*starts, "sink_tokens", "horizon"), "gate")
    return idle
