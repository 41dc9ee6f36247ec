"""Adapters on converted models: what was added stays in float32 whatever the base is loaded in."""

import torch

from retrofox.anatomy import is_new_tensor
from retrofox.loading.adapter import float32_parts


def test_gates_and_pro_parts_are_put_back_into_float32(pico_fox):
    model = pico_fox(pro="all").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if is_new_tensor(name):
            parameter.data = parameter.data.to(torch.bfloat16)  # as peft's copies of a lowered model
    float32_parts(model)
    kinds = {is_new_tensor(name): parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if is_new_tensor(name))
