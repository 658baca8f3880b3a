import hashlib
import struct

import pytest
import torch

from lanewise.checkpoint.pieces import Entry
from lanewise.checkpoint.store import Checkpoints
from lanewise.checkpoint.stored import Stored
from lanewise.checkpoint.weights_hash import weights_hash


def test_the_bytes_are_as_documented():
    by_hand = b"a.weight\0float32\x002,2\0" + struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)
    by_hand += b"b\0bfloat16\x001\0" + bytes([0x80, 0x3F])  # 1.0 is 0x3f80
    by_hand += b"c\0int64\0\0" + struct.pack("<q", -2)
    by_hand += b"d\0float32\x000,3\0"
    parameters = {
        "a.weight": torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t(),  # not contiguous
        "b": torch.ones(1, dtype=torch.bfloat16),
        "c": torch.tensor(-2),
        "d": torch.empty(0, 3),
    }
    assert weights_hash(parameters.items()) == hashlib.sha256(by_hand).hexdigest()


def test_name_dtype_shape_and_every_bit_count():
    base = torch.tensor([0.0, 1.0])
    others = [
        ("b", base),
        ("a", base.view(2, 1)),
        ("a", base.view(torch.int32)),
        ("a", torch.tensor([-0.0, 1.0])),
    ]
    hashes = {weights_hash([pair]) for pair in [("a", base), *others]}
    assert len(hashes) == 5


def test_order_is_checked():
    with pytest.raises(AssertionError, match="order"):
        weights_hash([("b", torch.zeros(1)), ("a", torch.zeros(1))])


def test_a_live_model_and_its_checkpoint_agree(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    state = {f"model/{name}": Entry.whole(p) for name, p in model.named_parameters()}
    state["buffer/count"] = Entry.whole(torch.tensor(3))
    saver = Checkpoints(tmp_path, keep=1, background=False, group=None, alarm=lambda *_: None)
    saver.save(1, state, {})
    live = weights_hash(sorted(model.named_parameters()))
    assert weights_hash(Stored(saver.find().path).tensors("model/")) == live
