"""Check a layout against one process: loss, every gradient, the norm, weights after three steps, evaluation, state."""

import argparse
from typing import TYPE_CHECKING

from lanewise.errors import UserError

if TYPE_CHECKING:
    from lanewise.parallel.layout import Layout

EXAMPLE = """examples:
  lanewise prove --layout tp2                      the default model, shrunk
  lanewise prove run.toml --layout tp2 --workers 4    and that replicas on top change no bit
  lanewise prove run.toml --layout tp2 --full      the model at its own size
  lanewise prove --module models.net:build --layout fsdp2.tp2    a module of your own: what build() returns
  lanewise prove --module hf:gpt2/config.json --layout tp2       what transformers makes of a config, shrunk"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.TOML | section.key=value", help="run file and overrides")
    parser.add_argument("--layout", help="axes inside a replica (default: the run file's)")
    parser.add_argument("--workers", type=int, help="local processes (default: one replica)")
    parser.add_argument(
        "--module", metavar="PKG.MOD:FUNCTION | hf:PATH", help="a module of your own, not the run file's"
    )
    parser.add_argument("--full", action="store_true", help="do not shrink the model and batch")


def run(arguments: argparse.Namespace) -> int:
    from lanewise import config
    from lanewise.elastic import launcher
    from lanewise.parallel.layout import Layout, check
    from lanewise.parallel.shrink import provable, shrink

    if arguments.module is not None:
        return _prove_own(arguments)
    settings = config.load_words(arguments.words)
    layout = Layout.parse(settings.layout.axes if arguments.layout is None else arguments.layout)
    workers = _workers(arguments, layout)
    if not arguments.full:
        settings = shrink(settings, layout, max(1, workers // layout.size))
    elif settings.model.vocab_size == 0:
        raise UserError("--full needs the vocabulary's size: set model.vocab_size")
    check(layout, settings, workers)
    launcher.warm_up()
    from lanewise.parallel.prove import Proof

    return launcher.launch(Proof(provable(settings), layout, arguments.json), workers)


def _workers(arguments: argparse.Namespace, layout: "Layout") -> int:
    workers: int = layout.size if arguments.workers is None else arguments.workers
    if workers < 1:
        raise UserError(f"--workers {workers}: at least one worker is needed")
    return workers


def _prove_own(arguments: argparse.Namespace) -> int:
    from lanewise import config
    from lanewise.elastic import launcher
    from lanewise.parallel.layout import Layout

    if arguments.words:
        raise UserError(f"prove --module takes no run file: leave {arguments.words[0]!r} out")
    layout = Layout.parse(arguments.layout or "")
    workers = _workers(arguments, layout)
    layout.replicas(workers)
    launcher.warm_up()
    from lanewise.parallel.own.prove import OwnProof

    task = OwnProof(arguments.module, layout, arguments.full, arguments.json, config.load(None, []))
    return launcher.launch(task, workers)
