"""Objectives against their definitions: loss and gradients, chunk by chunk, for every way a head can make logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch.utils._python_dispatch import TorchDispatchMode

from retrofox.anatomy import attention_mode, attentions, inner_model
from retrofox.config import LoraConfig
from retrofox.config.stage import AnyStage
from retrofox.data.packed import IGNORE, next_token_targets
from retrofox.training.chunked_loss import choose_cross_entropy, is_plain_head
from retrofox.training.lora import add_adapters
from retrofox.training.objectives import Align, Distill, Extend, original_form
from retrofox.training.param_groups import set_trainable

CPU = torch.device("cpu")


def stage(objective: str, **values) -> Any:
    return TypeAdapter(AnyStage).validate_python({"objective": objective, "tokens": 10, "sequence_length": 5, **values})


@pytest.fixture
def batch():
    torch.manual_seed(1)
    ids = torch.randint(2, 280, (2, 24))
    positions = torch.cat([torch.arange(15), torch.arange(9)]).expand(2, -1)
    cu_seqlens = torch.tensor([0, 15, 24, 39, 48], dtype=torch.int32)
    targets = next_token_targets(ids, positions)
    return {"input_ids": ids, "position_ids": positions, "cu_seqlens": cu_seqlens, "targets": targets}


def states(model, batch):
    """Hidden states (B, T, hidden) of a packed batch."""
    packed = {key: batch[key] for key in ("input_ids", "position_ids", "cu_seqlens")}
    return inner_model(model)(**packed, use_cache=False)[0]


def freeze_original(model):
    """Leaves the gates to be trained; returns the model."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("forget_gate" in name)
    return model


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_targets_stay_inside_documents_and_honour_labels():
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert next_token_targets(ids, positions).tolist() == [[6, 7, IGNORE, 9, IGNORE]]
    labels = torch.tensor([[IGNORE, 6, IGNORE, IGNORE, 9]])
    assert next_token_targets(labels, positions).tolist() == [[6, IGNORE, IGNORE, 9, IGNORE]]


@pytest.mark.parametrize(("tied", "softcap"), [(False, None), (True, None), (False, 5.0)])
def test_extend_is_cross_entropy_with_its_gradients(pico_fox, batch, tied, softcap):
    model = pico_fox(config={"tie_word_embeddings": tied})
    model.config.final_logit_softcapping = softcap
    assert is_plain_head(model) == (softcap is None)
    objective = Extend(model, stage("extend"), CPU)
    objective.rows = 7  # several chunks, the last one short
    loss, _ = objective(model, batch)
    found = gradients(model, loss)
    logits = model.lm_head(states(model, batch))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wanted = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    expected = gradients(model, wanted)
    torch.testing.assert_close(loss, wanted)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_plain_models_learn_the_same_boundaries(pico_llama, batch):
    model = pico_llama()
    packed, _ = Extend(model, stage("extend"), CPU)(model, batch)
    apart = 0.0
    for row in range(2):
        for part in (slice(0, 15), slice(15, 24)):
            ids = batch["input_ids"][row : row + 1, part]
            logits = model(input_ids=ids).logits
            apart += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    torch.testing.assert_close(packed, torch.as_tensor(apart), rtol=1e-5, atol=1e-4)


def test_the_fastest_is_chosen_where_it_is_there_and_weights_are_whole(pico_llama, monkeypatch):
    model, cuda = pico_llama(), torch.device("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert choose_cross_entropy("auto", model, cuda)[0] == "liger"
    assert choose_cross_entropy("auto", model, CPU)[0] == "chunked"
    with pytest.raises(ValueError, match="liger needs a GPU"):
        choose_cross_entropy("liger", model, CPU)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert choose_cross_entropy("auto", model, cuda)[0] == "chunked"
    with pytest.raises(ValueError, match="which sharding splits"):
        choose_cross_entropy("liger", model, cuda)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    model.config.final_logit_softcapping = 5.0
    assert choose_cross_entropy("auto", model, cuda)[0] == "chunked"


class LargestLogits(TorchDispatchMode):
    """The most rows of a tensor over the vocabulary that any operation made."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, torch.Tensor) and made.ndim > 1 and made.shape[-1] == 288 and made.shape[-2] != 32:
                self.rows = max(self.rows, made.shape[:-1].numel())  # 32 rows: the head's own weight, transposed
        return result


@pytest.mark.parametrize("objective", ["extend", "distill"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_logits_of_all_positions_never_exist_at_once(pico_fox, batch, objective, softcap):
    model = pico_fox()
    model.config.final_logit_softcapping = softcap
    teacher = [] if objective == "extend" else [pico_fox().requires_grad_(False)]
    run = {"extend": Extend, "distill": Distill}[objective](model, stage(objective), CPU, *teacher)
    run.rows = 7
    with LargestLogits() as largest:
        run(model, batch)[0].backward()
    assert largest.rows == 7
    assert batch["targets"].numel() == 48


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_distill_is_kl_and_cross_entropy(pico_fox, batch, shared, tau):
    model, teacher = pico_fox(), None
    if shared:
        freeze_original(model)
    else:
        teacher = pico_fox().requires_grad_(False)
    settings = stage("distill", temperature=tau, ce_weight=0.25)
    objective = Distill(model, settings, CPU, teacher)
    objective.rows = 7
    loss, metrics = objective(model, batch)
    found = gradients(model, loss)

    def logits():
        return model.lm_head(states(model, batch))

    with torch.no_grad(), attention_mode(model, "original"):
        taught = torch.log_softmax(logits() / tau, -1)
    z = logits()
    valid = batch["targets"] >= 0
    kl = tau**2 * ((taught.exp() * (taught - torch.log_softmax(z / tau, -1))).sum(-1) * valid).sum()
    ce = F.cross_entropy(z.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    expected = gradients(model, 0.75 * kl + 0.25 * ce)
    torch.testing.assert_close(loss, 0.75 * kl + 0.25 * ce, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(metrics, torch.stack((kl, ce)).detach(), rtol=1e-4, atol=1e-4)
    names = ["model.layers.0.self_attn.forget_gate.weight", "model.layers.1.self_attn.forget_gate.bias"]
    for name in names + ([] if shared else ["model.embed_tokens.weight", "lm_head.weight"]):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_the_original_form_leaves_frozen_adapters_and_gates_frozen(pico_fox, batch):
    model = add_adapters(pico_fox(), LoraConfig(rank=2), "base")
    settings = stage("distill", rates={"rest": 0, "gate_bias": 0})
    chosen = set_trainable(model, settings, adapters=True)
    found = gradients(model, Distill(model, settings, CPU)(model, batch)[0])
    assert sorted(found) == sorted(chosen)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == chosen


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_the_original_form_has_no_adapters(pico_fox, batch):
    plain = pico_fox()
    model: Any = add_adapters(pico_fox(), LoraConfig(rank=2), "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: adapters without effect
                parameter.add_(0.5)
        ids = batch["input_ids"]
        with original_form(plain):
            wanted = plain(ids).logits
        with original_form(model):
            found = model(ids).logits
        assert (model(ids).logits - plain(ids).logits).abs().max() > 0.01
    torch.testing.assert_close(found, wanted)


def test_align_compares_each_block_on_the_originals_inputs(pico_fox, batch):
    model = pico_fox()
    batch["targets"][0, :10] = -100  # a row weighs as many units as it has targets
    freeze_original(model)
    captured = {}
    hooks = [
        module.register_forward_hook(
            lambda m, args, kwargs, out, name=name: captured.__setitem__(name, (args, kwargs, out[0])), with_kwargs=True
        )
        for name, module in attentions(model)
    ]
    with torch.no_grad(), original_form(model):
        states(model, batch)
    for hook in hooks:
        hook.remove()
    errors = []
    for name, module in attentions(model):
        args, kwargs, wanted = captured[name]
        found = module.forward(*args, **kwargs)[0]
        for row, targets in enumerate(batch["targets"]):
            error = (found[row] - wanted[row]).square().sum() / wanted[row].square().sum()
            errors.append(error * (targets >= 0).sum() / 2)  # two layers
    expected = gradients(model, sum(errors))
    loss, _ = Align(model, stage("align"), CPU)(model, batch)
    torch.testing.assert_close(loss, sum(errors))
    found = gradients(model, loss)
    assert found.keys() == expected.keys()
    assert all("forget_gate" in name for name in found)
    for name in found:
        torch.testing.assert_close(found[name], expected[name])


def test_align_recomputes_what_it_is_told_to_and_finds_the_same_gradients(pico_fox, batch, monkeypatch):
    from retrofox.training import objectives

    calls = []
    plain = objectives.checkpoint
    monkeypatch.setattr(objectives, "checkpoint", lambda *args, **options: calls.append(1) or plain(*args, **options))
    found = {}
    for which, layers in (("none", 0), (2, 1), ("full", 2)):
        model, before = pico_fox(), len(calls)
        freeze_original(model)
        loss, _ = Align(model, stage("align", gradient_checkpointing=which), CPU)(model, batch)
        found[which] = gradients(model, loss)
        assert len(calls) - before == layers
        assert all(module.mode == "fox" for _, module in attentions(model))
    for which in (2, "full"):
        for name in found["none"]:
            assert torch.equal(found[which][name], found["none"][name])


def test_gradients_of_half_precision_heads_are_close(pico_fox, batch):
    model = pico_fox()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = Extend(model, stage("extend"), CPU)(model, batch)
    low = gradients(model, loss)
    high = gradients(model, Extend(model, stage("extend"), CPU)(model, batch)[0])
    difference = (low["lm_head.weight"] - high["lm_head.weight"]).norm() / high["lm_head.weight"].norm()
    assert low["lm_head.weight"].dtype == torch.float32
    assert difference < 0.02
