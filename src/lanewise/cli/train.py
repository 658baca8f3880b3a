"""Train a model. Without a run file: a small DeepSeek-style model on Python's own library sources."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanewise import config
from lanewise.elastic import environment, launcher
from lanewise.errors import UserError
from lanewise.parallel.layout import Layout, check
from lanewise.runfolder import open_run

if TYPE_CHECKING:
    from lanewise.job import Job

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
    files = [w for w in arguments.words if "=" not in w]
    if len(files) > 1:
        raise UserError(f"more than one run file: {', '.join(files)} (overrides are written section.key=value)")
    overrides = [w for w in arguments.words if "=" in w]
    if arguments.layout is not None:
        overrides.append(f'layout.axes="{arguments.layout}"')
    settings = config.load(files[0] if files else None, overrides)
    if arguments.show_config:
        sys.stdout.write(config.dump(settings))
        return 0
    if arguments.until is not None and arguments.until < 1:
        raise UserError(f"--until {arguments.until}: steps count from 1")
    place = environment.detect()
    if place is not None:
        return _join(place, settings, arguments)

    workers = arguments.workers if arguments.workers is not None else _usable(settings)
    if workers < 1:
        raise UserError(f"--workers {workers}: at least one worker is needed")
    check(Layout.parse(settings.layout.axes), settings, workers)
    launcher.warm_up()
    say = (lambda text: print(text, file=sys.stderr)) if arguments.json else print
    return launcher.launch(_prepare(settings, arguments, say), workers)


def _prepare(settings: config.Run, arguments: argparse.Namespace, say: Any = lambda text: None) -> "Job":
    """Make the token files, complete the run file with what they tell, and open the run's folder."""
    from lanewise.data.prepare import prepare
    from lanewise.data.store import read_meta
    from lanewise.job import Job

    folder = prepare(settings.data, say)
    meta = read_meta(folder)
    settings = config.with_vocabulary(settings, meta["vocab_size"])
    out = arguments.out or Path("runs") / settings.name
    open_run(settings, out, arguments.resume, folder)
    display = "json" if arguments.json else "auto"
    return Job(settings, folder, out, arguments.resume, arguments.until, display)


def _join(place: environment.Place, settings: config.Run, arguments: argparse.Namespace) -> int:
    """Under torchrun, Slurm or MPI: the first process of each host prepares the data, then the others find it."""
    from lanewise.worker import join

    check(Layout.parse(settings.layout.axes), settings, place.world)

    def prepare_in_turn(world: Any) -> "Job":
        if place.local_rank == 0:
            job = _prepare(settings, arguments, print if place.rank == 0 else lambda text: None)
        world.barrier()
        return job if place.local_rank == 0 else _prepare(settings, arguments)

    return join(place, prepare_in_turn, settings.train.deterministic, settings.train.threads)


def _usable(settings: config.Run) -> int:
    """Workers this machine can keep busy, in whole replicas: one per GPU, or the cores by the threads of each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    replica = Layout.parse(settings.layout.axes).size
    return replica * max(1, min(settings.batch.lanes, (gpus or cores // settings.train.threads) // replica))
