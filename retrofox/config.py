"""The recipe: one YAML file that says which model, which retrofit, which data, which stages; strict, with hints.

YAML -> `load_recipe` (overrides `a.b=c` applied, unknown keys refused) -> `Recipe` -> `dump` (defaults written out).
Importing this module imports no torch.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from retrofox.config_yaml import apply_override, read_yaml, write_yaml
from retrofox.model.configuration_fox import PRESETS, FoxSpec
from retrofox.support.counts import ALLOWED, PATTERN, parse_count

ROLES = ("gate_bias", "gate_weight", "pro", "attention", "rest")
GATE_RATE_FACTOR = 5.0
"""Rates of the new parts over `learning_rate` where the recipe names none: Adam moves a bias by about lr per step."""

_FOX_COUNTS = {"anneal_tokens", "annealed_tokens"}
_FOX_TOKENS = {
    "rope_length",
    "max_wavelength",
    "log_n",
    "half_life",
    "t_min",
    "t_max",
    "layer_max_wavelength",
    "sink_tokens",
}
"""Keys of a `fox:` section that take tokens, alone, in a list or in a mapping."""


def _whole(value: object) -> object:
    """A count as an integer; text that is none is an error that lists the suffixes."""
    number = parse_count(value)
    if isinstance(number, str) or (isinstance(number, float) and math.isfinite(number)):
        raise ValueError(f"given {value!r}: it takes {ALLOWED}")
    return number


def _tokens(value: Any) -> Any:
    """The tokens in a value of a `fox:` section, suffixes read."""
    if isinstance(value, (list, tuple)):
        return [parse_count(item) for item in value]
    if isinstance(value, dict):
        return {key: parse_count(item) for key, item in value.items()}
    return parse_count(value)


def _fox(value: object) -> object:
    if value is None or isinstance(value, FoxSpec):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"a mapping such as {{rope: partial, max_wavelength: 1400}}, or null; got {value!r}")
    values = {str(key): _tokens(item) if key in _FOX_COUNTS | _FOX_TOKENS else item for key, item in value.items()}
    for key in _FOX_COUNTS & values.keys():
        count = values[key]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"{key} must be {ALLOWED}, 0 or more; got {value[key]!r}")
    try:
        return FoxSpec.from_dict(values)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{_of_wrong_type(values)} ({error})") from None


def _of_wrong_type(values: dict[str, Any]) -> str:
    """Which value of a `fox:` section has a type that can't be meant."""
    for key, item in values.items():
        try:
            FoxSpec.from_dict({key: item})
        except (TypeError, AttributeError):
            return f"{key} has the wrong type: {item!r}"
        except ValueError:
            continue
    return "a value has the wrong type"


def _source(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


_count = BeforeValidator(_whole, json_schema_input_type=int | Annotated[str, Field(pattern=f"^{PATTERN}$")])
Count = Annotated[int, _count, Field(ge=0)]
Positive = Annotated[int, _count, Field(gt=0)]
Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
Rate = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Fox = Annotated[FoxSpec, BeforeValidator(_fox), PlainSerializer(lambda spec: spec.to_dict())]


class Section(BaseModel):
    """Base of every section: unknown keys and wrong types are errors, "3" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)


class Source(Section):
    """One source of documents: a file, a directory, a glob, or a Hugging Face dataset id."""

    path: str = Field(min_length=1)
    weight: float = Field(
        default=1.0, ge=1e-9, le=1e9, description="share of the tokens, relative to the other sources"
    )
    text_field: str | None = Field(default=None, description="field holding the text; None = data.text_field")
    recall: float = Field(
        default=0.0, ge=0, le=1, description="share of the documents into which made-up facts are put, each told twice"
    )


SourceOrPath = Annotated[Source, BeforeValidator(_source, json_schema_input_type=str | Source)]


class DataConfig(Section):
    """Where documents come from and how they become tokens."""

    train: list[SourceOrPath] = Field(min_length=1)
    eval: list[SourceOrPath] = []
    tokenizer: Place | None = Field(default=None, description="Hub id or directory; None = the model's own")
    cache: str | None = Field(
        default=None, min_length=1, description="token shards; None = $XDG_CACHE_HOME/retrofox or ~/.cache/retrofox"
    )
    text_field: str = "text"
    workers: int | None = Field(default=None, ge=1, description="tokenising processes; None = all cores")

    def read_as(self) -> list[Source]:
        """The sources to train on, each with the field its text is in."""
        return [source.model_copy(update={"text_field": source.text_field or self.text_field}) for source in self.train]

    @property
    def cache_dir(self) -> Path:
        """The directory of token shards, with the default filled in."""
        if self.cache is not None:
            return Path(self.cache).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "retrofox"


class Rates(Section):
    """Peak learning rate of each role; 0 freezes it, None is filled in from the stage's `learning_rate`."""

    gate_bias: Rate | None = None
    gate_weight: Rate | None = None
    pro: Rate | None = None
    attention: Rate | None = Field(default=None, description="q, k, v and o projections and their norms and adapters")
    rest: Rate | None = Field(default=None, description="everything else: MLPs, norms, embeddings, head")


class Stage(Section):
    """One stage of adaptation: its objective, its tokens, its rates."""

    objective: Literal["align", "distill", "extend"]
    tokens: Positive = Field(description="training tokens of this stage, all devices together")
    sequence_length: Annotated[int, _count, Field(ge=2)]
    batch_tokens: Positive | None = Field(default=None, description="tokens per step; None = one micro-batch a device")
    micro_batch: int = Field(default=1, ge=1, description="sequences per device and forward pass")
    learning_rate: Rate = 1e-4
    rates: Rates = Rates()
    trainable: list[str] | None = Field(
        default=None, min_length=1, description="glob patterns of parameter names; None = every role's rate"
    )
    weight_decay: float = Field(default=0.1, ge=0)
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    clip: float = Field(default=1.0, ge=0, description="largest norm of the gradient; 0 = no clipping")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_tokens: Count = 0
    decay_tokens: Positive | None = Field(default=None, description="wsd: tokens of the final decay; None = a fifth")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    gate_delay_tokens: Count = Field(default=0, description="gates keep their start this long")
    anneal: bool = Field(
        default=True, description="whether this stage moves the annealing of a model with rope: anneal"
    )
    teacher: Literal["auto", "shared", "copy"] | None = Field(
        default=None, description="align, distill: shared = the frozen weights themselves, copy = a second model"
    )
    temperature: float | None = Field(
        default=None, ge=1e-3, le=1e3, description="distill: both logits are divided by it (1)"
    )
    ce_weight: float | None = Field(
        default=None, ge=0, le=1, description="distill: share of cross-entropy in the loss (0)"
    )
    cross_entropy: Literal["auto", "chunked", "torch", "liger"] = "auto"
    gradient_checkpointing: Literal["none", "full"] | Annotated[int, Field(ge=1)] = Field(
        "none", description="none, full, or n: every n-th layer is recomputed"
    )
    compile: bool = Field(default=False, description="torch.compile of the MLPs and norms")
    spike_factor: float = Field(
        default=3.0, ge=0, description="stop where the loss exceeds this times its running mean plus 1 nat; 0 = never"
    )

    @model_validator(mode="after")
    def _fill(self) -> Stage:
        if self.batch_tokens is None:
            return self._resolve()
        if self.batch_tokens % self.sequence_length:
            down = max(1, self.batch_tokens // self.sequence_length) * self.sequence_length
            raise ValueError(
                f"batch_tokens must be a multiple of sequence_length: {self.batch_tokens} is not one of "
                f"{self.sequence_length}; nearest: {down} or {down + self.sequence_length}"
            )
        return self._resolve()

    def _resolve(self) -> Stage:
        distill = self.objective == "distill"
        for key in ("temperature", "ce_weight"):
            if getattr(self, key) is not None and not distill:
                raise ValueError(f"{key} belongs to objective distill, and this stage's is {self.objective}: remove it")
        if self.teacher is not None and self.objective == "extend":
            raise ValueError("teacher belongs to objectives align and distill, and this stage's is extend: remove it")
        if self.decay_tokens is not None and self.schedule != "wsd":
            raise ValueError(f"decay_tokens belongs to schedule wsd, and this stage's is {self.schedule}: remove it")
        if self.objective == "align" and self.rates.rest:
            raise ValueError(
                f"align compares attention blocks alone: rates.rest must be 0 or left out, got {self.rates.rest:g}"
            )
        if self.objective == "align" and self.cross_entropy != "auto":
            raise ValueError("cross_entropy belongs to objectives distill and extend: align computes no logits")
        if distill and self.cross_entropy not in ("auto", "chunked"):
            raise ValueError(
                f"cross_entropy {self.cross_entropy} belongs to objective extend: distill needs both models' logits of "
                "a row at a time, which only chunked has"
            )
        if self.decay_tokens is not None and self.warmup_tokens + self.decay_tokens > self.tokens:
            raise ValueError(
                f"warmup_tokens + decay_tokens must be at most tokens ({self.tokens}), "
                f"got {self.warmup_tokens} + {self.decay_tokens}"
            )
        if self.warmup_tokens >= self.tokens:
            raise ValueError(f"warmup_tokens must be less than tokens ({self.tokens}), got {self.warmup_tokens}")
        if self.gate_delay_tokens >= self.tokens:
            raise ValueError(
                f"gate_delay_tokens must be less than tokens ({self.tokens}), got {self.gate_delay_tokens}"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if self.objective != "extend":
            self.teacher = self.teacher or "auto"
        if distill:
            self.temperature = 1.0 if self.temperature is None else self.temperature
            self.ce_weight = 0.0 if self.ce_weight is None else self.ce_weight
        new = float(f"{GATE_RATE_FACTOR * self.learning_rate:.12g}")
        pretrained = 0.0 if self.objective == "align" else self.learning_rate
        defaults = {"gate_bias": new, "gate_weight": new, "pro": new, "attention": pretrained, "rest": pretrained}
        for role, default in defaults.items():
            if getattr(self.rates, role) is None:
                self.rates = self.rates.model_copy(update={role: default})
        return self

    def rate(self, role: str) -> float:
        """Peak learning rate of a role (one of ROLES)."""
        return getattr(self.rates, role)


class LoraConfig(Section):
    """Adapters on the pretrained projections; gates and Pro parts are trained in full beside them."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        default="all-linear", description="module names; all-linear: all but gates"
    )
    dora: bool = False
    quantize: Literal["nf4"] | None = Field(default=None, description="QLoRA: 4-bit base (needs bitsandbytes)")


class RopeScaling(Section):
    """transformers' `rope_scaling` of an unconverted model: its type, its factor, and what that type takes besides."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: float = Field(gt=1, description="by how much the trained length is stretched")
    original_max_position_embeddings: Positive | None = Field(
        default=None, description="yarn, llama3: the length to count from; None = what the model was trained to"
    )
    attention_factor: float | None = Field(default=None, gt=0, description="yarn")
    beta_fast: float | None = Field(default=None, gt=0, description="yarn")
    beta_slow: float | None = Field(default=None, gt=0, description="yarn")
    low_freq_factor: float | None = Field(default=None, gt=0, description="llama3")
    high_freq_factor: float | None = Field(default=None, gt=0, description="llama3")

    @model_validator(mode="after")
    def _of_its_type(self) -> RopeScaling:
        takes = {
            "yarn": ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        }.get(self.rope_type, ())
        for key in type(self).model_fields:
            if getattr(self, key) is not None and key not in ("rope_type", "factor", *takes):
                raise ValueError(f"{key} has no effect with rope_type {self.rope_type}: remove it")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and (low is None or high is None or low >= high):
            raise ValueError("rope_type llama3 takes low_freq_factor and high_freq_factor, the first below the second")
        return self


class CheckpointConfig(Section):
    """When checkpoints are written and how many complete ones are kept."""

    every_tokens: Positive | None = None
    every_steps: Positive | None = None
    keep: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _one(self) -> CheckpointConfig:
        if self.every_tokens is not None and self.every_steps is not None:
            raise ValueError("give every_tokens or every_steps, not both")
        return self


class LogConfig(Section):
    """How often a line is logged, and where else it goes."""

    every: int = Field(default=10, ge=1, description="optimizer steps between log lines")
    report_to: list[Literal["tensorboard", "trackio", "wandb"]] = []
    eval_tokens: Positive = Field(default=262_144, description="held-out tokens scored before and after each stage")
    heads_every: int | None = Field(
        default=None, ge=1, description="steps between log lines with copy scores and attention mass; None = never"
    )

    @model_validator(mode="after")
    def _heads_with_lines(self) -> LogConfig:
        if self.heads_every is not None and self.heads_every % self.every:
            raise ValueError(f"heads_every must be a multiple of every, {self.every}; got {self.heads_every}")
        return self


class ParallelConfig(Section):
    """How processes share rows that are too long for one device; the number of processes is the launcher's."""

    context: int = Field(
        default=1, ge=1, description="processes that share each row; those beyond it read other rows (DDP, FSDP2)"
    )
    ulysses: int | None = Field(
        default=None, ge=1, description="of these, how many trade heads, the rest being a ring; None = as many as go"
    )


class Recipe(Section):
    """A whole run. `fox: null` trains the model as it is: the control."""

    model: Place = Field(description="Hub id, local directory, .gguf file, or converted directory")
    fox: Fox | None = None
    rope_scaling: RopeScaling | None = Field(
        default=None, description="fox: null: trains a control with scaled RoPE, such as {rope_type: yarn, factor: 4}"
    )
    rope_theta: float | None = Field(default=None, gt=0, description="fox: null: trains a control with another base")
    output: Place
    seed: int = Field(default=0, ge=0, lt=2**32)
    data: DataConfig
    stages: list[Stage] = Field(min_length=1)
    lora: LoraConfig | None = None
    precision: Literal["bf16", "fp32", "fp16"] = "bf16"
    optim: str = Field(default="adamw_torch_fused", description="any optimizer name of transformers' TrainingArguments")
    attention: str | None = Field(
        default=None, description="attn_implementation of an unconverted model; None = its default"
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    parallel: ParallelConfig = ParallelConfig()
    dataloader_workers: int = Field(default=2, ge=0)
    deterministic: bool = Field(
        default=False,
        description="GPUs: the same bits in every run, also after a resume, by slower backward passes (CPUs: always)",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.fox is not None and self.attention is not None:
            raise ValueError("attention is for unconverted models: one with `fox:` always runs Forgetting Attention")
        for key in ("rope_scaling", "rope_theta"):
            if getattr(self, key) is not None and (self.fox is not None or self.lora is not None):
                other = "fox" if self.fox is not None else "lora"
                raise ValueError(f"{key} is for unconverted models: remove it, or remove `{other}:`")
        for number, stage in enumerate(self.stages):
            if stage.objective != "extend" and self.lora is not None and stage.objective == "align":
                raise ValueError(
                    f"stages.{number}: align trains gates and Pro parts only, lora has nothing to do there"
                )
        return self


def load_recipe(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe and applies overrides such as "stages.0.tokens=20M" or "fox.sink_tokens=2".

    Args:
        path: a YAML file.
        overrides: "a.b=c": c is parsed as YAML, a number in the path is an index into a list.

    Raises:
        FileNotFoundError: no such file.
        ValueError: broken YAML, an unknown or missing key, a value outside its range; the text names the file, the
            key, what was given and what is allowed.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():  # a pipe is a recipe too: <(sed ...)
        raise FileNotFoundError(
            f"no recipe at {file}: give the path of a YAML file (`retrofox recipes cp NAME` copies one that ships, "
            "`retrofox config schema` describes them)"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error}): give the path of a YAML file") from None
    values = read_yaml(text, str(file))
    if not isinstance(values, dict):
        raise ValueError(f"{file}: a recipe is a mapping of keys to values, got {type(values).__name__}")
    for override in overrides or []:
        apply_override(values, override)
    return validate(values, str(file))


def validate(values: dict[str, Any], origin: str = "recipe") -> Recipe:
    """Builds a Recipe from plain values; errors name `origin`, the key, what was given and what is allowed."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError("\n".join(f"{origin}: {_explain(item)}" for item in error.errors())) from None


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; loading it gives the same recipe."""
    return write_yaml(recipe.model_dump(mode="python"))


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe, for editors."""
    result = Recipe.model_json_schema()
    text = {"type": "string", "pattern": f"^{PATTERN}$"}
    properties = result["$defs"]["FoxSpec"]["properties"]
    for key in (_FOX_COUNTS | _FOX_TOKENS) - {"half_life", "layer_max_wavelength"}:
        properties[key] = {"anyOf": [properties[key], text]}
    numbers = {"anyOf": [{"type": "number"}, text]}
    properties["half_life"]["anyOf"][0]["prefixItems"] = [numbers, numbers]
    properties["layer_max_wavelength"]["additionalProperties"] = numbers
    properties["preset"] = {"enum": [*PRESETS, None], "default": None, "title": "Preset"}
    return result


_UNION_MEMBERS = ("constrained-int", "int", "str", "function-before", "FoxSpec")
"""Names pydantic puts into an error's place for the branch of a union: not keys of the recipe."""


def _explain(item: Any) -> str:
    """One pydantic error as a sentence: key, what was given, what is allowed."""
    place = [part for part in item["loc"] if part not in _UNION_MEMBERS and "[" not in str(part)]
    key = ".".join(str(part) for part in place) or "recipe"
    given = item["input"]
    shown = repr(given) if len(repr(given)) <= 80 else repr(given)[:77] + "..."
    if item["type"] == "extra_forbidden":
        known = _known_keys(place[:-1])
        near = difflib.get_close_matches(str(place[-1]), known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"{key}: unknown key, given {shown}{hint}. Known keys: {', '.join(known)}"
    if item["type"] == "missing":
        return f"{key}: required key is missing"
    if item["type"] == "literal_error":
        near = difflib.get_close_matches(str(given), re.findall(r"'([^']*)'", item["ctx"]["expected"]), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"{key}: given {shown}, allowed {item['ctx']['expected']}{hint}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower() + message[1:]}" + ("" if item["type"] == "value_error" else f", given {shown}")


def _known_keys(place: list[Any]) -> list[str]:
    """The keys of the section at a place such as ["stages", 0, "rates"]."""
    section: type[BaseModel] = Recipe
    for part in place:
        if isinstance(part, str) and part in section.model_fields:
            section = _section_of(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section_of(inner))), None)
