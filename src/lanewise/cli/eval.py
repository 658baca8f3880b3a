"""Loss of a checkpoint on the run's held-out text, or on any other text."""

import argparse
import json
import math
from functools import partial
from pathlib import Path

from lanewise.errors import UserError

EXAMPLE = """examples:
  lanewise eval runs/default                        all of the run's held-out text
  lanewise eval runs/default --source other.txt     another file, folder or glob"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a run's folder, or one checkpoint")
    parser.add_argument("--source", help="text to read instead of the run's held-out text")
    parser.add_argument("--sequences", type=int, default=0, help="at most this many sequences (default: all)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.sequences < 0:
        raise UserError(f"--sequences {arguments.sequences}: give a positive number, or 0 for all")
    from lanewise.checkpoint.locate import locate
    from lanewise.data.dataset import Dataset
    from lanewise.data.live import is_stream
    from lanewise.data.prepare import prepare
    from lanewise.elastic.world import connect
    from lanewise.evaluation import evaluate, losses
    from lanewise.generation import restore
    from lanewise.parallel.layout import Layout
    from lanewise.parallel.mesh import Mesh
    from lanewise.runfolder import tokenizer_of

    checkpoint = locate(arguments.path)
    model, settings = restore(checkpoint)
    # As many threads as in training: the number is part of what defines the bits.
    mesh = Mesh(connect(0, 1, 0, None, settings.train.threads, settings.train.deterministic), Layout())
    of_model = partial(losses, model, device=mesh.world.device)
    limit, size = arguments.sequences, settings.batch.size
    if arguments.source is None and is_stream(settings.data.source):
        raise UserError(f"{arguments.path}: nothing of a live source is held out: name some text with --source")
    if arguments.source is None:
        data = settings.data
        dataset = Dataset(prepare(data), data, settings.batch, settings.train.seed)
        batches = dataset.held_batches(size, limit)
        loss, tokens = evaluate(model, of_model, lambda i: dataset.held(i, size, limit), batches, mesh)
    else:
        # Every window of the text once: one pass of a run with one lane, in order.
        tokenizer = str(tokenizer_of(checkpoint))
        data = settings.data.model_copy(
            update={"source": arguments.source, "mix": (), "tokenizer": tokenizer, "held_out": 0.0, "shuffle": False}
        )
        batch = settings.batch.model_copy(update={"lanes": 1, "microbatches": 1})
        dataset = Dataset(prepare(data), data, batch, seed=0, epochs=1)
        batches = dataset.steps_per(1)
        batches = min(batches, -(-limit // size)) if limit else batches
        loss, tokens = evaluate(model, of_model, lambda i: dataset.slot(i + 1, 0, 0), batches, mesh)
    if tokens == 0:
        raise UserError("there is no held-out text: set data.held_out above 0, or name some with --source")
    facts = {"checkpoint": str(checkpoint), "source": data.source, "loss": loss, "tokens": tokens}
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(f"loss {loss:.4f} nats a token (perplexity {math.exp(loss):.2f}) over {tokens:,} tokens of {data.source}")
    return 0
