"""What was added stays in float32: beside linear layers that bitsandbytes packed, and in a lowered adapter's base."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import retrofox
from retrofox.anatomy import is_new_tensor
from retrofox.loading.adapter import float32_parts
from retrofox.model.modeling_fox import ForgetGate


@pytest.fixture
def wide_checkpoint(pico_fox, tmp_path):
    """A converted model whose layers are as wide as a block of 4-bit weights."""
    config = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.1}
    pico_fox(config=config).save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize(("bits", "kind"), [("load_in_8bit", "Linear8bitLt"), ("load_in_4bit", "Linear4bit")])
@torch.no_grad()
def test_gates_stay_as_they_are_in_a_quantised_model(wide_checkpoint, bits, kind):
    from transformers import BitsAndBytesConfig

    plain = retrofox.load(wide_checkpoint)
    options: dict[str, Any] = {bits: True}
    packed: Any = retrofox.load(wide_checkpoint, quantization_config=BitsAndBytesConfig(**options))
    kinds = {name: type(module).__name__ for name, module in packed.named_modules()}
    assert {kinds[name] for name in kinds if name.endswith("_proj")} == {kind}
    gates = {name: module for name, module in plain.named_modules() if isinstance(module, ForgetGate)}
    assert len(gates) == 2
    for name, gate in gates.items():
        assert torch.equal(packed.get_parameter(f"{name}.weight"), gate.get_parameter("weight"))
    tokens = torch.randint(2, 288, (1, 40), generator=torch.Generator().manual_seed(0))
    wanted, found = (model(tokens).logits.log_softmax(-1) for model in (plain, packed))
    assert 0 < torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="sum") / 40 < 0.1
    assert packed.generate(tokens, max_new_tokens=4, do_sample=False).shape == (1, 44)


def test_gates_and_pro_parts_are_put_back_into_float32(pico_fox):
    model = pico_fox(pro="all").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if is_new_tensor(name):
            parameter.data = parameter.data.to(torch.bfloat16)  # as peft's copies of a lowered model
    float32_parts(model)
    kinds = {is_new_tensor(name): parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
