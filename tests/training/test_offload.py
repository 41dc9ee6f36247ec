"""Checkpoints in CPU memory: the same bits, nothing but layer inputs moved, every buffer given back."""

from __future__ import annotations

import weakref

import pytest
import torch
from pydantic import TypeAdapter

from retrofox.anatomy import decoder_layers
from retrofox.config.stage import AnyStage
from retrofox.training.model_tweaks import recompute
from retrofox.training.objectives import stage_objective
from retrofox.training.offload import Offload
from tests.training.conftest import packed_batch

STAGE = {"objective": "extend", "tokens": 1024, "sequence_length": 40, "gradient_checkpointing": "full"}
LAYERS = 4


@pytest.fixture
def model(pico_fox):
    return pico_fox(config={"num_hidden_layers": LAYERS}).train()


def loss_of(model, objective="extend"):
    stage = TypeAdapter(AnyStage).validate_python({**STAGE, "objective": objective})
    return stage_objective(model, stage, torch.device("cpu"))(model, packed_batch(rows=2))[0]


def gradients(model, objective="extend"):
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, objective)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def with_offload(model, every=1):
    """The model with the checkpoint of every n-th layer offloaded; the list of checkpoints that are copied out."""
    recompute(model, every, offload=True)
    offload = decoder_layers(model)[0]._gradient_checkpointing_func.__self__
    copied, copy_out = [], offload._copy_out
    offload._copy_out = lambda kept: (copied.append(tuple(kept.tensor.shape)), copy_out(kept))
    return offload, copied


@pytest.mark.parametrize("chunk", [1000, 1 << 20])  # a checkpoint has 80 x 32 x 4 = 10240 bytes
@pytest.mark.parametrize("every", [1, 2])
def test_losses_and_gradients_are_the_same_bits(model, chunk, every, monkeypatch):
    monkeypatch.setattr("retrofox.training.offload.CHUNK", chunk)
    recompute(model, every)
    loss, wanted = gradients(model)
    _, copied = with_offload(model, every)
    for step in (1, 2):
        found = gradients(model)
        assert found[0] == loss
        assert found[1].keys() == wanted.keys()
        assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted.items())
        assert copied == [(2, 40, 32)] * step * (LAYERS // every - 1)  # inputs of layers; the last one's stays


def test_empty_tensors_stay_where_they_are():
    offload, x = Offload(), torch.randn(5, 4, requires_grad=True)
    out = [offload.run(lambda a, b: a.sin() + b.sum(), x * 1, torch.empty(0)) for _ in range(3)]
    torch.stack(out).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, 3 * x.cos())


def test_two_checkpoints_are_out_at_a_time(model):
    """Forward and backward, of the layers' checkpoints only the newest and the one before it hold memory here."""
    offload, _ = with_offload(model)
    alive, most = [], []
    pack, unpack = offload._pack, offload._unpack

    def here() -> int:
        return sum(kept is not None and kept.tensor is not None for kept in (reference() for reference in alive))

    def packing(x):
        kept = pack(x)
        if not isinstance(kept, torch.Tensor):
            alive.append(weakref.ref(kept))
        most.append(here())
        return kept

    def unpacking(kept):
        found = unpack(kept)
        most.append(here())
        return found

    offload._pack, offload._unpack = packing, unpacking
    loss_of(model).backward()
    assert len(most) >= 2 * LAYERS
    assert max(most) <= 2
    assert all(reference() is None for reference in alive)  # nor is anything left in CPU memory
    assert offload.leaving is None


def test_two_forwards_before_their_backwards(model):
    _, wanted = gradients(model)
    with_offload(model)
    model.zero_grad(set_to_none=True)
    first, second = loss_of(model), loss_of(model)
    first.backward()
    assert all(torch.equal(p.grad, wanted[name]) for name, p in model.named_parameters())
    second.backward()
    assert all(torch.equal(p.grad, 2 * wanted[name]) for name, p in model.named_parameters())
