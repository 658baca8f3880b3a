"""Measure this machine in about a minute, for `plan` and `simulate` without --cluster."""

import argparse
import json
import sys

EXAMPLE = """examples:
  lanewise probe
  torchrun --nnodes 2 --nproc-per-node 8 ... -m lanewise.cli.main probe     the link between nodes too"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", default="~/.cache/lanewise", help="folder under which the measurements are stored")


def run(arguments: argparse.Namespace) -> int:
    from lanewise.elastic.environment import detect
    from lanewise.planner.probe import probe

    found = probe(
        arguments.cache, lambda text: print(text, file=sys.stderr if arguments.json else sys.stdout), detect()
    )
    if arguments.json and found is not None:
        print(json.dumps(found))
    return 0
