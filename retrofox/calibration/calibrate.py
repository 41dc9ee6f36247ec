"""Calibrated conversion: gates and queries fitted, layer by layer, to where the original's attention looks."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from retrofox.anatomy import attentions
from retrofox.calibration import capture
from retrofox.calibration.files import write_tables, write_tensors
from retrofox.calibration.half_life import calibrate_half_lives, write_half_lives
from retrofox.calibration.pairs import LENGTH, WINDOWS
from retrofox.calibration.pairs import choose_pairs as choose
from retrofox.calibration.run import Run, put
from retrofox.calibration.source import LayerSource, open_source
from retrofox.calibration.state import State, fingerprint
from retrofox.calibration.steps import STEPS
from retrofox.calibration.windows import Text, documents_of, fitting_windows, full_windows
from retrofox.families import trained_length
from retrofox.fox_spec import FoxSpec
from retrofox.loading.tokenizers import load_tokenizer
from retrofox.model.configuration_fox import bias_from_half_life
from retrofox.support.files import write_result
from retrofox.support.report import environment, progress_bar
from retrofox.version import __version__

__all__ = ["Calibration", "apply_to", "calibrate", "calibrate_half_lives"]

LENGTHS = (2048, 1024, 512, 256, 128, 64)
"""Tokens per window to choose from where none are asked for: those that make the most of the documents there are."""


@dataclass
class Calibration:
    """The outcome of a calibration.

    Attributes:
        values: name in the converted model -> tensor, for every tensor that differs from a plain conversion: gate
            weights and biases (float32) and, after a refit, q_proj (or qkv_proj) weights and biases in the model's
            dtype.
        report: settings, per-layer table, KL and loss before and after, seconds.
        files: names of the files written into `out_dir`, by kind.
        layer_pairs: layer -> rotary pairs chosen for it, as `FoxSpec.layer_pairs`; empty where none were.
    """

    values: dict[str, torch.Tensor]
    report: dict[str, Any]
    files: dict[str, str]
    layer_pairs: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor of everything that a writer has to place instead of a plain conversion's tensor."""
        return dict(self.values)

    def rewritten(self) -> list[str]:
        """Names of the base model's own tensors that the refit replaces; empty without a refit."""
        return sorted(name for name in self.values if ".forget_gate." not in name)


def apply_to(model: PreTrainedModel, result: Calibration) -> PreTrainedModel:
    """Puts a calibration into a live converted model, in place, and returns it.

    Gates are overwritten and chosen rotary pairs set; a refitted projection becomes a parameter of its own, so a base
    model that shares its tensors with `model` keeps what it has. After a refit the model's attention in mode "original"
    is no longer the base's, nor are its logits with gates open and all rotary pairs: keep the base where either is
    needed. The config then says so (`queries_refitted`), and objectives that would take the model for its own original
    refuse it.

    Raises:
        ValueError: the model has no such tensors, or of another shape, or keeps its rotary pairs otherwise.
    """
    pairs = {**model.config.fox, "layer_pairs": result.layer_pairs or model.config.fox.get("layer_pairs", {})}
    spec = FoxSpec.from_dict(pairs)
    if result.layer_pairs and spec.rope != "partial":
        raise ValueError(f"the calibration chose rotary pairs for rope partial, and this model has rope {spec.rope}")
    state = model.state_dict(keep_vars=True)
    for name, value in result.tensors().items():
        if name not in state:
            raise ValueError(
                f"the calibration has a tensor {name} that this {type(model).__name__} lacks: wrong model or spec"
            )
        if state[name].shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}, its calibration {tuple(value.shape)}")
    for name, value in result.tensors().items():
        put(model, name, value)
    if result.rewritten():
        model.config.queries_refitted = True
    if result.layer_pairs:
        model.config.fox = spec.to_dict()
        turn(model, spec)
    return model


def turn(model: PreTrainedModel, spec: FoxSpec) -> None:
    """Lets the rotary pairs of a live converted model turn as `spec` says."""
    for _, attention in attentions(model):
        if attention.rotary_fade is not None:
            attention.rotary_fade.set(spec)


def calibrate(
    model_or_source: PreTrainedModel | str | os.PathLike,
    spec: FoxSpec | None,
    files: Sequence[Text] | torch.Tensor,
    *,
    out_dir: str | os.PathLike,
    steps: int = STEPS,
    refit_queries: bool = True,
    choose_pairs: bool = True,
    progress: bool = True,
    resume: bool = True,
    tokenizer: Any = None,
    length: int | None = None,
    windows: int = 32,
    held_out: int = 2,
    layer_losses: bool = True,
    layers_on_disk: bool | None = None,
    revision: str | None = None,
    seed: int = 0,
) -> Calibration:
    """Fits a conversion to its original, layer by layer: least KL and output error per head, on its own inputs.

    For each layer, in order: hidden states of the original enter; with p_i the original's attention of query i and
    p'_i that of the converted layer, its rotary pairs faded and its sinks exempt, minimise over the gate's weight W_f
    and bias b_f and a matrix M per head

        mean_i KL(p_i || p'_i) + w |sum_j (p'_ij - p_ij) v_j|^2 / mean_j |v_j|^2,
        s'_ij = scale * (q_i M) . k_j + c_i - c_j,   log f_t = logsigmoid(W_f x_t + b_f)

    q before rotation, v the values, w = fit.OUTPUT_WEIGHT; M folds into q_proj (W' = M^T W, b' = M^T b). A
    head keeps what it started with if its KL on held-out windows is no lower (see student.worse). With rope "partial"
    each layer chooses its rotary pairs first, as many as have a short wavelength: see `calibration.pairs`. One layer's
    inputs are in memory at a time; after each layer the run can be stopped and resumed. Into `out_dir` go
    calibration.json, calibration.csv (per layer: KL and loss before and after), calibration_heads.csv (per head: KL and
    half-life before and after), calibration_heads.png and .svg (half-lives after), calibration.safetensors, and for
    init="calibrated" half_lives.json, .csv, .png and .svg.

    Args:
        model_or_source: an unconverted live model, a Hub id, directory or .gguf file; or a live converted model, then
            with `spec` None. Nothing of a live unconverted model is changed.
        spec: what to convert to. init="calibrated" starts from half-lives measured at full context.
        files: what a recipe's `data.train` may name (files, directories, globs, hf:..., longcrawl64:..., or sources
            with a weight and a text_field), of which the first 2M tokens are read; or (N, T) int64 tokens, the
            last `held_out` rows held out.
        steps: Adam steps per layer; 0 stops after the half-lives of init="calibrated".
        refit_queries: whether to fit M.
        choose_pairs: whether layers of rope "partial" choose their pairs; those that the spec names pairs or a
            wavelength for don't.
        resume: continue the work found in `out_dir`; False starts over.
        tokenizer: None = the one beside the source.
        length: tokens per window; None = 2048 or what the model was trained to if that is less, and shorter where the
            documents are too short or too few for it.
        windows: how many windows to fit on (fewer where there is less text); held_out: how many to measure on.
        layer_losses: also measure the loss with each layer alone converted, before and after.
        layers_on_disk: read a directory's weights a layer at a time (True), load it whole (False), or None: a layer
            at a time where its files allow it.
        seed: for the choice of windows and the order of fitting.

    Raises:
        FileNotFoundError: a file or source that is not there.
        ValueError: too little text, nothing to fit, an unsupported family, a projection that a refit can't fold into,
            or `out_dir` holds a run with other settings.
    """
    started, out = time.perf_counter(), Path(out_dir)
    source = open_source(model_or_source, spec, revision, layers_on_disk)
    model = source.model
    if tokenizer is None and not isinstance(files, torch.Tensor):
        tokenizer = source.tokenizer or load_tokenizer(model.config._name_or_path)
    fox = FoxSpec.from_dict(model.config.fox)
    _check(fox, steps, refit_queries, windows, held_out, length)
    found = [] if isinstance(files, torch.Tensor) else documents_of(files, tokenizer)
    if isinstance(files, torch.Tensor):
        tokens = _checked(files)
    else:
        lengths = [length] if length else [n for n in LENGTHS if n <= max(64, trained_length(model.config))]
        tokens = fitting_windows(found, tokenizer, lengths, windows + held_out, 1 + held_out, seed)
    if len(tokens) <= held_out:
        raise ValueError(
            f"{len(tokens)} windows of {tokens.shape[1]} tokens are too few to hold {held_out} out: give more text"
        )
    first = next(attentions(model))[1]
    projection = capture.query_projection(first)
    if refit_queries and projection is None:
        raise ValueError(
            f"the queries of {type(first).__name__} come from no plain linear layer (q_proj or qkv_proj), so a refit "
            "can't fold into it: calibrate the unquantised model without adapters, or pass refit_queries=False"
        )
    settings = {
        "retrofox": __version__,
        "spec": fox.to_dict(),
        "steps": steps,
        "refit_queries": refit_queries,
        "choose_pairs": choose_pairs,
        "held_out": held_out,
        "layer_losses": layer_losses,
        "seed": seed,
        "tokens": fingerprint(tokens),
        "model": fingerprint(*source.samples()),
    }
    state = State(out / "layers", settings, resume)
    written: dict[str, str] = {}
    with _restored(model):
        most = trained_length(model.config)
        pairs: dict[int, tuple[int, ...]] = {}
        if steps and choose_pairs and fox.rope == "partial" and not fox.layer_pairs:
            full = tokens[:WINDOWS] if not found else full_windows(found, tokenizer, min(LENGTH, most))
            pairs = _chosen(source, full, refit_queries, state, out, progress)
        if fox.init == "calibrated":
            full = tokens if not found else full_windows(found, tokenizer, most)
            written |= _start(source, full, state, out, progress)
        run = Run(source, fox, tokens, held_out, steps, refit_queries, layer_losses, seed)
        rows = run.all_layers(state, progress) if steps else []
        summary = run.summary(state, rows) if rows else {}
        values = _values(source, state) if rows else _gates(model)
    report = {
        "settings": settings,
        "windows": {"fitted": len(tokens) - held_out, "held_out": held_out, "length_tokens": tokens.shape[1]},
        "summary": summary,
        "layers": rows,
        "layer_pairs": {str(layer): list(kept) for layer, kept in pairs.items()},
        "rewritten": [],
        "seconds": round(time.perf_counter() - started, 1),
        "environment": environment(),
    }
    result = Calibration(values, report, written, pairs)
    report["rewritten"] = result.rewritten()
    written |= write_tables(rows, tokens.shape[1], out)
    write_tensors(values, report, written, out)
    return result


@contextlib.contextmanager
def _restored(model: PreTrainedModel) -> Iterator[None]:
    """Lets a block change gates, projections, rotary pairs and training mode, and undoes it all at its end."""
    training, kept = model.training, []
    for name, attention in attentions(model):
        projection = capture.query_projection(attention)
        for part in (projection,) if projection else ():
            kept += [(f"{name}.{part}.{leaf}", value) for leaf, value in getattr(attention, part).named_parameters()]
        if attention.forget_gate is not None:
            gate = attention.forget_gate.state_dict()
            kept += [(f"{name}.forget_gate.{leaf}", value.clone()) for leaf, value in gate.items()]
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        turn(model, FoxSpec.from_dict(model.config.fox))
        for name, value in kept:
            if isinstance(value, nn.Parameter):
                owner, leaf = name.rsplit(".", 1)
                setattr(model.get_submodule(owner), leaf, value)
            else:
                put(model, name, value)


def _gates(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items() if ".forget_gate." in name}


def _values(source: LayerSource, state: State) -> dict[str, torch.Tensor]:
    """All layers' tensors by their names in the model; projections in the dtype of the checkpoint."""
    values = {}
    for number, (name, _) in enumerate(attentions(source.model)):
        for part, value in state.read_layer(number)[0].items():
            values[f"{name}.{part}"] = value if part.startswith("forget_gate.") else value.to(source.dtype)
    return values


def _check(fox: FoxSpec, steps: int, refit: bool, windows: int, held_out: int, length: int | None) -> None:
    least = {"steps": (steps, 0), "windows": (windows, 1), "held_out": (held_out, 1), "length": (length, 16)}
    for name, (given, smallest) in least.items():
        if given is not None and given < smallest:
            raise ValueError(f"{name} of a calibration must be {smallest} or more, got {given}")
    if steps == 0 and fox.init != "calibrated":
        raise ValueError(
            "steps=0 fits nothing: give steps, or a spec with init='calibrated' to measure half-lives only"
        )
    if fox.gate == "none" and (not refit or not steps):
        raise ValueError("gate='none' leaves only the queries to fit: pass refit_queries=True and steps > 0")


def _checked(tokens: torch.Tensor) -> torch.Tensor:
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"token windows must be (N, T) int64, got {tuple(tokens.shape)} {tokens.dtype}")
    return tokens


def _chosen(
    source: LayerSource, windows: torch.Tensor, refit: bool, state: State, out: Path, progress: bool
) -> dict[int, tuple[int, ...]]:
    """Lets layers turn the pairs that their attention needs most, chosen once per run."""
    model, file = source.model, out / "pairs.json"
    spec = FoxSpec.from_dict(model.config.fox)
    if not (state.finished() and file.exists()):
        with progress_bar("layers", progress) as bar:
            task = bar.add_task("choosing rotary pairs", total=len(capture.decoder_layers(model)))
            found = choose(source, windows, refit=refit, advance=lambda n: bar.update(task, advance=n))
        write_result(file, (json.dumps({"layer_pairs": found}) + "\n").encode())
    kept = json.loads(file.read_text(encoding="utf-8"))["layer_pairs"]
    spec.layer_pairs = {int(layer): tuple(pairs) for layer, pairs in kept.items()}
    turn(model, spec)
    return spec.layer_pairs


def _start(source: LayerSource, tokens: torch.Tensor, state: State, out: Path, progress: bool) -> dict[str, str]:
    """Sets the gates to half-lives measured at full context, once per run; returns the files written."""
    model = source.model
    table_file = out / "half_lives.json"
    if not (state.finished() and table_file.exists()):
        with progress_bar("layers", progress) as bar:
            task = bar.add_task("measuring half-lives", total=len(capture.decoder_layers(model)))
            sink = FoxSpec.from_dict(model.config.fox).sink_tokens
            _, table = calibrate_half_lives(source, tokens, sink, advance=lambda n: bar.update(task, advance=n))
        write_half_lives(table, out, tokens.shape[1], trained_length(model.config))
    heads = json.loads(table_file.read_text(encoding="utf-8"))["heads"]
    by_place = {(head["layer"], head["head"]): head["half_life_tokens"] for head in heads}
    for number, (_, attention) in enumerate(attentions(model)):
        if attention.forget_gate is not None:
            heads = range(attention.num_fox_heads)
            bias = torch.tensor([bias_from_half_life(by_place[number, head]) for head in heads])
            attention.forget_gate.reset()
            put(attention, "forget_gate.bias", bias)
    return {f"half_lives_{kind}": f"half_lives.{kind}" for kind in ("json", "csv", "png", "svg")}
