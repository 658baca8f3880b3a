"""A batch in microbatches, a rank's rows of them, and what the default loss of a language model is."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lanewise.errors import UserError
from lanewise.models.spec import IGNORE

Loss = Callable[[Any, Any], tuple[Tensor, Tensor | int]]


def next_token_loss(outputs: Any, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of cross-entropies and their number: position t predicts the label of t + 1; labels of -100 do not count.

    outputs: logits [B, T, V], or something that has them as `.logits`. The labels are shifted here, once.
    """
    logits_BTV = getattr(outputs, "logits", outputs)
    wanted = labels_BT[:, 1:]
    total = nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total, (wanted != IGNORE).sum()


def rows_of(value: Any, part: slice) -> Any:
    """`part` of the rows of a tensor, or of every tensor in a dict."""
    return {name: rows_of(each, part) for name, each in value.items()} if isinstance(value, dict) else value[part]


def microbatches(inputs: Any, labels: Any, count: int, at: int, parts: int) -> Iterator[tuple[Any, Any]]:
    """`count` pieces of the batch, of each the rows of rank `at` of the `parts` that divide them. Raises UserError."""
    first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    rows = first.shape[0]
    if count < 1 or rows % (count * parts):
        raise UserError(
            f"a batch of {rows} rows does not divide into {count} microbatches for {parts} ranks of fsdp and replicas: "
            f"use a multiple of {max(count, 1) * parts} rows"
        )
    size = rows // count // parts
    for number in range(count):
        start = (number * parts + at) * size
        yield rows_of(inputs, slice(start, start + size)), rows_of(labels, slice(start, start + size))
