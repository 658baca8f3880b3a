"""What every language model here shares: its ends, its table, and the calls the rest of the project makes."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lanewise.config import DeepSeekModel, DenseModel
from lanewise.models.linear import Embedding, Linear, TiedHead
from lanewise.models.loss import PLAIN, Objective
from lanewise.models.norm import RMSNorm
from lanewise.models.rotary import Places, Rotary
from lanewise.models.seams import ALONE, Seams
from lanewise.models.spec import Cut, Output, ParamSpec, Passed, table


class LanguageModel(nn.Module):
    """Tokens in, sums of losses out. `layers` is keyed by global layer number, so that a part of the model that holds
    only some of them keeps every parameter's name."""

    seams: Seams = ALONE
    rotary: Rotary
    objective: Objective = PLAIN  # of each token that is predicted, also further ahead
    # Where the model is a part of a whole one: does it hold the first and the last layer, and the whole one's table.
    starts = ends = True
    whole: tuple[ParamSpec, ...] | None = None

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

    def forward(
        self, tokens_BT: Tensor, labels_BT: Tensor, key: Tensor | None = None, starts_BT: Tensor | None = None
    ) -> Output:
        """One microbatch. labels[i] is the token after tokens[i], -100 where nothing is predicted. key: int64 scalar
        that keys dropout; without it, and in eval mode, there is none.

        starts_BT: for rows of several documents, the index at which each token's document starts (int64, on the CPU,
        where attention is cut up). Documents then do not see each other and count their positions from 0, and the sums
        are those of a row for each; only the experts' sequence-wise balance loss stays one of the row.
        """
        output = self.part((), tokens_BT, labels_BT, key, starts_BT)
        assert isinstance(output, Output), "the last layers are not here"
        return output

    def part(
        self,
        states: Sequence[Tensor],
        tokens_BT: Tensor,
        labels_BT: Tensor,
        key: Tensor | None,
        starts_BT: Tensor | None = None,
    ) -> Output | Passed:
        """The forward of the layers that are here, from the `states` that the part before passed (none: the first).
        The rest is the microbatch's, as in `forward`, for every part."""
        raise NotImplementedError

    def places(self, tokens_BT: Tensor, starts_BT: Tensor | None = None) -> Places:
        """Of the share's tokens, from the microbatch's."""
        T = tokens_BT.shape[1]
        angles = self.rotary.angles(T, tokens_BT.device)
        if starts_BT is None:
            return Places(angles.at(self.seams.positions))
        positions_BT = self.seams.share(torch.arange(T) - starts_BT)
        return Places(angles.at(lambda x_TD: x_TD[positions_BT][:, None]), self.seams.share(starts_BT))

    @property
    def handed_on(self) -> int:
        """How many states, [B, T, H] of own tokens each, one part passes to the next."""
        return 1

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Next-token logits [B, T, V]."""
        raise NotImplementedError

    def blocks(self) -> Iterator[nn.Module]:
        """The repeated blocks: the units of compilation."""
        return iter(self.layers.values())

    def table(self) -> tuple[ParamSpec, ...]:
        """Every parameter of the whole model, sorted by name, in agreement with its `named_parameters()`."""
        return table(self) if self.whole is None else self.whole

    def balance(self, counts_LE: Tensor) -> None:
        """After a step: move the experts' choice biases by the step's global `expert_counts`. Dense: nothing to do."""
