"""`retrofox train`: a recipe from model to adapted model, stage by stage, resuming by itself."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState

from retrofox.anatomy import causal_lm
from retrofox.config import Recipe
from retrofox.data.prepare import prepare_data
from retrofox.loading.device import PRECISIONS
from retrofox.loading.tokenizers import recipe_tokenizer
from retrofox.parallel.layout import split_of
from retrofox.parallel.mesh import build_mesh
from retrofox.planning.steps import accumulation, readers_of
from retrofox.support.interruptions import Interruptions
from retrofox.training import checkpoint
from retrofox.training.arguments import arguments
from retrofox.training.data import StageData
from retrofox.training.document_attention import attends_by_document
from retrofox.training.export import export
from retrofox.training.model import build_model, resolve_source
from retrofox.training.model_tweaks import lower_precision, repeatable, save_memory
from retrofox.training.objectives import stage_objective
from retrofox.training.param_groups import role_of, set_trainable
from retrofox.training.run_directory import Run, claim_data, claim_output, output_lock, write_result
from retrofox.training.self_chat import with_self_chat
from retrofox.training.teacher import teacher_for
from retrofox.training.trainer import FoxTrainer
from retrofox.training.validate import preflight, refuse_tokens

PATIENCE = timedelta(hours=2)
"""How long processes wait for the main one, which converts, tokenises and saves: NCCL's own is ten minutes."""


def train(recipe: Recipe) -> dict[str, Any]:
    """Runs every stage of a recipe and writes OUTPUT/model, ready for `retrofox.load`.

    OUTPUT holds recipe.yaml (resolved), log.jsonl, stage-N-OBJECTIVE/checkpoint-STEP, model. Run again after any
    interruption, the same command resumes from the newest complete checkpoint and says so.

    Returns:
        What was done: per stage steps, tokens, losses, seconds and tokens per second; the path of the model; command,
        versions and machine.

    Raises:
        ValueError: the recipe can't run here, OUTPUT holds another run, the data changed, the loss diverged, a
            checkpoint could not be written.
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM, the state saved.
    """
    transformers.utils.logging.disable_progress_bar()
    state: Any = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    out = Path(recipe.output)
    interruptions = Interruptions("nothing was trained yet", quiet=not state.is_main_process)
    with interruptions, repeatable(recipe.deterministic):
        if (out / "model" / checkpoint.MARKER).is_file():
            claim_output(out, recipe, state)
            say(state, f"{out / 'model'} is complete: nothing left to do")
            return json.loads((out / "result.json").read_text(encoding="utf-8"))
        for refusal in preflight(recipe, state.num_processes, state.device):
            raise refusal
        if state.device.type == "cpu":
            say(state, "no CUDA GPU here: training on the CPU")
        with output_lock(out) if state.is_main_process else contextlib.nullcontext():
            return _train(recipe, out, interruptions, state)


def say(state: Any, text: str) -> None:
    """Prints on the main process."""
    if state.is_main_process:
        print(text, file=sys.stderr, flush=True)


def _train(recipe: Recipe, out: Path, interruptions: Interruptions, state: Any) -> dict[str, Any]:
    started = time.perf_counter()
    tokenizer = recipe_tokenizer(recipe.data.tokenizer, recipe.model)
    with state.main_process_first():  # the others find it done
        # First of all: texts that can't be read leave OUTPUT alone, and are told before minutes of own chat.
        tokens = prepare_data(recipe.data, tokenizer, progress=state.is_main_process)
        data = with_self_chat(recipe, tokenizer, state.device, progress=state.is_main_process)
        if data is not recipe.data:
            tokens = prepare_data(data, tokenizer, progress=False)
    batches = claim_output(out, recipe, state)
    source = resolve_source(recipe, out, state)
    with state.main_process_first():
        claim_data(out / "data.json", tokens.train, tokens.eval)
    run = Run(recipe, out, batches, interruptions, source, tokens, tokenizer, state)
    model: Any = None
    reports = []
    for number, stage in enumerate(recipe.stages):
        finished = run.folder(number) / "model"
        if (finished / checkpoint.MARKER).is_file():
            reports.append(checkpoint.note_of(finished)["report"])
            say(state, f"stage {number} ({stage.objective}) is complete")
            interruptions.stands = f"stage {number} is complete"
            continue
        if model is None:
            model = _model(run, number)
        trainer = _trainer(run, number, model)
        reports.append(_run_stage(trainer, run, number))
        model = trainer.release()
        last = number == len(recipe.stages) - 1
        note = {"report": reports[-1], "stage": number, "recipe": recipe.model_dump(mode="json")}
        with interruptions.held():
            if last:  # before the model: where that is complete, the result is there
                result = write_result(out, reports, time.perf_counter() - started, state)
            export(trainer, model, out / "model" if last else finished, tokenizer, note, last)
            interruptions.stands = f"stage {number} is complete"
            if last:
                say(state, f"{out / 'model'} is complete")
        interruptions.leave()
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            model = None  # sharded for what this stage trained: the next one starts from the export
            trainer.accelerator.free_memory()
    return result


def _model(run: Run, number: int) -> Any:
    """The model that a stage starts from."""
    recipe = run.recipe
    model = build_model(recipe, run.before(number), run.state.device)
    vocabulary = causal_lm(model).config.vocab_size
    for manifest in filter(None, (run.tokens.train, run.tokens.eval)):
        refuse_tokens(manifest, run.tokenizer, vocabulary)
    lower_precision(model, PRECISIONS[recipe.precision])
    return model


def _trainer(run: Run, number: int, model: Any) -> FoxTrainer:
    recipe, state = run.recipe, run.state
    stage, batch_tokens, steps = recipe.stages[number], run.batch_tokens[number], run.steps(number)
    split = split_of(recipe.parallel, causal_lm(model).config)
    mesh = build_mesh(split) if split.context > 1 else None
    data = StageData(run.tokens, recipe, stage, state, mesh)
    names = set_trainable(model, stage, adapters=recipe.lora is not None)
    save_memory(model, stage)
    teacher = teacher_for(recipe, stage, run.source, state)
    objective = stage_objective(model, stage, state.device, teacher)
    roles = sorted({role_of(name) for name in names})
    epochs = data.dataset.order.epochs(steps * batch_tokens // stage.sequence_length)
    say(
        state,
        f"stage {number}: {stage.objective}, {steps} steps of {batch_tokens:,} tokens at {stage.sequence_length}, "
        f"{epochs:.2g} epochs{' of the source read most' * (len(run.tokens.train.sources) > 1)}; "
        f"training {', '.join(roles)}; cross-entropy {objective.kind} ({objective.reason})"
        + ("; attention: SDPA, one causal call a document" if attends_by_document(model) else "")
        + ("" if mesh is None else f"; rows shared by {split.context}: {split}"),
    )
    accumulated = accumulation(stage, batch_tokens, readers_of(recipe.parallel, state.num_processes))
    settings = arguments(recipe, stage, run.folder(number), steps, accumulated)
    return FoxTrainer(model, settings, run, number, objective, data)


def _run_stage(trainer: FoxTrainer, run: Run, number: int) -> dict[str, Any]:
    """Trains one stage from its newest good checkpoint; exits with 128 + signal after an interruption."""
    root, steps, state = run.folder(number), run.steps(number), run.state
    good, skipped = checkpoint.newest_good(root)
    for reason in skipped:
        say(state, f"passed over {reason}")
    resumed_at = None
    if good is not None:
        resumed_at, tokens = (checkpoint.note_of(good)[key] for key in ("step", "tokens"))
        say(state, f"resumed stage {number} at step {resumed_at} of {steps} ({tokens:,} tokens) from {good}")
        run.interruptions.stands = f"{good.name} of stage {number} stands"
    state.wait_for_everyone()
    started = time.perf_counter()
    if good is None:
        trainer.eval_before = trainer.held_out_loss()
    if good is None or resumed_at != steps:
        trainer.train(resume_from_checkpoint=None if good is None else str(good))
    else:
        trainer.restore(good)
    run.interruptions.stands = f"saved at step {trainer.state.global_step}"
    run.interruptions.leave()
    history = trainer.history
    speeds = [entry["tokens_per_second"] for entry in history[1:]]
    before, after = trainer.eval_before, trainer.held_out_loss()
    if before is not None and after is not None:
        say(state, f"stage {number}: held-out loss {before:.4f} -> {after:.4f}")
    return {
        "objective": run.recipe.stages[number].objective,
        "steps": steps,
        "tokens": steps * run.batch_tokens[number],
        "resumed_at": resumed_at,
        "loss_first": history[0]["loss"],
        "loss_last": history[-1]["loss"],
        "eval_before": before,
        "eval_after": after,
        "live_share": {key: value for key, value in history[-1].items() if key.startswith("live_")} or None,
        "seconds": time.perf_counter() - started,
        "tokens_per_second": statistics.median_high(speeds) if speeds else None,
    }
