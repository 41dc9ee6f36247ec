"""A recipe and its sections: model, data, stages, adapters, checkpoints, log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from retrofox.config.fields import Fox, Place, Positive, Section
from retrofox.config.stage import AnyStage


class Source(Section):
    """One source of documents: a file, a directory, a glob, or a Hugging Face dataset id."""

    path: str = Field(min_length=1)
    weight: float = Field(
        default=1.0, ge=1e-3, le=1e3, description="share of the tokens, relative to the other sources; in `eval`, none"
    )
    text_field: str | None = Field(
        default=None,
        description="field holding the text; None = data.text_field; of a chat, messages",
    )
    fact_share: float | None = Field(default=None, ge=0, le=1, description="None = data.fact_share; in `eval`, 0")
    questions: float | None = Field(default=None, ge=0, le=1, description="None = data.questions; in `eval`, 0")
    chat: bool = Field(
        default=False,
        description="the field holds messages, [{role, content}, ...]: they take the form of the tokenizer's chat "
        "template, and only what the assistant says is learnt",
    )

    def _rules(self) -> Iterator[tuple[bool, str]]:
        facts = bool(self.fact_share or self.questions)
        yield self.chat and facts, "fact_share and questions change texts, not conversations: remove them, or chat"


def _source(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


SourceOrPath = Annotated[Source, BeforeValidator(_source, json_schema_input_type=str | Source)]


class DataConfig(Section):
    """Where documents come from and how they become tokens."""

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
    self_chat: float = Field(
        default=0.0,
        ge=0,
        le=0.9,
        description="share of the tokens to train on that are conversations which the model, an instruct model, makes "
        "itself beforehand, both turns sampled: its answers then change less",
    )
    split_special_tokens: bool = Field(
        default=True,
        description="special tokens spelled out in a text, such as </s>, are plain text; false = they become the token",
    )

    def _rules(self) -> Iterator[tuple[bool, str]]:
        told = [source.fact_share for source in self.read_as()]
        asked = self.questions > 0 and not any(told)
        asked = asked or any(source.questions and not share for source, share in zip(self.train, told, strict=True))
        asked = asked or any(source.questions and not source.fact_share for source in self.eval)
        yield asked, "questions are a share of the facts: set fact_share, or remove questions"
        idle = self.fact_share > 0 and all(source.chat for source in self.train)
        yield idle, "facts are put into texts, and all sources are chat: remove fact_share"
        weighted = any(source.weight != 1.0 for source in self.eval)
        yield weighted, "weights are for texts to train on; held-out windows come evenly from all sources of eval"

    def read_as(self) -> list[Source]:
        """The sources to train on; those of texts have field and shares of facts and questions filled in."""
        filled = []
        for source in self.train:
            given = source.model_dump(include={"text_field", "fact_share", "questions"}, exclude_none=True)
            shared = {"text_field": self.text_field, "fact_share": self.fact_share, "questions": self.questions}
            filled.append(source if source.chat else source.model_copy(update=shared | given))
        return filled

    @property
    def cache_dir(self) -> Path:
        """The directory of token shards, with the default filled in."""
        if self.cache is not None:
            return Path(self.cache).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "retrofox"


class LoraConfig(Section):
    """Adapters on the pretrained projections; gates and Pro parts are trained in full beside them."""

    hints: ClassVar[dict[str, str]] = {
        "r": "did you mean rank?",
        "lora_alpha": "did you mean alpha?",
        "lora_dropout": "did you mean dropout?",
        "target_modules": "did you mean targets?",
        "use_dora": "did you mean dora?",
        "load_in_4bit": "did you mean quantize: nf4?",
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


ROPE_KEYS = {
    "linear": (),
    "dynamic": ("original_max_position_embeddings",),
    "yarn": (
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        "original_max_position_embeddings",
    ),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Keys beside rope_type and factor that transformers reads."""


class RopeScaling(Section):
    """transformers' `rope_scaling` of an unconverted model: the keys of its rope_type (ROPE_KEYS) go on to it."""

    model_config = ConfigDict(extra="allow")

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: float = Field(gt=1, description="by how much the trained length is stretched")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        given = set(self.model_extra or ())
        unknown, known = sorted(given - set(ROPE_KEYS[self.rope_type])), ", ".join(ROPE_KEYS[self.rope_type]) or "none"
        yield bool(unknown), f"rope_type {self.rope_type} has no {', '.join(unknown)}; further keys of it: {known}"
        lacking = {"low_freq_factor", "high_freq_factor"} - given
        yield self.rope_type == "llama3" and bool(lacking), "rope_type llama3 takes low_freq_factor, high_freq_factor"


class CheckpointConfig(Section):
    """When checkpoints are written and how many complete ones are kept."""

    every_tokens: Positive | None = None
    every_steps: Positive | None = None
    keep: int = Field(default=2, ge=1)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        both = self.every_tokens is not None and self.every_steps is not None
        yield both, "give every_tokens or every_steps, not both"


class LogConfig(Section):
    """How often a line is logged, and where else it goes."""

    every: int = Field(default=10, ge=1, description="optimizer steps between log lines; a checkpoint has one, too")
    report_to: list[Literal["tensorboard", "trackio", "wandb"]] = Field(default=[])
    eval_tokens: Positive = Field(default=262_144, description="held-out tokens scored before and after each stage")


class ParallelConfig(Section):
    """How processes share rows that are too long for one device; the number of processes is the launcher's."""

    context: int = Field(
        default=1, ge=1, description="processes that share each row; those beyond it read other rows (DDP, FSDP2)"
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
    precision: Literal["bf16", "fp32"] = "bf16"
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

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.fox is not None and self.attention is not None,
            "attention is for unconverted models: one with `fox:` always runs Forgetting Attention",
        )
        for key in ("rope_scaling", "rope_theta"):
            other = "fox" if self.fox is not None else "lora" if self.lora is not None else None
            yield (
                getattr(self, key) is not None and other is not None,
                f"{key} is for unconverted models: remove it, or remove `{other}:`",
            )
        aligns = any(stage.objective == "align" for stage in self.stages)
        yield self.lora is not None and aligns, "lora adapts what align leaves alone: remove one of the two"
