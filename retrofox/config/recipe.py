"""A recipe and its sections: model, data, stages, adapters, checkpoints, log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from retrofox.config.fields import Fox, Place, Positive, Section
from retrofox.config.stage import AnyStage


class Source(Section):
    """One source of documents: a file, a directory, a glob, or a Hugging Face dataset id."""

    old_names: ClassVar[dict[str, str]] = {"recall": "fact_share"}

    path: str = Field(min_length=1)
    weight: float = Field(
        default=1.0, ge=1e-9, le=1e9, description="share of the tokens, relative to the other sources; in `eval`, none"
    )
    text_field: str | None = Field(
        default=None,
        description="field holding the text; None = data.text_field; of a chat, messages",
    )
    fact_share: float | None = Field(default=None, ge=0, le=1, description="None = data.fact_share; in `eval`, 0")
    questions: float | None = Field(default=None, ge=0, le=1, description="None = data.questions; in `eval`, 0")
    reflow: float = Field(
        default=0.0, ge=0, le=1, description="share of the documents whose long lines are broken at 60 to 80 columns"
    )
    recase: float = Field(
        default=0.0, ge=0, le=1, description="share of the documents that are put in lower or in upper case"
    )
    chat: bool = Field(
        default=False,
        description="the field holds messages, [{role, content}, ...]: they take the form of the tokenizer's chat "
        "template, and only what the assistant says is learnt",
    )

    @model_validator(mode="after")
    def _chat_as_it_is(self) -> Source:
        for name in ("fact_share", "questions", "reflow", "recase"):
            if self.chat and getattr(self, name):
                raise ValueError(f"{name} changes texts, not conversations: remove it, or chat")
        return self


def _source(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


SourceOrPath = Annotated[Source, BeforeValidator(_source, json_schema_input_type=str | Source)]


class DataConfig(Section):
    """Where documents come from and how they become tokens."""

    old_names: ClassVar[dict[str, str]] = {"recall": "fact_share"}

    train: list[SourceOrPath] = Field(min_length=1)
    eval: list[SourceOrPath] = Field(default=[])
    tokenizer: Place | None = Field(default=None, description="Hub id or directory; None = the model's own")
    cache: str | None = Field(
        default=None, min_length=1, description="token shards; None = $XDG_CACHE_HOME/retrofox or ~/.cache/retrofox"
    )
    text_field: str = "text"
    fact_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the documents to train on into which made-up facts are put, each told twice",
    )
    questions: float = Field(
        default=0.0, ge=0, le=1, description="share of these facts that are asked for where they are told again"
    )
    split_special_tokens: bool = Field(
        default=True,
        description="special tokens spelled out in a text, such as </s>, are plain text; false = they become the token",
    )
    workers: int | None = Field(default=None, ge=1, description="tokenising threads; None = all cores")

    @model_validator(mode="after")
    def _held_out_evenly(self) -> DataConfig:
        for number, source in enumerate(self.eval):
            if source.weight != 1.0:
                raise ValueError(
                    f"eval.{number}.weight: weights are for texts to train on; held-out windows come evenly from all "
                    f"sources: remove it, got {source.weight:g}"
                )
        return self

    @model_validator(mode="after")
    def _asked_of_something(self) -> DataConfig:
        sources = (*self.read_as(), *self.eval)
        without = [source.path for source in sources if source.questions and not source.fact_share]
        if self.questions and not any(source.fact_share for source in self.read_as()):
            without.append("data")
        if without:
            raise ValueError(
                f"questions ask for made-up facts, and fact_share is 0 in {without[0]}: set it, or leave questions out"
            )
        return self

    def read_as(self) -> list[Source]:
        """The sources to train on, each with the field its text is in and its share of facts and questions."""
        return [self._filled(source) for source in self.train]

    def _filled(self, source: Source) -> Source:
        if source.chat:
            return source.model_copy(update={"fact_share": 0.0, "questions": 0.0})
        facts = self.fact_share if source.fact_share is None else source.fact_share
        asked = (self.questions if facts else 0.0) if source.questions is None else source.questions
        text_field = source.text_field or self.text_field
        return source.model_copy(update={"text_field": text_field, "fact_share": facts, "questions": asked})

    @property
    def cache_dir(self) -> Path:
        """The directory of token shards, with the default filled in."""
        if self.cache is not None:
            return Path(self.cache).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "retrofox"


class LoraConfig(Section):
    """Adapters on the pretrained projections; gates and Pro parts are trained in full beside them."""

    elsewhere: ClassVar[dict[str, str]] = {
        "r": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "targets",
        "use_dora": "dora",
        "load_in_4bit": "quantize: nf4",
    }
    left_out: ClassVar[dict[str, str]] = {
        "modules_to_save": "gates and Pro parts are trained and saved in full without it",
        "bias": "biases stay as they are beside adapters",
        "use_rslora": "the scale is alpha / rank: for rsLoRA's set alpha to alpha * sqrt(rank)",
        **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"), "targets names the modules"),
        **dict.fromkeys(("rank_pattern", "alpha_pattern"), "rank and alpha are the same for all modules"),
        **dict.fromkeys(("task_type", "peft_type"), "it is LoRA of a causal language model"),
        "init_lora_weights": "B starts as 0, A as PEFT has it",
    }

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        default="all-linear", description="module names; all-linear: all but gates"
    )
    dora: bool = False
    quantize: Literal["nf4"] | None = Field(default=None, description="QLoRA: 4-bit base (needs bitsandbytes)")


class RopeScaling(Section):
    """transformers' `rope_scaling` of an unconverted model."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: float = Field(gt=1, description="by how much the trained length is stretched")
    original_max_position_embeddings: Positive | None = Field(
        default=None, description="yarn, llama3: the length to count from; None = what the model was trained to"
    )
    attention_factor: float | None = Field(default=None, gt=0, description="yarn")
    beta_fast: float | None = Field(default=None, gt=0, description="yarn")
    beta_slow: float | None = Field(default=None, gt=0, description="yarn")
    low_freq_factor: float | None = Field(default=None, gt=0, description="llama3: longer wavelengths are divided")
    high_freq_factor: float | None = Field(default=None, gt=0, description="llama3: shorter wavelengths stay")

    @model_validator(mode="after")
    def _of_its_type(self) -> RopeScaling:
        own = {
            "yarn": {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"},
            "llama3": {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
        }
        given = self.model_dump(exclude={"rope_type", "factor"}, exclude_none=True)
        for key in given.keys() - own.get(self.rope_type, set()):
            raise ValueError(f"{key} is not for rope_type {self.rope_type}: remove it")
        if self.rope_type == "llama3" and not (self.low_freq_factor or 0) < (self.high_freq_factor or 0):
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

    gone: ClassVar[dict[str, Any]] = {"heads_every": None}

    every: int = Field(default=10, ge=1, description="optimizer steps between log lines")
    report_to: list[Literal["tensorboard", "trackio", "wandb"]] = Field(default=[])
    eval_tokens: Positive = Field(default=262_144, description="held-out tokens scored before and after each stage")


class ParallelConfig(Section):
    """How processes share rows that are too long for one device; the number of processes is the launcher's."""

    context: int = Field(
        default=1, ge=1, description="processes that share each row; those beyond it read other rows (DDP, FSDP2)"
    )
    ulysses: int | None = Field(
        default=None, ge=1, description="of these, how many trade heads, the rest gathering keys; None = as many as go"
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
    stages: list[AnyStage] = Field(min_length=1)
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
        objectives = [stage.objective for stage in self.stages]
        if self.lora is not None and {"adapt", "align"} & {*objectives}:
            raise ValueError("lora adapts what align leaves alone and freezes what adapt trains: remove one of the two")
        adapt = objectives.count("adapt")
        if "adapt" in objectives[adapt:]:
            late = next(number for number in range(adapt, len(objectives)) if objectives[number] == "adapt")
            raise ValueError(f"stages.{late}: adapt changes the original of the stages before it: put it first")
        if adapt == len(objectives):
            raise ValueError(
                "adapt leaves the gates as they are: add a stage that trains them (align, distill, extend)"
            )
        return self
