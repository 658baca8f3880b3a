"""The program `lanewise`: one verb, one file beside this one. Nothing heavy is imported before a verb runs."""

import argparse
import importlib
import sys
from typing import NoReturn

from lanewise import __version__
from lanewise.errors import EXIT_FAILED, EXIT_USER, UserError

VERBS = {
    "train": "train a model: the main job",
    "data": "make shard sets from files, look into them, check them",
    "plan": "rank layouts for a model and a cluster; write the best into a run file",
    "prove": "check a layout against one process, parameter by parameter",
    "simulate": "predict a run in detail, draw its pipeline; predict a table of runs",
    "probe": "measure this machine for the planner",
    "eval": "loss of a checkpoint on held-out or other text",
    "generate": "continue a text with a checkpoint",
    "export": "write a checkpoint as a Hugging Face folder",
    "import": "make a run's folder from a Hugging Face folder",
    "inspect": "look into a run or checkpoint: step, layout, sizes, weights hash, health",
    "doctor": "is this machine fit; what is missing",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (`{self.prog} --help` lists what there is)")


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 done, 2 wrong input, 75 resumable, 1 anything else."""
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parse(words)
        return importlib.import_module(f"lanewise.cli.{arguments.verb}").run(arguments)
    except UserError as error:
        print(f"lanewise: {error}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print("lanewise: interrupted; nothing was started", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        return EXIT_FAILED


def _parse(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="lanewise",
        description="Train large neural networks over many devices; the same bits on any number of replicas.",
        epilog="example: lanewise train data.source=corpus/ train.steps=500",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lanewise {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in VERBS.items():
        # Only the verb that is asked for is imported: each adds its own arguments, and its `run` is the rest.
        if words[:1] == [verb]:
            module = importlib.import_module(f"lanewise.cli.{verb}")
            sub = verbs.add_parser(
                verb,
                help=text,
                description=module.__doc__,
                epilog=module.EXAMPLE,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            module.add_arguments(sub)
            sub.add_argument("--json", action="store_true", help="print for machines")
        else:
            verbs.add_parser(verb, help=text)
    arguments, rest = parser.parse_known_args(words)
    # argparse takes positional words only in one run; overrides may also stand after or between options.
    strays = [word for word in rest if word.startswith("-") or not hasattr(arguments, "words")]
    if strays:
        verbs.choices[arguments.verb].error(f"unrecognized arguments: {' '.join(strays)}")
    if rest:
        arguments.words += rest
    return arguments


if __name__ == "__main__":
    sys.exit(main())
