"""Closed forms against the models' own tables and against FLOPs counted by torch."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lanewise import config
from lanewise.model_settings import presets
from lanewise.models.build import build
from lanewise.planner.model import describe


@pytest.mark.parametrize("preset", [*presets()])
def test_parameters_are_those_of_the_table(preset):
    model = config.load_model({"preset": preset, "vocab_size": presets()[preset].get("vocab_size", 1000)})
    with torch.device("meta"):
        table = build(model).table()
    assert describe(model).parameters == sum(math.prod(spec.shape) for spec in table)


@pytest.mark.parametrize(("layers", "length"), [(2, 64), (4, 128)])
def test_dense_flops_are_those_torch_counts(layers, length):
    model = config.load_model({"preset": "tiny-dense", "vocab_size": 512, "layers": layers})
    with torch.device("meta"):
        built = build(model)
        tokens = torch.zeros(2, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built.logits(tokens)
    ours = describe(model)
    # torch counts attention's products without their mask: twice ours; norms are in our count, and small
    counted = counter.get_total_flops() / (2 * length)
    stated = layers * (ours.block_flops(length) + ours.attention_flops(length)) + 2 * ours.embedding
    assert counted == pytest.approx(stated, rel=0.01)
