"""Watching the training loop: its loss, signals, statistics of the gates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from retrofox.anatomy import decoder_layers
from retrofox.config_values import horizon_of, kv_heads_of
from retrofox.half_lives import DEAD_DECAY, half_life_tokens
from retrofox.model.modeling_fox import ForgetGate
from retrofox.parallel.mesh import Mesh
from retrofox.planning.live_share import HORIZON, live_shares
from retrofox.support.interruptions import Interruptions
from retrofox.training import checkpoint


class Guard:
    """Stops a run whose loss turned NaN or jumped: loss > factor * running mean + 1 nat.

    State: the running mean of logged losses (decay 0.9), saved with every checkpoint.

    Args:
        root: where the stage's checkpoints lie, for the way back.
    """

    def __init__(self, factor: float, root: Path):
        self.factor, self.root = factor, root
        self.mean: float | None = None

    def check(self, loss: float, grad_norm: float | None, step: int) -> None:
        """Adds the loss to the running mean; raises ValueError where it isn't finite, or has jumped."""
        if not math.isfinite(loss) or (grad_norm is not None and not math.isfinite(grad_norm)):
            found = f"loss {loss}, gradient norm {grad_norm}: not finite"
        elif self.factor and self.mean is not None and loss > self.factor * self.mean + 1.0:
            found = f"loss {loss:.3f} jumped from a running mean of {self.mean:.3f}"
        else:
            self.mean = loss if self.mean is None else 0.9 * self.mean + 0.1 * loss
            return
        good, _ = checkpoint.newest_good(self.root)
        stands = f"{good} stands (delete it if it is spoilt, too)" if good else "There is no checkpoint yet"
        raise ValueError(
            f"step {step}: {found}. {stands}: run again after lowering learning_rate (gate rates first), raising "
            "warmup_tokens or lowering clip; a spike that you trust to pass: raise spike_factor"
        )


class Signals(TrainerCallback):
    """SIGTERM and Ctrl-C: finish the step, save, stop.

    With several processes they agree every step, over gloo on the CPU, so that all stop at the same step and the GPU
    is not waited for.
    """

    def __init__(self, world_size: int, interruptions: Interruptions):
        self.interruptions = interruptions
        self.group = torch.distributed.new_group(backend="gloo") if world_size > 1 else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.group is not None:
            flag = torch.tensor(self.interruptions.caught or 0)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self.group)
            self.interruptions.caught = int(flag) or None
        if self.interruptions.caught is not None:
            control.should_save = control.should_training_stop = True


class LogWithSaves(TrainerCallback):
    """Logs wherever it saves: the guard has then seen the loss of every step that a checkpoint holds."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)  # a resumed state has those that its checkpoint was made with

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            control.should_log = True


class GateRecorder(TrainerCallback):
    """Keeps the gates of the last micro-batch before each log line, and only of that."""

    def __init__(self, model: Any, mesh: Mesh | None = None):
        self.mesh = mesh
        self.gates = [module for module in model.modules() if isinstance(module, ForgetGate)]
        self.horizon, self.kv_heads = horizon_of(model.config) or HORIZON, kv_heads_of(model.config)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step + 1
        due = step == 1 or step % args.logging_steps == 0 or step % args.save_steps == 0 or step >= state.max_steps
        for gate in self.gates:
            gate.record = due

    def refuse_rounded(self) -> None:
        """Raises ValueError where something cast the gates, such as accelerate's mixed precision."""
        for gate in self.gates:
            if gate.bias.dtype != torch.float32:
                raise ValueError(
                    f"the forget gates were cast to {gate.bias.dtype}: they must stay float32. Set mixed_precision: "
                    "'no' in the accelerate config; the recipe's `precision` says what products run in"
                )

    def statistics(self) -> dict[str, float]:
        """Half-lives in tokens over all heads (geometric mean, percentiles), dead heads and the live share."""
        recorded = [gate.last_log_f for gate in self.gates if gate.last_log_f is not None]
        if not recorded:
            return {}
        found = torch.stack([log_f.mean((0, 1)) for log_f in recorded])
        length = recorded[0].shape[1]
        if self.mesh is not None:  # each process saw a part of the rows
            found, length = self.mesh.sum(found) / self.mesh.size, length * self.mesh.size
        found = found.cpu()
        for gate in self.gates:
            gate.last_log_f = None
        live = live_shares((-found).tolist(), self.horizon, self.kv_heads)
        return half_life_statistics(found.flatten(), length) | live


def half_life_statistics(mean_log_f: torch.Tensor, length: int) -> dict[str, float]:
    """Statistics over heads of half-lives ln 2 / mean(-log f) in tokens, and the share of dead heads.

    Args:
        mean_log_f: (heads,) float32.
        length: tokens of a row, over which a dead head decays by less than DEAD_DECAY.
    """
    lives = half_life_tokens(mean_log_f.double().clamp_max(-1e-12))
    p10, p90 = torch.quantile(lives, torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    return {
        "half_life_mean": float(lives.log().mean().exp()),
        "half_life_p10": p10,
        "half_life_p90": p90,
        "gates_dead": float((-mean_log_f.double() * length < DEAD_DECAY).double().mean()),
    }


class KeepGathered(TrainerCallback):
    """align under FSDP2: its backward enters layers whose own outputs carry no gradient, where no hook would gather
    weights again, so they stay gathered from the forward on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for layer in decoder_layers(kwargs["model"]):
            layer.set_reshard_after_forward(False)  # type: ignore[operator]
