"""Rank the layouts of a run on a cluster: step time, memory, cost; say why; write the choice into a run file."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lanewise.planner.search import Plan, Space

EXAMPLE = """examples:
  lanewise plan run.toml --cluster "64x8 H100"
  lanewise plan run.toml --cluster cluster.toml --out planned.toml
  lanewise plan model.preset=llama3-8b batch.lanes=512 train.precision=bf16 --cluster "8x8 A100" --rank tp4
  lanewise plan --module hf:gpt2/config.json batch.sequence_length=1024 --cluster "1x8 A100"     a module of your own
  lanewise plan                                        this machine, as `lanewise probe` measured it"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.TOML | section.key=value", help="run file and overrides")
    parser.add_argument(
        "--module", metavar="PKG.MOD:FUNCTION | hf:PATH", help="a module of your own, not the run file's model"
    )
    parser.add_argument(
        "--declare",
        metavar="PATH=FLOPS,BYTES",
        action="append",
        default=[],
        help="with --module: what a part of it that cannot be traced costs a sequence, and keeps for its backward",
    )
    parser.add_argument("--cluster", help="'NODESxDEVICES NAME' or a TOML file (default: this machine, probed)")
    parser.add_argument("--workers", type=int, help="without --cluster: processes on this machine (default: its cores)")
    parser.add_argument("--top", type=int, default=10, help="how many to show (default: 10)")
    parser.add_argument("--rank", metavar="LAYOUT", action="append", default=[], help="also say where this one stands")
    parser.add_argument("--out", type=Path, help="write the run file with the best layout here")


def run(arguments: argparse.Namespace) -> int:
    from lanewise import config
    from lanewise.errors import UserError
    from lanewise.parallel.layout import Layout
    from lanewise.planner import explain, report, search
    from lanewise.planner.files import write
    from lanewise.planner.machine import place
    from lanewise.planner.replay import judged

    if arguments.out is not None and arguments.out.exists():
        raise UserError(f"{arguments.out} exists: name a new file with --out, or remove it")
    settings = config.load_words(arguments.words)
    vocab = settings.model.vocab_size or settings.data.vocab_size
    where = place(arguments.cluster, arguments.workers, settings)
    if arguments.module is None:
        space = search.explore(settings, where, vocab)
    else:
        from lanewise.planner.foreign import describe_module

        if arguments.out is not None:
            raise UserError("--out writes a run file, and a run file has no module of your own: leave it out")
        declared = dict(map(_declared, arguments.declare))
        model = describe_module(arguments.module, settings.batch.sequence_length, declared)
        space = search.explore_foreign(settings, where, model)
    plans = judged(space, search.rank(space))
    if not plans:
        raise UserError(explain.nothing_fits(space))
    first = plans[0]
    why = [explain.against(first, rival) for rival in plans[1:3]] + explain.obvious(space, first)
    why += explain.lanes(space, first)
    why += [_stands(search.best_of(space, Layout.parse(text)), text, space, plans) for text in arguments.rank]
    if arguments.out is not None:
        write(arguments.out, config.dump(report.chosen(settings, first)))
    if arguments.json:
        shown = [report.numbers(space, plan) for plan in plans[: arguments.top]]
        print(
            json.dumps(
                {"cluster": str(space.cluster), "candidates": space.size, "fit": len(plans), "plans": shown, "why": why}
            )
        )
        return 0
    print(f"{space.cluster}: {space.size} candidates, {int(space.fits.sum())} fit, in {len(plans)} layouts\n")
    print(report.table(space, plans[: arguments.top]))
    print(f"\n{report.waterfall(first)}\n")
    print("\n".join(why))
    if first.extrapolates:
        print(
            "nothing like this was among the runs the correction was learned from: it is left out, the interval is wide"
        )
    if arguments.out is not None:
        print(f"written to {arguments.out}")
    return 0


def _declared(text: str) -> tuple[str, tuple[int, int]]:
    from lanewise.errors import UserError

    try:
        path, numbers = text.split("=")
        flops, saved = map(float, numbers.split(","))
    except ValueError:
        raise UserError(f"--declare {text!r}: write PATH=FLOPS,BYTES, as in encoder.scan=2e9,1e6") from None
    return path, (int(flops), int(saved))


def _stands(plan: "Plan | None", text: str, space: "Space", plans: "list[Plan]") -> str:
    from lanewise.planner import explain
    from lanewise.planner.replay import with_replay

    if plan is None:
        return f"{text}: the batch, the model or the devices do not divide so"
    missing = explain.missing_bytes(space, plan)
    if missing > 0:
        return f"{text}: does not fit by {missing / 1e9:.3g} GB a rank ({explain.largest(plan)})"
    plan = with_replay(space, plan)
    place = 1 + sum(other.step < plan.step for other in plans if other.layout != plan.layout)
    return f"{text}: number {place} of {len(plans)}; {explain.against(plans[0], plan)}"
