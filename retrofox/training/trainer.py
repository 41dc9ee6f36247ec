"""The Trainer subclass: own data loader, parameter groups by role, chunked objectives, checkpoints that count.

transformers.Trainer underneath brings accelerate (DDP, FSDP2, DeepSpeed), its optimizers and its trackers. Inside the
loop nothing waits for the GPU: losses, norms and gate statistics stay on the device until a log line is due.
"""

from __future__ import annotations

import contextlib
import types
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerState

from retrofox.anatomy import causal_lm
from retrofox.config import BudgetedStage, Stage
from retrofox.loading.adapter import WEIGHTS
from retrofox.parallel.shards import Shards
from retrofox.planning.hours import flops_per_token
from retrofox.planning.shape import known_shape
from retrofox.support.report import progress_bar
from retrofox.training import checkpoint
from retrofox.training.arguments import own_autocast
from retrofox.training.budget import GatePressure
from retrofox.training.callbacks import GateRecorder, Guard, KeepGathered, LogWithSaves, Signals
from retrofox.training.log import Clock, JsonLog, Progress
from retrofox.training.lora import assert_gates_saved
from retrofox.training.objectives import Extend
from retrofox.training.param_groups import parameter_groups, schedule, set_rates
from retrofox.training.run_directory import Run
from retrofox.training.sharding import shard_stage, sharding_of, step_locally, take_sharded


class FoxTrainer(Trainer):
    """Trains one stage.

    Args:
        number: of the stage in the recipe, from 0.
        objective: called as objective(model, batch) inside the model's own forward, so that DDP and FSDP see one
            forward; returns (loss summed over targets, metrics summed over targets).
        data: a `StageData`, or what has its `batches`, `held_out` and `mesh`, where nothing is saved.
    """

    def __init__(self, model: Any, args: TrainingArguments, run: Run, number: int, objective: Any, data: Any):
        recipe, stage = run.recipe, run.recipe.stages[number]
        self.run, self.number, self.stage, self.batch_tokens = run, number, stage, run.batch_tokens[number]
        self.objective, self.data = objective, data
        self.json_log: JsonLog | None = None
        self.resumed_step = 0
        self.guard = Guard(stage.spike_factor, Path(str(args.output_dir)))
        self.eval_before: float | None = None
        super().__init__(model=model, args=args)
        self.model_accepts_loss_kwargs = True  # the loss is scaled for accumulation: `compute_loss`
        for builtin in (PrinterCallback, ProgressCallback):
            self.remove_callback(builtin)
        lm = causal_lm(model)
        shape = known_shape(lm.config)
        flops = None if shape is None else flops_per_token(shape, recipe.lora, stage)
        self.clock = Clock(self.batch_tokens, flops, args.device)
        self.gates = GateRecorder(lm, data.mesh)
        # Of loss, metrics and steps with targets since the last log line; every save is logged: a checkpoint has none.
        self.sums = torch.zeros(2 + len(objective.metrics), device=args.device)
        for callback in (self.gates, Signals(args.world_size, run.interruptions), LogWithSaves(), Progress()):
            self.add_callback(callback)
        if isinstance(stage, BudgetedStage) and stage.budget is not None:
            self.add_callback(GatePressure(lm, stage, self.batch_tokens, args.world_size, args.device))
        if self.is_fsdp_enabled and stage.objective == "align":
            self.add_callback(KeepGathered())
        model.forward = types.MethodType(self._forward, model)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The log lines of the stage, those before an interruption included."""
        return [entry for entry in self.state.log_history if "loss" in entry]

    def get_train_dataloader(self) -> Any:
        """Endless batches of this process from where the checkpoint stopped."""
        read = self.resumed_step * (self.batch_tokens // self.stage.sequence_length)
        return self.data.batches(self.run.rows(self.number).start + read)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The micro-batches of one step and the number of targets in it over all processes, at least 1."""
        samples = [next(epoch_iterator) for _ in range(num_batches)]
        count: Any = sum(sample["num_targets"] for sample in samples)
        if self.args.world_size > 1:
            here: Any = torch.tensor(count, device=device)
            count = self.accelerator.reduce(here, "sum")
        self.sums[-1] += count > 0  # conversations may hold nothing to learn in a whole step
        # a tensor stays on the device: the host need not wait
        return samples, count.clamp(min=1) if isinstance(count, torch.Tensor) else max(1, count)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # Pinned host memory and non_blocking: the copy runs beside the step before it.
        ready: dict[str, Any] = {
            key: value.to(self.args.device, non_blocking=True)
            for key, value in inputs.items()
            if isinstance(value, torch.Tensor)
        }
        if self.data.mesh is not None:
            ready["shards"] = Shards(self.data.mesh, inputs["rows"], self.args.device)
        return ready

    def _forward(self, model: Any, **batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's forward during a stage: the objective."""
        self.gates.refuse_rounded()
        ours = own_autocast(self.run.recipe.precision)
        own = torch.autocast(self.args.device.type, torch.bfloat16) if ours else contextlib.nullcontext()
        with own:
            return self.objective(model, batch)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean over the targets of the whole step: each process's sum, times their number because DDP averages."""
        loss, metrics = model(**inputs)
        scale = self.args.world_size / num_items_in_batch
        self.sums[:-1] += torch.cat((loss.detach()[None], metrics)) * scale
        return loss * scale

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer named by the recipe over parameter groups by role."""
        if self.optimizer is None:
            target: Any = self.model if model is None else model
            if self.is_fsdp_enabled:
                shard_stage(target, self.accelerator)
            groups = parameter_groups(target, self.stage)
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, target)
            self.optimizer = cls(groups, **options)
            if self.is_fsdp_enabled:
                step_locally(self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The stage's schedule in tokens, one factor per group."""
        if self.is_fsdp_enabled:
            take_sharded(self.optimizer, parameter_groups(self.model, self.stage))  # type: ignore[arg-type]
        if self.lr_scheduler is None:
            target = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = LambdaLR(target, schedule(self.stage, self.batch_tokens))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        return self.lr_scheduler.get_last_lr()[-1]  # type: ignore[union-attr]  # the pretrained weights', not a gate's

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counted in closed form by Clock; the Trainer's own walks all parameters at every micro-batch

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds tokens, speed, MFU, memory, time left and gate statistics; checks the loss; writes the JSON line."""
        if "loss" in logs:
            step, args = self.state.global_step, self.args
            sums: Any = self.accelerator.reduce(self.sums.clone(), "mean")
            means = (sums[:-1] / sums[-1].clamp(min=1)).tolist()
            self.sums.zero_()
            logs["tokens"] = step * self.batch_tokens
            logs.update(self.clock.read(step, self.state.max_steps, args.world_size))
            logs.update(self.gates.statistics())
            logs.update(zip(("loss", *self.objective.metrics), means, strict=True))
            if self.json_log is not None:
                self.json_log.write({"step": step, **logs})
            if sums[-1]:
                self.guard.check(logs["loss"], logs.get("grad_norm"), step)
        super().log(logs, start_time)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Both as saved, but with the recipe's present rates and schedule: they may have been lowered since."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        scheduler = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        set_rates(self.optimizer, scheduler, [group["lr"] for group in parameter_groups(self.model, self.stage)])  # type: ignore[arg-type]

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Trains to the end of the stage, or until a signal; first restores from the checkpoint's note."""
        if resume_from_checkpoint is not None:
            note = self._note_of(Path(resume_from_checkpoint))
            self.resumed_step = note["step"]
            self.guard.mean = note["loss_mean"]
        if self.args.should_save:
            self.json_log = JsonLog(self.run.out / "log.jsonl", self.number, self.resumed_step)
        self.clock.restart(self.resumed_step)
        with self.run.interruptions.held():
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _note_of(self, directory: Path) -> dict[str, Any]:
        """Reads a checkpoint's note, and takes from it the loss before the stage, for the report."""
        note = checkpoint.note_of(directory)
        if note["sharding"] != (now := sharding_of(self.accelerator)):
            raise ValueError(
                f"{directory} was saved with {note['sharding']}, this run has {now}: launch it with the "
                "accelerate config it was begun with (on any number of processes), or choose another `output`"
            )
        self.eval_before = note["eval_before"]
        return note

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes checkpoint-N, then its COMPLETE marker, then rotates; an error names a complete one."""
        root = Path(str(self.args.output_dir))
        directory = root / f"checkpoint-{self.state.global_step}"
        if checkpoint.problem(directory) is None:
            return
        self.accelerator.wait_for_everyone()
        if self.args.should_save and directory.exists():
            checkpoint.discard(directory)  # left by an interrupted save
        self.accelerator.wait_for_everyone()
        with checkpoint.saving(directory, root):
            super()._save_checkpoint(model, trial)
            if self.args.should_save and (directory / WEIGHTS).is_file():
                assert_gates_saved(directory, self.accelerator.unwrap_model(model))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoint.commit(
                    directory,
                    {
                        "step": self.state.global_step,
                        "stage": self.number,
                        "tokens": self.state.global_step * self.batch_tokens,
                        "loss_mean": self.guard.mean,
                        "eval_before": self.eval_before,
                        "sharding": sharding_of(self.accelerator),
                    },
                )
                checkpoint.rotate(root, self.run.recipe.checkpoint.keep)
        self.accelerator.wait_for_everyone()
        self.clock.restart(self.state.global_step)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Weights by the live model's names, as a resumed run loads them: a model's files split fused experts."""
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PeftModel):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            model.save_pretrained(str(output_dir), state_dict=state_dict, save_original_format=False)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raises ValueError where the Trainer warns: see `checkpoint.refuse_other_tensors`."""
        checkpoint.refuse_other_tensors(self.model, load_result)

    def restore(self, directory: Path) -> None:
        """Loads a stage's last checkpoint where nothing is left to train."""
        self.state.global_step = self._note_of(directory)["step"]
        self.state.log_history = TrainerState.load_from_json(str(directory / TRAINER_STATE_NAME)).log_history
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            self._prepare_for_training(self.args.max_steps, None, str(directory))
        else:
            self._load_from_checkpoint(str(directory))

    def release(self) -> Any:
        """The model with its own forward again, for export and the next stage."""
        model = self.accelerator.unwrap_model(self.model)
        for ours in ("forward", "_original_forward", "_is_accelerate_prepared"):
            model.__dict__.pop(ours, None)
        return model

    def held_out_loss(self) -> float | None:
        """Cross-entropy in nats per target of the held-out rows; None without these, or before FSDP has sharded.

        The model's forward runs the stage's objective; cross-entropy takes its place meanwhile.
        """
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        later = sharded and self.model_wrapped is self.model and not isinstance(self.model, FSDPModule)
        if self.data.held_out is None or later:
            return None
        model: Any = self.model_wrapped
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        objective = self.objective
        self.objective = Extend(self.model, Stage.model_construct(cross_entropy="chunked"), self.args.device)
        model.eval()
        try:
            with progress_bar("rows", self.is_world_process_zero()) as bar:
                task = bar.add_task("held-out loss", total=self.data.eval_windows()[1])
                for batch in self.data.eval_batches():
                    with torch.no_grad(), self.accelerator.autocast():
                        loss, _ = model(**self._prepare_inputs(batch))
                    sums += torch.stack((loss.double(), torch.full_like(loss, batch["num_targets"]).double()))
                    bar.advance(task, self.data.stage.micro_batch)
        finally:
            self.objective = objective
            model.train()
        total: Any = self.accelerator.reduce(sums, "sum")
        return float(total[0] / total[1]) if total[1] else None
