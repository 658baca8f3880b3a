"""Continue a text with a model."""

from collections.abc import Sequence
from pathlib import Path

import torch

from lanewise.checkpoint.stored import Stored
from lanewise.config import Run, parse
from lanewise.data.dataset import Dataset
from lanewise.data.live import Live
from lanewise.data.tokenizer import Tokenizer
from lanewise.errors import UserError
from lanewise.models.base import LanguageModel
from lanewise.models.build import build


def restore(checkpoint: Path) -> tuple[LanguageModel, Run]:
    """The model of a checkpoint, in fp32 on this machine's device, and the run it comes from."""
    stored = Stored(checkpoint)
    run = parse(stored.manifest.meta["run"], name=str(checkpoint))
    model = build(run.model)
    state = {name: stored.tensor(f"model/{name}") for name, _ in model.named_parameters()}
    state |= dict(stored.tensors("buffer/"))
    model.load_state_dict(state, strict=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), run


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    count: int,
    context: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """`count` token ids (fewer if `stop` is drawn) that continue `prompt`, at least one token.

    The model sees at most the last `context` tokens. temperature 0 takes the likeliest token each time.
    """
    if not prompt:
        raise UserError("the prompt is empty: give at least one character")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        tokens_BT = torch.tensor([tokens[-context:]], device=device)
        logits_V = model.logits(tokens_BT)[0, -1].float()
        if temperature == 0:
            drawn = int(logits_V.argmax())
        else:
            values, ids = (logits_V / temperature).topk(min(top_k, logits_V.numel()))
            drawn = int(ids[torch.multinomial(values.softmax(-1), 1, generator=generator)])
        if drawn == stop:
            break
        tokens.append(drawn)
    return tokens[len(prompt) :]


def sample(model: LanguageModel, dataset: Dataset | Live, tokenizer: Tokenizer, context: int) -> tuple[str, str]:
    """(prompt, continuation): 160 tokens that continue the first words of a held-out (else a training) text."""
    slot = dataset.held(0, 1) if dataset.held_batches(1) else dataset.slot(1, 0, 0)
    prompt = [token for token in slot.tokens_BT[0, :12].tolist() if token != tokenizer.end] or [tokenizer.end]
    model.eval()
    return tokenizer.decode(prompt), tokenizer.decode(generate(model, prompt, 160, context, stop=tokenizer.end))
