"""Predict a run on a described cluster: its step, its pipeline's timeline, days of failures; or a table of runs."""

import argparse
import json
from pathlib import Path
from typing import Any

EXAMPLE = """examples:
  lanewise simulate run.toml --cluster "64x8 H100"                       the run file's layout
  lanewise simulate run.toml --cluster "4x8 H100" --layout pp4.tp2 --schedule zbv --picture zbv.svg --trace zbv.json
  lanewise simulate --runs published_runs.csv --json                     a prediction for each row, then a summary
  lanewise simulate --memory published_memory.csv --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.TOML | section.key=value", help="run file and overrides")
    parser.add_argument("--cluster", help="'NODESxDEVICES NAME' or a TOML file (default: this machine, probed)")
    parser.add_argument("--workers", type=int, help="without --cluster: processes on this machine (default: its cores)")
    parser.add_argument("--layout", help="axes inside a replica (default: the run file's)")
    parser.add_argument(
        "--schedule", help="of a pipeline: gpipe, 1f1b, interleaved, looped-bfs, interleaved-zb, zbv, dualpipev"
    )
    parser.add_argument("--chunks", type=int, help="stages a rank holds (default: 1, or 2 where a schedule needs more)")
    parser.add_argument("--picture", type=Path, help="write the timeline as SVG here")
    parser.add_argument("--trace", type=Path, help="write the timeline for Chrome's tracing page or Perfetto here")
    parser.add_argument("--days", type=float, default=7.0, help="days of failures to simulate (default: 7)")
    parser.add_argument("--seed", type=int, default=0, help="of the failures (default: 0)")
    parser.add_argument("--runs", type=Path, help="a table of runs to predict the step time of")
    parser.add_argument("--memory", type=Path, help="a table of runs to predict the peak memory of")


def run(arguments: argparse.Namespace) -> int:
    if arguments.runs is not None or arguments.memory is not None:
        return _table(arguments)
    from lanewise import config
    from lanewise.planner.files import write
    from lanewise.planner.machine import place
    from lanewise.simulator.run import simulate_run

    layout = [] if arguments.layout is None else [f'layout.axes="{arguments.layout}"']
    settings = config.load_words([*arguments.words, *layout])
    where = place(arguments.cluster, arguments.workers, settings)
    found = simulate_run(settings, where, arguments.schedule, arguments.chunks, arguments.days, arguments.seed)
    if arguments.picture is not None:
        write(arguments.picture, found.svg())
    if arguments.trace is not None:
        write(arguments.trace, found.trace())
    print(json.dumps(found.numbers()) if arguments.json else found.text())
    return 0


def _table(arguments: argparse.Namespace) -> int:
    from lanewise.errors import UserError
    from lanewise.planner.published import predict

    if arguments.runs is not None and arguments.memory is not None:
        raise UserError("--runs and --memory: give one table at a time")
    what, path = ("runs", arguments.runs) if arguments.runs is not None else ("memory", arguments.memory)
    for found in predict(path, what):
        print(json.dumps(found, allow_nan=False) if arguments.json else _line(found))
    return 0


def _line(found: dict[str, Any]) -> str:
    if "summary" in found:
        s = found["summary"]
        start = f"{s['rows']} rows, {s['refused']} refused, {s['scored']} measured"
        if not s["scored"]:
            return start
        holds = "" if s["inside"] is None else f"; {s['inside']:.0%} inside the interval"
        return f"{start}: off by {s['median']:.1%} (median), {s['p90']:.1%} (p90), {s['worst']:.0%} (worst){holds}"
    if found["refused"]:
        return f"{found['id']:16} refused: {found['refused']}"
    times = f"{found['predicted_step_s']:10.4g} s  {found['low']:.4g}-{found['high']:.4g} s"
    return f"{found['id']:16}{times}  {found['predicted_mem_GB']:6.1f} GB{'  extrapolates' * found['extrapolates']}"
