"""One stage of a recipe. Each objective is a type of its own, with the fields that only it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from retrofox.config.fields import MOST, Count, Positive, Rate, Section, whole

ROLES = ("gate_bias", "gate_weight", "pro", "attention", "rest")
GATE_RATE_FACTOR = 5.0
"""Rates of the new parts over `learning_rate` where the recipe names none: Adam moves a bias by about lr per step."""


class Rates(Section):
    """Peak learning rate of each role; 0 freezes it, None is filled in from the stage's `learning_rate`."""

    gate_bias: Rate | None = None
    gate_weight: Rate | None = None
    pro: Rate | None = None
    attention: Rate | None = Field(default=None, description="q, k, v and o projections and their norms and adapters")
    rest: Rate | None = Field(default=None, description="everything else: MLPs, norms, embeddings, head")


class Budget(Section):
    """A pressure on the gates until few enough keys are left alive (`retrofox.training.budget`)."""

    share: float = Field(gt=0, lt=1, description="of the keys left alive; half-lives below 64 tokens are not pressed")
    length: Positive = Field(default=32768, description="tokens of the text that the share counts")
    weight: float = Field(default=0.03, gt=0, description="of the pressure beside the loss")
    anneal: float = Field(default=0.5, ge=0, le=1, description="part of the stage in which the target falls from 1")


class Stage(Section):
    """What the stages of all objectives take: tokens, rates, schedule, and switches that save memory."""

    trains_pretrained: ClassVar[bool] = True
    """Whether a stage trains the pretrained parts unless its rates say otherwise."""

    objective: Literal["align", "distill", "extend"] = Field(
        description="align, distill: learn from the original; extend: from text alone"
    )
    tokens: Positive = Field(description="training tokens of this stage, all devices together")
    sequence_length: Annotated[int, whole, Field(ge=2, le=MOST)]
    batch_tokens: Positive | None = Field(default=None, description="tokens per step; None = one micro-batch a device")
    micro_batch: int = Field(default=1, ge=1, description="sequences per device and forward pass")
    learning_rate: Rate = 1e-4
    rates: Rates = Field(default=Rates(), validate_default=True)
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices; vectors and gates have none")
    gate_weight_decay: float = Field(
        default=0.0, ge=0, description="of the gates' weights; decay of their biases would end in half-lives of a token"
    )
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    clip: float = Field(default=1.0, ge=0, description="largest norm of the gradient; 0 = no clipping")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_tokens: Count = 0
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    cross_entropy: Literal["auto", "chunked", "liger"] = "auto"
    gradient_checkpointing: Literal["none", "full"] | Annotated[int, Field(ge=1)] = Field(
        default="none", description="none, full, or n: every n-th layer is recomputed"
    )
    tiled_mlp: Literal["none", "auto"] | Annotated[int, Field(ge=1)] = Field(
        default="none",
        description="none, auto, or n: MLPs run over n tokens at a time, their widest tensors never whole",
    )
    offload_activations: bool = Field(
        default=False, description="the checkpoints of gradient_checkpointing wait in CPU memory for the backward"
    )
    spike_factor: float = Field(
        default=3.0, ge=0, description="stop where the loss exceeds this times its running mean plus 1 nat; 0 = never"
    )

    @field_validator("rates")
    @classmethod
    def _filled(cls, rates: Rates, info: ValidationInfo) -> Rates:
        rate = info.data.get("learning_rate", 0.0)
        new = float(f"{GATE_RATE_FACTOR * rate:.12g}")
        pretrained = rate if cls.trains_pretrained else 0.0
        defaults = {"gate_bias": new, "gate_weight": new, "pro": new, "attention": pretrained, "rest": pretrained}
        return rates.model_copy(update=defaults | rates.model_dump(exclude_none=True))

    def _rules(self) -> Iterator[tuple[bool, str]]:
        length, batch = self.sequence_length, self.batch_tokens or self.sequence_length
        down = max(1, batch // length) * length
        yield (
            batch % length > 0,
            f"batch_tokens must be a multiple of sequence_length: {batch} is not one of {length}; nearest: {down} or "
            f"{down + length}",
        )
        yield (
            self.min_lr_ratio > 0 and self.schedule == "constant",
            f"min_lr_ratio is where a schedule ends, and constant stays at 1: remove it, got {self.min_lr_ratio:g}",
        )
        yield (
            self.warmup_tokens >= self.tokens,
            f"warmup_tokens must be less than tokens ({self.tokens}), got {self.warmup_tokens}",
        )
        yield (
            self.offload_activations and self.gradient_checkpointing == "none",
            "offload_activations moves the checkpoints of gradient checkpointing: set gradient_checkpointing: full",
        )

    def rate(self, role: str) -> float:
        """Peak learning rate of a role (one of ROLES)."""
        return getattr(self.rates, role)


class TaughtStage(Stage):
    """A stage that learns from the original: its own frozen weights where they still are, else a second model."""


class BudgetedStage(Stage):
    """A stage whose gates may be pressed to a budget."""

    budget: Budget | None = Field(default=None, description="pressure on the gates that ends at a share of live keys")


class AlignStage(TaughtStage):
    """Each attention block learns its original's output; no logits are computed."""

    trains_pretrained = False
    objective: Literal["align"]
    cross_entropy: Literal["auto"] = Field(default="auto", description="align computes no logits")
    offload_activations: Literal[False] = Field(default=False, description="align keeps no checkpoints of whole layers")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield from super()._rules()
        yield self.rate("rest") > 0, "rates.rest must be 0 or left out: align compares attention blocks alone"


class DistillStage(TaughtStage, BudgetedStage):
    """The logits learn from the original's."""

    objective: Literal["distill"]
    temperature: float = Field(default=1.0, ge=1e-3, le=1e3, description="both logits are divided by it")
    ce_weight: float = Field(default=0.0, ge=0, le=1, description="share of cross-entropy in the loss")
    cross_entropy: Literal["auto", "chunked"] = Field(
        default="auto", description="distill needs both models' logits of a row at a time, which only chunked has"
    )

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield from super()._rules()
        idle = self.ce_weight == 1 and self.temperature != 1
        yield idle, f"ce_weight 1 leaves temperature without effect: drop one of them; got {self.temperature:g}"


class ExtendStage(BudgetedStage):
    """Cross-entropy on longer texts."""

    objective: Literal["extend"]
    max_position: Positive | None = Field(
        default=None,
        description="in half of the documents positions skip ahead at a random token and stay below this, so that RoPE "
        "learns distances beyond sequence_length; None = positions count tokens",
    )

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield from super()._rules()
        yield (
            self.max_position is not None and self.max_position <= self.sequence_length,
            f"max_position must exceed sequence_length ({self.sequence_length}), got {self.max_position}: give the "
            "length that the model is to reach, or remove it",
        )


AnyStage = Annotated[AlignStage | DistillStage | ExtendStage, Field(discriminator="objective")]
