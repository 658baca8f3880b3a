"""The matrices: projections, the embedding and the output head."""

import torch.nn.functional as F
from torch import Tensor, nn

from lanewise.models.spec import Declared, Kind, ParamSpec


class Linear(Declared):
    def __init__(self, inputs: int, outputs: int, std: float, bias: bool = False, kind: Kind = "linear") -> None:
        super().__init__()
        self.weight = self.declare(ParamSpec("weight", (outputs, inputs), kind, "normal", std))
        self.bias = self.declare(ParamSpec("bias", (outputs,), "bias", "zeros")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(Declared):
    def __init__(self, rows: int, width: int, std: float, aliases: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.weight = self.declare(ParamSpec("weight", (rows, width), "embedding", "normal", std, aliases))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class TiedHead(nn.Module):
    """An output head that is the embedding. It reads the weight where it lives instead of registering it twice,
    so that no move to another device or dtype can tear the two apart."""

    def __init__(self, embed: Embedding) -> None:
        super().__init__()
        self.source = (embed,)  # in a tuple, and so not a submodule

    @property
    def weight(self) -> nn.Parameter:
        return self.source[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
