import pytest
import torch

from lanewise.config import load_model
from lanewise.models.build import build
from lanewise.models.init import BLOCK, fill, initial
from lanewise.models.spec import ParamSpec

WIDE = BLOCK // 16  # 16 rows a block


@pytest.mark.parametrize("shape", [(100, WIDE // 64, 64), (3, 2 * BLOCK), (1000, 7), (5,)])
def test_any_rows_equal_those_of_the_whole(shape):
    spec = ParamSpec("w", shape, "linear", "normal", 0.5)
    whole = initial(spec, seed=3)
    rows = shape[0]
    cuts = sorted({0, 1, 2, 15, 16, 17, 33, rows // 2, rows - 1, rows} & set(range(rows + 1)))
    for start in cuts:
        for stop in cuts:
            assert torch.equal(initial(spec, 3, slice(start, stop)), whole[start:stop])


def test_distribution_and_keys():
    spec = ParamSpec("layers.0.w", (64, WIDE), "linear", "normal", 0.02)
    whole = initial(spec, 0)
    assert whole.dtype == torch.float32
    assert whole.std().item() == pytest.approx(0.02, rel=2e-3)
    assert whole.mean().item() == pytest.approx(0, abs=5 * 0.02 / whole.numel() ** 0.5)
    first = whole[:16]
    others = [
        whole[16:32],
        initial(spec, 1)[:16],
        initial(ParamSpec("layers.1.w", spec.shape, "linear", "normal", 0.02), 0)[:16],
    ]
    for other in others:  # another block, seed or name: unrelated values
        assert abs(torch.corrcoef(torch.stack((first.flatten(), other.flatten())))[0, 1]) < 0.005


@pytest.mark.parametrize("name", ["tiny", "tiny-dense"])
def test_fill(name):
    model = build(
        load_model(
            {"preset": name, "vocab_size": 300, "qkv_bias": True}
            if "dense" in name
            else {"preset": name, "vocab_size": 300}
        )
    )
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)
    fill(model, 7)
    for spec in model.table():
        value = model.get_parameter(spec.name)
        assert torch.equal(value, initial(spec, 7))
        if spec.kind == "norm":
            assert (value == 1).all()
        elif spec.kind == "bias":
            assert (value == 0).all()
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.1)
    assert all((b == 0).all() for b in model.buffers())


def test_initial_values_ignore_the_default_device():
    spec = ParamSpec("w", (4, 4), "linear", "normal", 1.0)
    with torch.device("meta"):
        values = initial(spec, 0)
    assert torch.equal(values, initial(spec, 0))


def test_no_rows():
    assert initial(ParamSpec("w", (4, 4), "linear", "normal", 1.0), 0, slice(2, 2)).shape == (0, 4)
    assert initial(ParamSpec("w", (0, 4), "linear", "normal", 1.0), 0).shape == (0, 4)
