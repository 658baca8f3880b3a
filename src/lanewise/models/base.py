"""What every language model here shares: its ends, its table, and the calls the rest of the project makes."""

from collections.abc import Iterator

from torch import Tensor, nn

from lanewise.config import DeepSeekModel, DenseModel
from lanewise.models.linear import Embedding, Linear, TiedHead
from lanewise.models.norm import RMSNorm
from lanewise.models.seams import ALONE, Seams
from lanewise.models.spec import Cut, Output, ParamSpec, table


class LanguageModel(nn.Module):
    """Tokens in, sums of losses out. `layers` is keyed by global layer number, so that a part of the model that holds
    only some of them keeps every parameter's name."""

    seams: Seams = ALONE

    def __init__(self, config: DenseModel | DeepSeekModel) -> None:
        super().__init__()
        assert config.vocab_size > 0, "vocab_size must be known before a model is built"
        tied = config.tie_embeddings
        self.embed = Embedding(
            config.vocab_size, config.hidden, config.init_std, aliases=("head.weight",) if tied else ()
        )
        self.layers = nn.ModuleDict()
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = (
            TiedHead(self.embed)
            if tied
            else Linear(config.hidden, config.vocab_size, config.init_std, kind="head", tp=Cut(0, config.vocab_size))
        )

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor, key: Tensor | None = None) -> Output:
        """One microbatch. labels[i] is the token after tokens[i], -100 where nothing is predicted. key: int64 scalar
        that keys dropout; without it, and in eval mode, there is none."""
        raise NotImplementedError

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Next-token logits [B, T, V]."""
        raise NotImplementedError

    def blocks(self) -> Iterator[nn.Module]:
        """The repeated blocks: the units of compilation."""
        return iter(self.layers.values())

    def table(self) -> tuple[ParamSpec, ...]:
        """Every parameter, sorted by name, in agreement with `named_parameters()`."""
        return table(self)

    def balance(self, counts_LE: Tensor) -> None:
        """After a step: move the experts' choice biases by the step's global `expert_counts`. Dense: nothing to do."""
