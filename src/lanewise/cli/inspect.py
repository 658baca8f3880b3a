"""Look into a run or checkpoint: step, the layout it was written under, sizes, weights hash, health."""

import argparse
import json
from math import prod
from pathlib import Path

EXAMPLE = """examples:
  lanewise inspect runs/default
  lanewise inspect runs/default/checkpoints/step-00000050 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a run's folder, or one checkpoint")


def run(arguments: argparse.Namespace) -> int:
    from lanewise.checkpoint.locate import health, locate
    from lanewise.checkpoint.stored import Stored
    from lanewise.checkpoint.weights_hash import weights_hash

    checkpoint = locate(arguments.path)
    stored = Stored(checkpoint)
    meta = stored.manifest.meta
    axes = meta["layout"].get("axes", "")
    sizes = {name: prod(shape) for name, (shape, _) in stored.forms.items()}
    parameters = sum(size for name, size in sizes.items() if name.startswith("model/"))
    moving = sum(size for name, size in sizes.items() if name.startswith("exp_avg/"))
    facts = {
        "checkpoint": str(checkpoint),
        "step": stored.manifest.step,
        "updates": meta["progress"]["updates"],
        "tokens": meta["progress"]["tokens"],
        "skipped": meta["progress"]["skipped"],
        "layout": f"{meta['layout']['replicas']} replicas{axes and f' of {axes}'}, ZeRO {meta['layout']['zero']}",
        "parameters": parameters,
        "frozen": parameters - moving if moving else 0,  # they have no moments; nor has anything imported
        "bytes": stored.nbytes,
        "health": health(arguments.path),
        "weights": weights_hash(stored.tensors("model/")),
    }
    if arguments.json:
        print(json.dumps(facts))
    else:
        for key, value in facts.items():
            print(f"{key}: {value:,}" if isinstance(value, int) and key != "step" else f"{key}: {value}")
    return 0
