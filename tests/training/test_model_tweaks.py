"""Changes that make a model train fast change nothing that it computes."""

from __future__ import annotations

import torch

from retrofox.training.model_tweaks import fuse_norms, recompute


def test_fused_norms_change_nothing(pico_fox):
    model = pico_fox()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert fuse_norms(model) == 5
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-5, atol=1e-5)


def test_recomputation_changes_nothing(pico_fox):
    model = pico_fox().train()
    ids = torch.arange(40)[None]

    def gradient(which):
        assert recompute(model, which) == {"none": 0, "full": 2, 2: 1}[which]
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return model.model.layers[0].self_attn.forget_gate.weight.grad.clone()

    plain = gradient("none")
    assert torch.equal(gradient("full"), plain)
    assert torch.equal(gradient(2), plain)
