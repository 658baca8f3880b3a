"""One hash for a model's weights, whatever layout, number of ranks or file they come from."""

import hashlib
import sys
from collections.abc import Iterable

import torch
from torch import Tensor


def weights_hash(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 (64 hex digits) over full parameters, given in ascending order of their names (Python's str order).

    Each parameter contributes, in this order:

    - its name in UTF-8, then a zero byte;
    - its dtype as torch prints it without "torch." ("float32", "bfloat16"), then a zero byte;
    - its sizes in decimal joined by commas ("384,1536"; nothing for a scalar), then a zero byte;
    - its elements in row-major order, each in little-endian bytes.

    Takes an iterator and holds one tensor at a time, so a checkpoint larger than memory can be hashed.
    """
    assert sys.byteorder == "little", "big-endian machines are not supported"
    digest, last = hashlib.sha256(), ""
    for name, tensor in parameters:
        assert name > last, f"parameters must come in the order of their names: {name!r} after {last!r}"
        last = name
        dtype, sizes = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{dtype}\0{sizes}\0".encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
