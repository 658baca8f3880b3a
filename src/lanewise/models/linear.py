"""The matrices: projections, the embedding and the output head."""

import torch.nn.functional as F
from torch import Tensor, nn

from lanewise.models.spec import Cut, Declared, Kind, ParamSpec


class Linear(Declared):
    """tp: how tensor parallelism cuts it: dim 0, the outputs (and the bias), or dim 1, the inputs."""

    def __init__(
        self, inputs: int, outputs: int, std: float, bias: bool = False, kind: Kind = "linear", tp: Cut | None = None
    ) -> None:
        super().__init__()
        cuts = {"tp": tp} if tp else {}
        self.weight = self.declare(ParamSpec("weight", (outputs, inputs), kind, "normal", std, cuts=cuts))
        assert not (bias and tp and tp.dim == 1), "each rank would add the bias to its partial sum"
        self.bias = self.declare(ParamSpec("bias", (outputs,), "bias", "zeros", cuts=cuts)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(Declared):
    def __init__(self, rows: int, width: int, std: float, aliases: tuple[str, ...] = ()) -> None:
        super().__init__()
        cuts = {"tp": Cut(0, rows)}
        self.weight = self.declare(ParamSpec("weight", (rows, width), "embedding", "normal", std, aliases, cuts))

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


class ApartHead(nn.Module):
    """A tied head that reads the embedding's weight through a leaf of its own, to be put over the same memory: the
    gradients of the two uses then come apart, and can be summed as they are where the ends of the model are on two
    ranks."""

    def __init__(self, embed: Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embed.weight.detach(), requires_grad=embed.weight.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
