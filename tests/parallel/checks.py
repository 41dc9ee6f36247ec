"""What the processes of `test_shared_rows` run: every check of one world size, one JSON line for each."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from fox_kernels import choose_backend
from pydantic import TypeAdapter
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
from retrofox.anatomy import is_new_tensor
from retrofox.config.stage import AnyStage
from retrofox.data.packed import next_token_targets
from retrofox.model.modeling_fox import attend_locally
from retrofox.parallel.layout import Degrees
from retrofox.parallel.mesh import Mesh, build_mesh
from retrofox.parallel.shards import Shards, WholeRows, cut
from retrofox.training.model_tweaks import save_memory
from retrofox.training.objectives import stage_objective
from retrofox.training.param_groups import set_trainable

CPU = torch.device("cpu")
PACKED = [0, 10, 40, 64, 67, 110, 128]  # two rows of 64: a document over several chunks, short ones, a row's end
WHOLE = [0, 64, 128]  # each row is a document
EDGES = [0, 20, 48, 56, 64, 112, 120, 128]  # the first process's chunks hold no document that began in another's
PICO = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 1,
}  # fmt: skip
PRO = {"pro": "all", "sink_tokens": 2, "log_n": 16, "rope": "partial", "max_wavelength": 40.0, "half_life": (2.0, 99.0)}
CAPS = {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
FROZEN = {"rates": {"attention": 0, "rest": 0}}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: family, config, spec, stage
    "pro parts, sinks, log-n": ("llama", {}, PRO, {"objective": "extend"}),
    "interpolated, recomputed, tiled, horizon": (
        "llama",
        {"tie_word_embeddings": True},
        {"rope": "interpolate", "rope_factor": 4.0, "half_life": (0.5, 4.0), "horizon": 6.0},
        {"objective": "extend", "gradient_checkpointing": "full", "tiled_mlp": 10, "offload_activations": True},
    ),
    "windows and caps": (
        "gemma2",
        {**CAPS, "sliding_window": 17, "layer_types": ["sliding_attention", "full_attention"]},
        {"sink_tokens": 1, "half_life": (2.0, 99.0)},
        {"objective": "extend"},
    ),
    "distill": ("llama", {}, PRO, {"objective": "distill", "ce_weight": 0.3, **FROZEN}),
    "align": ("llama", {}, PRO, {"objective": "align", "gradient_checkpointing": 2, **FROZEN}),
}
OPERATOR = {
    "plain": {},
    "sinks": {"sink": 3},
    "window and sinks": {"window": 40, "sink": 2},
    "softcap": {"softcap": 3.0, "sink": 1},
    "horizon": {"horizon": 30.0, "half_lives": 0.2},
    "all": {"horizon": 9.0, "sink": 2, "window": 50, "softcap": 5.0, "scale": 0.7, "half_lives": 0.3},
}


def tell(name: str, **found: Any) -> None:
    """One line of results, from the first process; every figure is the worst of all processes."""
    worst = torch.tensor([float(value) for value in found.values()], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"check": name, **dict(zip(found, worst.tolist(), strict=True))}), flush=True)


def difference(found: torch.Tensor, wanted: torch.Tensor, scale: float | None = None) -> float:
    """The greatest difference over the greatest value."""
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()) if scale is None else scale, 1e-12)


def operator(mesh: Mesh, name: str, documents: list[int] | None) -> None:
    """Attention over shared rows beside the same over whole ones: output, and gradients of q, k, v and log f."""
    batch, length, heads, kv_heads, width = 2, 64, 8, 4, 8
    options = {"scale": None, "window": None, "sink": 0, "softcap": None, "horizon": None} | OPERATOR[name]
    half_lives = options.pop("half_lives", 8.0)
    random = torch.Generator().manual_seed(1)
    q, do = (torch.randn(batch, heads, length, width, generator=random) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, length, width, generator=random) for _ in range(2))
    log_f = logsigmoid(torch.randn(batch, length, heads, generator=random) * 2) / half_lives
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    whole = [x.clone().requires_grad_() for x in (q, k, v, log_f)]
    wanted = attend_locally(whole[0], whole[1], whole[2], whole[3], cu_seqlens, options)
    (wanted * do.transpose(1, 2)).sum().backward()
    keep = torch.cat([torch.arange(*each) for each in mesh.degrees.segments(mesh.rank, length)])
    parts = [x[:, :, keep].clone().requires_grad_() for x in (q, k, v)] + [log_f[:, keep].clone().requires_grad_()]
    shards = Shards(mesh, WholeRows(batch, length, cu_seqlens, torch.zeros(batch)), CPU)
    found = shards.attend(parts[0], parts[1], parts[2], parts[3], options, attend_locally)
    (found * do.transpose(1, 2)[:, keep]).sum().backward()
    errors = [difference(found, wanted[:, keep])]
    for part, x, dim in zip(parts, whole, (2, 2, 2, 1), strict=True):
        assert part.grad is not None
        assert x.grad is not None
        errors.append(difference(part.grad, x.grad.index_select(dim, keep), float(x.grad.abs().max())))
    split = f"{mesh.degrees.ulysses}x{mesh.degrees.zigzag}"
    kind = "one document" if documents is None else "edges" if documents is EDGES else "packed"
    tell(f"operator {split} {name} {kind}", error=max(errors))


def batch_of(length: int, documents: list[int] | None, skip: int = 0) -> dict[str, Any]:
    """Two rows with targets, packed or whole, as `collate_with_targets` makes them.

    `skip` is how far positions skip ahead in the middle of each document.
    """
    random = torch.Generator().manual_seed(2)
    input_ids = torch.randint(2, 96, (2, length), generator=random)
    bounds = documents or [0, length, 2 * length]
    counted = [torch.arange(b - a) for a, b in itertools.pairwise(bounds)]
    positions = torch.cat([each + skip * (each > len(each) // 2) for each in counted]).view(2, length)
    batch: dict[str, Any] = {"input_ids": input_ids, "position_ids": positions}
    batch["targets"] = next_token_targets(input_ids, positions)
    if documents is not None:
        batch["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return batch


def model_of(family: str, config: dict[str, Any], spec: dict[str, Any]) -> Any:
    """A converted pico model whose added tensors are no identities."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**PICO, **config})).eval()
    model = retrofox.convert(base, fox=retrofox.FoxSpec(**spec))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_new_tensor(name):
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.3)
    return model.train()


def training(meshes: list[Mesh], name: str, documents: list[int] | None, skip: int = 0) -> None:
    """Loss and gradients of an objective: the sum over the processes beside one process's."""
    family, config, spec, settings = MODELS[name]
    stage = TypeAdapter(AnyStage).validate_python({"tokens": 128, "sequence_length": 64, **settings})
    model, batch = model_of(family, config, spec), batch_of(64, documents, skip)
    set_trainable(model, stage)
    save_memory(model, stage)
    objective = stage_objective(model, stage, CPU)
    loss, metrics = objective(model, batch)
    loss.backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for mesh in meshes:
        model.zero_grad()
        part = cut(batch, mesh.degrees, mesh.rank)
        part["shards"] = Shards(mesh, part.pop("rows"), CPU)
        ours, our_metrics = objective(model, part)
        ours.backward()
        worst = 0.0
        for key, parameter in model.named_parameters():
            if key in wanted:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad, group=mesh.group)
                # A gradient that is a difference of large ones is known to the rounding of those.
                worst = max(worst, difference(grad, wanted[key], max(float(wanted[key].abs().max()), largest / 50)))
        kind = "one document" if documents is None else "whole" if documents is WHOLE else "packed"
        kind += " skipping" if skip else ""
        summed = mesh.sum(torch.cat((ours.detach()[None], our_metrics)))
        tell(
            f"training {mesh.degrees.ulysses}x{mesh.degrees.zigzag} {name} {kind}",
            error=worst,
            nats=float(summed[0]),
            loss=difference(summed, torch.cat((loss.detach()[None], metrics))),
            targets=part["num_targets"] if mesh.size == 1 else int(mesh.sum(torch.tensor(part["num_targets"]))),
        )


def families(mesh: Mesh, rows: dict[str, dict[str, Any]]) -> None:
    """Every supported family, its hidden states over shared rows beside those over whole ones."""
    for label, values in rows.items():
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4 if "kv_lora_rank" in values else 2}
        model = model_of(label.split()[0], {**values, **heads}, {}).eval()
        batch = batch_of(24, [0, 9, 24, 30, 48])
        part = cut(batch, mesh.degrees, mesh.rank)
        shards = Shards(mesh, part["rows"], CPU)
        keep = torch.cat([torch.arange(*each) for each in mesh.degrees.segments(mesh.rank, 24)])
        inner = getattr(model, model.base_model_prefix)
        with torch.no_grad():
            packed = {"position_ids": batch["position_ids"], "cu_seqlens": batch["cu_seqlens"]}
            wanted = inner(input_ids=batch["input_ids"], use_cache=False, **packed).last_hidden_state[:, keep]
            found = inner(
                input_ids=part["input_ids"], position_ids=part["position_ids"], use_cache=False, shards=shards
            ).last_hidden_state
        tell(f"family {mesh.degrees} {label}", error=difference(found, wanted))


def begin() -> list[Mesh]:
    """Joins the other processes; every way to share rows between so many."""
    torch.set_num_threads(1)
    choose_backend._announced.add(("chunked", "tensors are on cpu, Triton needs cuda"))
    dist.init_process_group("gloo")
    splits = {2: [Degrees(2, 1), Degrees(1, 2)], 4: [Degrees(2, 2), Degrees(1, 4)]}[dist.get_world_size()]
    return [build_mesh(split) for split in splits]


def main() -> None:
    meshes = begin()
    for mesh in meshes:
        for name in OPERATOR:
            for documents in (None, PACKED, EDGES):
                operator(mesh, name, documents)
    if dist.get_world_size() == 2:
        for name in MODELS:
            for documents in (None, PACKED):
                training(meshes, name, documents)
        training(meshes, "pro parts, sinks, log-n", WHOLE, skip=1000)
        for mesh in meshes:
            families(mesh, json.loads(sys.argv[1]))
    else:
        training(meshes, "pro parts, sinks, log-n", PACKED)
        training(meshes, "windows and caps", PACKED)
        training(meshes, "pro parts, sinks, log-n", PACKED, skip=1000)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
