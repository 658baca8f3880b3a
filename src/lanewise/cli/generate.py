"""Continue a text with a checkpoint."""

import argparse
import json
from pathlib import Path

from lanewise.errors import UserError

EXAMPLE = """examples:
  lanewise generate runs/default --prompt 'def read_file(path):'
  lanewise generate runs/default --prompt 'import os' --tokens 100 --temperature 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a run's folder, or one checkpoint")
    parser.add_argument("--prompt", default="def ", help="text to continue (default: 'def ')")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to draw (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest each time (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=40, help="draw among this many (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.tokens < 1 or arguments.top_k < 1 or arguments.temperature < 0:
        raise UserError("--tokens and --top-k must be at least 1, --temperature at least 0")
    from lanewise.checkpoint.locate import locate
    from lanewise.data.tokenizer import load
    from lanewise.generation import generate, restore
    from lanewise.runfolder import tokenizer_of

    checkpoint = locate(arguments.path)
    model, settings = restore(checkpoint)
    tokenizer = load(tokenizer_of(checkpoint))
    ids = generate(
        model,
        tokenizer.encode(arguments.prompt),
        arguments.tokens,
        settings.batch.sequence_length,
        arguments.temperature,
        arguments.top_k,
        arguments.seed,
        stop=tokenizer.end,
    )
    text = tokenizer.decode(ids)
    if arguments.json:
        print(json.dumps({"prompt": arguments.prompt, "text": text, "tokens": len(ids)}))
    else:
        print(arguments.prompt + text)
    return 0
