"""train.compile changes the code that computes a block, not what it computes."""

import pytest
import torch

from lanewise.config import load
from lanewise.models.build import build
from lanewise.models.init import fill

SIZES = ["model.vocab_size=257", "model.layers=2", "model.hidden=64", "model.heads=2", "model.ffn_hidden=96"]
SHORT = ["model.q_lora_rank=32", "model.kv_lora_rank=32", "model.experts=4", "model.expert_hidden=32"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["dense", "deepseek"])
def test_the_compiled_bf16_model_is_as_near_to_fp32_as_the_plain_one(family):
    """Rounding moves a few tokens to other experts, hence the factor; faults of the compiler seen so far (memory left
    unset where tensors are joined and split, a wrong gradient of the router) were off by 1.0 and more."""
    extra = ["model.preset=tiny-dense", "model.kv_heads=2"] if family == "dense" else ["model.preset=tiny", *SHORT]
    config = load(None, [*SIZES, *extra]).model
    tokens, labels = torch.randint(257, (2, 4, 256))

    def gradients(dtype, compiled):
        model = build(config)
        fill(model, 0)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        if compiled:
            for block in model.blocks():
                block.compile()
        model(tokens, labels).loss_sum.backward()
        return {name: p.grad.float() for name, p in model.named_parameters()}

    right = gradients(torch.float32, False)
    plain, compiled = gradients(torch.bfloat16, False), gradients(torch.bfloat16, True)
    for name, exact in right.items():
        rounding = (plain[name] - exact).norm()
        assert (compiled[name] - exact).norm() <= 2 * rounding + 0.02 * exact.norm(), name
