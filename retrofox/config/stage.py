"""One stage of a recipe: objective, tokens, rates, schedule; refuses fields that exclude each other."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from retrofox.config.fields import MOST, Count, Positive, Rate, Section, whole

ROLES = ("gate_bias", "gate_weight", "pro", "attention", "rest")
TAUGHT = ("align", "distill")
"""Objectives that learn from the original."""
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

    share: float = Field(gt=0, lt=1, description="of the keys that are to be left alive")
    length: Positive = Field(default=32768, description="tokens of the text of which it is the share")
    weight: float = Field(default=0.03, gt=0, description="of the pressure beside the loss")
    anneal: float = Field(default=0.5, ge=0, le=1, description="part of the stage in which the target falls from 1")
    form: Literal["equal", "hinge"] = Field(
        default="equal", description="equal: on every head's log half-life; hinge: on the share itself"
    )
    spare: list[Annotated[list[Count], Field(min_length=2, max_length=2)]] = Field(
        default=[], description="[layer, kv head] of the heads that are not pressed, counted from 0"
    )


class Stage(Section):
    """One stage of adaptation: its objective, its tokens, its rates."""

    objective: Literal["adapt", "align", "distill", "extend"] = Field(
        description="adapt: the original itself learns, before all else; align, distill: from the original; extend"
    )
    tokens: Positive = Field(description="training tokens of this stage, all devices together")
    sequence_length: Annotated[int, whole, Field(ge=2, le=MOST)]
    max_position: Positive | None = Field(
        default=None,
        description="extend: in half of the documents positions skip ahead at a random token and stay below this, so "
        "that RoPE learns distances beyond sequence_length; None = positions count tokens",
    )
    batch_tokens: Positive | None = Field(default=None, description="tokens per step; None = one micro-batch a device")
    micro_batch: int = Field(default=1, ge=1, description="sequences per device and forward pass")
    learning_rate: Rate = 1e-4
    rates: Rates = Rates()
    trainable: list[str] | None = Field(
        default=None, min_length=1, description="glob patterns of parameter names; None = every role's rate"
    )
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices; vectors and gates have none")
    gate_weight_decay: float = Field(
        default=0.0, ge=0, description="of the gates' weights; decay of their biases would end in half-lives of a token"
    )
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
    budget: Budget | None = Field(
        default=None, description="extend, distill: pressure on the gates that ends at a share of live keys"
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
        default="none", description="none, full, or n: every n-th layer is recomputed"
    )
    tiled_mlp: Literal["none", "auto"] | Annotated[int, Field(ge=1)] = Field(
        default="none",
        description="none, auto, or n: MLPs run over n tokens at a time, their widest tensors never whole",
    )
    offload_activations: bool = Field(
        default=False, description="the checkpoints of gradient_checkpointing wait in CPU memory for the backward"
    )
    offload_optimizer: bool = Field(
        default=False, description="the optimizer's state stays in CPU memory and visits the GPU in each step"
    )
    compile: bool = Field(default=False, description="torch.compile of the MLPs and norms")
    spike_factor: float = Field(
        default=3.0, ge=0, description="stop where the loss exceeds this times its running mean plus 1 nat; 0 = never"
    )

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, values: Any) -> Any:
        """Recipes of runs made before hold `teacher_logits: null`."""
        if isinstance(values, dict) and values.get("teacher_logits", 0) is None:
            return {key: value for key, value in values.items() if key != "teacher_logits"}
        return values

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
        if self.max_position is not None and self.objective != "extend":
            raise ValueError(
                f"max_position belongs to objective extend, and this stage's is {self.objective}: remove it"
            )
        if self.max_position is not None and self.max_position <= self.sequence_length:
            raise ValueError(
                f"max_position must exceed sequence_length ({self.sequence_length}), got {self.max_position}: give the "
                "length that the model is to reach, or remove it"
            )
        if self.budget is not None and self.objective not in ("extend", "distill"):
            raise ValueError(
                f"budget belongs to objectives extend and distill, and this stage's is {self.objective}: remove it"
            )
        if self.teacher is not None and self.objective not in TAUGHT:
            raise ValueError(
                f"teacher belongs to objectives align and distill, and this stage's is {self.objective}: remove it"
            )
        if self.decay_tokens is not None and self.schedule != "wsd":
            raise ValueError(f"decay_tokens belongs to schedule wsd, and this stage's is {self.schedule}: remove it")
        if self.min_lr_ratio and self.schedule == "constant":
            raise ValueError(
                f"min_lr_ratio is where a schedule ends, and constant stays at 1: remove it, got {self.min_lr_ratio:g}"
            )
        if self.objective == "adapt":
            for role in ("gate_bias", "gate_weight", "pro"):
                if self.rate(role):
                    raise ValueError(
                        f"adapt trains the original, which has neither gates nor Pro parts: rates.{role} must be 0 or "
                        f"left out, got {self.rate(role):g}"
                    )
        if self.objective == "align" and self.rates.rest:
            raise ValueError(
                f"align compares attention blocks alone: rates.rest must be 0 or left out, got {self.rates.rest:g}"
            )
        if self.objective == "align" and self.cross_entropy != "auto":
            raise ValueError("cross_entropy belongs to objectives distill and extend: align computes no logits")
        if self.offload_activations and self.objective == "align":
            raise ValueError("align keeps no checkpoints of whole layers to move: set offload_activations: false")
        if self.offload_activations and self.gradient_checkpointing == "none":
            raise ValueError(
                "offload_activations moves the checkpoints of gradient checkpointing: set gradient_checkpointing: full"
            )
        if self.compile and self.tiled_mlp != "none":
            raise ValueError("compile and tiled_mlp both take over the MLPs: set compile: false, or tiled_mlp: none")
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
        if self.objective in TAUGHT:
            self.teacher = self.teacher or "auto"
        if distill:
            self.temperature = 1.0 if self.temperature is None else self.temperature
            self.ce_weight = 0.0 if self.ce_weight is None else self.ce_weight
        new = 0.0 if self.objective == "adapt" else float(f"{GATE_RATE_FACTOR * self.learning_rate:.12g}")
        pretrained = 0.0 if self.objective == "align" else self.learning_rate
        defaults = {"gate_bias": new, "gate_weight": new, "pro": new, "attention": pretrained, "rest": pretrained}
        for role, default in defaults.items():
            if getattr(self.rates, role) is None:
                self.rates = self.rates.model_copy(update={role: default})
        return self

    def rate(self, role: str) -> float:
        """Peak learning rate of a role (one of ROLES)."""
        return getattr(self.rates, role)
