"""FSDP2 and DeepSpeed: the form of saved weights, and what FSDP2 gathers, reduces and steps at a time.

FSDP2 gathers and reduces a unit of parameters in one message. Small layers share one: SmolLM2's of 3.5M parameters,
gathered one by one, wait for the host. Gates and small Pro parts lie in the root's unit, float32, gathered once a pass;
an output gate as large as a projection has a unit of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from retrofox.anatomy import causal_lm, decoder_layers, is_new_tensor

UNIT = 24_000_000
"""Parameters that a unit of decoder layers has at least: 48 MB a message in bfloat16."""
LARGE = 1 << 20
"""Parameters from which a module that the conversion added has a unit of its own."""


def sharding_of(accelerator: Any) -> str:
    """The sharding of a run's weights and the form they are saved in; a run with another refuses its checkpoints."""
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return "DeepSpeed"
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        return f"FSDP ({fsdp.state_dict_type.name})"
    return "no sharding"


def shard_new_modules(model: Any, mesh: Any = None, least: int = 1) -> None:
    """Gives gates and Pro parts FSDP2 units of their own, float32: the layers' bfloat16 units would cast them.

    Args:
        mesh: processes to shard over, None = all.
        least: parameters of a module that gets one.
    """
    for name, module in list(model.named_modules()):
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if size >= least and is_new_tensor(f"{name}.weight") and not isinstance(module, FSDPModule):
            # A gather costs more than they weigh: gathered once a pass.
            policy = MixedPrecisionPolicy(cast_forward_inputs=False)
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def units(layers: Sequence[nn.Module], least: int = UNIT) -> list[list[nn.Module]]:
    """Neighbouring layers in groups of about one size, each of `least` parameters or more where there are as many."""
    total = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    count = max(1, min(len(layers), total // least))
    ends = [round(number * len(layers) / count) for number in range(count + 1)]
    return [list(layers[start:stop]) for start, stop in itertools.pairwise(ends)]


def shards_layers(plugin: Any, model: nn.Module) -> bool:
    """Whether `shard` cuts a model; False: accelerate does, as its settings and the model ask for.

    Args:
        plugin: accelerate's FullyShardedDataParallelPlugin, before it has seen the model.
    """
    default = plugin.auto_wrap_policy in (None, transformer_auto_wrap_policy)
    plain = default and not plugin.transformer_cls_names_to_wrap
    own = plugin.activation_checkpointing or plugin.ignored_modules
    packed = any(not parameter.is_floating_point() for parameter in model.parameters())  # 4-bit
    return plain and not own and not packed


def shard(model: nn.Module, plugin: Any, mesh: Any = None, least: int = UNIT) -> None:
    """Cuts a model for FSDP2: its root with gates and small Pro parts, units of layers, the embedding and the head.

    Products run in the plugin's dtype; gradients are summed in float32, as under DDP, and what the forward returns
    keeps its dtype: a loss in bfloat16 would have three digits. A unit gathers the next one while it computes.

    Args:
        plugin: accelerate's FullyShardedDataParallelPlugin.
        mesh: processes to shard over, None = all.
        least: parameters of a unit, see `units`.
    """
    given = plugin.mixed_precision_policy
    dtype = None if given is None else given.param_dtype
    lower = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    common: dict[str, Any] = {"mesh": mesh, "offload_policy": plugin.cpu_offload}
    reshard = {"reshard_after_forward": plugin.reshard_after_forward}
    lm, layers = causal_lm(model), decoder_layers(model)
    shard_new_modules(model, mesh, least=LARGE)
    inputs, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = inputs.weight is head.weight
    others = {p for part in (*layers, inputs, head) for p in part.parameters()}
    others -= {p for name, p in model.named_parameters() if is_new_tensor(name)}
    # The root first: it would not look into layers that are cut already.
    root = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(model, mp_policy=root, reshard_after_forward=False, ignored_params=others, **common)
    new = {p for name, p in model.named_parameters() if is_new_tensor(name)}
    groups = units(layers, least)
    for group in groups:
        fully_shard(group, mp_policy=lower, ignored_params=new, **reshard, **common)
    if not tied:
        fully_shard(inputs, mp_policy=lower, **reshard, **common)
        inputs.set_unshard_in_backward(False)  # a row's gradient needs no weight
    fully_shard([inputs, head] if tied else head, mp_policy=lower, reshard_after_forward=False, **common)
    cut: list[Any] = [group[0] for group in groups]
    for first, following in itertools.pairwise(cut):
        first.set_modules_to_forward_prefetch([following])


def shard_stage(model: nn.Module, accelerator: Any) -> None:
    """Shards a stage's model for FSDP2: all of it, or only the parts that accelerate would shard wrongly."""
    plugin: Any = accelerator.state.fsdp_plugin
    if not shards_layers(plugin, model):
        shard_new_modules(model)
        return
    mesh = getattr(accelerator, "torch_device_mesh", None)
    split: Any = None if mesh is None else accelerator.parallelism_config
    shard(model, plugin, None if mesh is None else mesh[tuple(split.fsdp_dim_names)])
    plugin.auto_wrap_policy = None  # nothing is left to cut


def take_sharded(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Gives an optimizer the parameters of `groups`, group by group, in place of those it found itself.

    accelerate finds a sharded parameter again by its address, and all empty shards have the address 0: a rank that
    holds none of several gates' rows would be left with one parameter many times over.
    """
    for group, sharded in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = sharded["params"]


def step_locally(optimizer: torch.optim.Optimizer) -> None:
    """Lets Adam and AdamW step each process's part of sharded tensors, without DTensor's dispatch in between."""
    if not isinstance(optimizer, torch.optim.Adam):
        return
    collect = optimizer._init_group

    def collect_parts(group: dict[str, Any], *lists: Any) -> Any:
        found = collect(group, *lists)
        for each in lists:
            each[:] = [x.to_local() if isinstance(x, DTensor) else x for x in each]
        return found

    optimizer._init_group = collect_parts  # type: ignore[method-assign]
