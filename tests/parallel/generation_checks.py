"""What the processes of `test_shared_generation` run: every case of one world size, one JSON line for each.

torchrun ... generation_checks.py [arguments of the command line, to run it too]
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checks import MODELS, begin, difference, model_of, tell
from torch.utils._python_dispatch import TorchDispatchMode

from retrofox.cli.app import app
from retrofox.evaluation import shared_context
from retrofox.generation.generate import _seeded, complete
from retrofox.generation.shared import complete_shared
from retrofox.loading.opened import Opened
from retrofox.model import attention
from retrofox.parallel.mesh import Mesh

NEW = 9
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # name: model, how tokens are chosen
    "pro parts, sinks, log-n": ("pro parts, sinks, log-n", {}),
    "interpolated, pruned": ("interpolated, recomputed, tiled, pruned", {}),
    "windows and caps": ("windows and caps", {}),
    "sampled": ("pro parts, sinks, log-n", {"temperature": 0.8, "top_p": 0.9}),
}
LENGTHS = {"sampled": (41,)}


def prompts(length: int) -> list[list[int]]:
    """Two prompts of random tokens."""
    return torch.randint(2, 96, (2, length), generator=torch.Generator().manual_seed(length)).tolist()


def compare(meshes: list[Mesh], name: str) -> None:
    """Tokens and logits of the processes together beside those of one."""
    which, drawing = CASES[name]
    family, config, spec, _ = MODELS[which]
    model = model_of(family, config, spec).eval()
    tokenizer = SimpleNamespace(pad_token_id=1, eos_token_id=None, bos_token_id=None)
    opened, seed = Opened(model, tokenizer, "", ""), 7 if drawing else None
    for length in LENGTHS.get(name, (41, 3)):  # 41 doesn't divide; of 3 tokens some processes hold none
        given = prompts(length)
        wanted = complete(opened, given, NEW, seed=seed, ignore_eos=True, **drawing)
        with torch.no_grad():
            whole = torch.tensor([a + b for a, b in zip(given, wanted, strict=True)])
            logits = model(input_ids=whole, use_cache=False).logits[:, length - 1 : -1]
        for mesh in meshes:
            kept: list[torch.Tensor] = []
            with _seeded(seed, torch.device("cpu")):
                found = complete_shared(model, given, NEW, mesh=mesh, logits=kept, **drawing)
            split = f"{mesh.degrees.ulysses}x{mesh.degrees.ring}"
            error = difference(torch.stack(kept, 1), logits)
            tell(f"{split} {name} {length}", error=error, different=found != wanted)


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def losses_memory(processes: int) -> None:
    """The largest tensor of `eval --context` for each token that a process holds, attention left out."""
    family, config, spec, _ = MODELS["pro parts, sinks, log-n"]
    model = model_of(family, {**config, "vocab_size": 2048}, spec).eval()
    plain = mock.patch.object(attention, "attend_locally", lambda query, *_: query.transpose(1, 2))  # forms no scores
    budget = mock.patch.object(shared_context, "LOGIT_BYTES", {"cpu": 1 << 18})
    losses, found = shared_context.shared_losses(processes, model), {}
    for length in (1024, 2048):
        ids = torch.randint(2, 96, (1, length), generator=torch.Generator().manual_seed(0))
        with plain, budget, Largest() as largest:
            losses(model, ids)
        found[f"at_{length}"] = largest.elements / (length / processes)
    tell("memory of losses", **found)


def main() -> None:
    meshes = begin()
    for name in CASES:
        compare(meshes, name)
    if dist.get_world_size() == 2:
        losses_memory(2)
    if sys.argv[1:]:
        app(standalone_mode=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
