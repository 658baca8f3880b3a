"""Train a model. Without a run file: a small DeepSeek-style model on Python's own library sources."""

import argparse
from pathlib import Path

EXAMPLE = """examples:
  lanewise train                                       the default run, two to three minutes on two cores
  lanewise train run.toml train.steps=200 --out runs/a
  lanewise train data.source=corpus.jsonl --workers 4
  torchrun --nproc-per-node 4 -m lanewise.cli.main train run.toml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.TOML | section.key=value", help="run file and overrides")
    parser.add_argument("--workers", type=int, help="local processes (default: what the machine can use)")
    parser.add_argument(
        "--layout", help="axes inside a replica, as in tp2; what is left of the workers becomes replicas"
    )
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/NAME)")
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="go on with a run (default: auto)")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop after this step with a checkpoint")
    parser.add_argument("--show-config", action="store_true", help="print the resolved run file and leave")


def run(arguments: argparse.Namespace) -> int:
    from lanewise.start import train

    return train(arguments)
