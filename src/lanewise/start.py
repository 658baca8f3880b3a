"""From the words of `lanewise train` to running workers: settings, layout, data, the run's folder, the launch."""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lanewise import config
from lanewise.elastic import environment, launcher
from lanewise.errors import EXIT_DONE, EXIT_RESUMABLE, EXIT_USER, UserError
from lanewise.parallel.layout import Layout, check
from lanewise.runfolder import open_run

if TYPE_CHECKING:
    from lanewise.elastic.world import World
    from lanewise.job import Job


def train(arguments: argparse.Namespace) -> int:
    """What `lanewise train` does; returns its exit code. Raises UserError."""
    place = environment.detect()
    try:
        return _run(arguments, place)
    except UserError:
        if place is not None and place.rank > 0:
            return EXIT_USER  # rank 0 was given the same words, and says what is wrong with them
        raise


def _run(arguments: argparse.Namespace, place: environment.Place | None) -> int:
    layout = [] if arguments.layout is None else [f"layout.axes={json.dumps(arguments.layout)}"]
    settings = config.load_words([*arguments.words, *layout])
    if arguments.show_config:
        sys.stdout.write(config.dump(settings))
        return 0
    if arguments.until is not None and arguments.until < 1:
        raise UserError(f"--until {arguments.until}: steps count from 1")
    if place is not None:
        return _join(place, settings, arguments)

    workers = arguments.workers if arguments.workers is not None else _usable(settings)
    if workers < 1:
        raise UserError(f"--workers {workers}: at least one worker is needed")
    planned = settings.layout.axes == "auto"
    if not planned:
        check(Layout.parse(settings.layout.axes), settings, workers)
    launcher.warm_up()
    job = _prepare(settings, arguments)
    if planned:  # now that the vocabulary is known
        job = replace(job, run=_planned(job.run, workers, arguments))
    with open_run(job.run, job.out, job.resume, job.data):
        code = launcher.launch(job, workers)
    if code in (EXIT_DONE, EXIT_RESUMABLE):
        _learn(job, workers, planned, arguments)
    return code


def _planned(settings: config.Run, workers: int, arguments: argparse.Namespace) -> config.Run:
    from lanewise.planner.auto import settle

    out = arguments.out or Path("runs") / settings.name
    file = out / "run.toml"
    before = config.load(file) if arguments.resume == "auto" and file.exists() else None
    settings, why = settle(settings, workers, before)
    print("\n".join(why), file=sys.stderr if arguments.json else sys.stdout)
    return settings


def _learn(job: "Job", workers: int, planned: bool, arguments: argparse.Namespace) -> None:
    """Where a machine has been probed, or the layout planned: say how far the prediction was off. What was measured
    beside a probe is kept, and plans learn from it."""
    from lanewise.planner.learning import record
    from lanewise.planner.machine import is_probed

    if not planned and not is_probed(job.run.data.cache):
        return

    row = record(config.load(job.out / "run.toml"), workers, job.out)  # the layout may have changed
    if row is not None:
        off = row["predicted_s"] / row["measured_s"] - 1
        text = f"a step took {row['measured_s']:.3g} s; the planner said {row['predicted_s']:.3g} s ({off:+.0%})"
        print(text, file=sys.stderr if arguments.json else sys.stdout)


def _prepare(settings: config.Run, arguments: argparse.Namespace, quiet: bool = False) -> "Job":
    """Make the token files, or find them in the cache, and complete the run file with what they tell."""
    from lanewise.data.prepare import prepare
    from lanewise.data.store import read_meta
    from lanewise.job import Job

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr if arguments.json else sys.stdout)

    folder = prepare(settings.data, say)
    settings = config.with_vocabulary(settings, read_meta(folder)["vocab_size"])
    out = arguments.out or Path("runs") / settings.name
    display = "json" if arguments.json else "auto"
    return Job(settings, folder, out, arguments.resume, arguments.until, display)


def _join(place: environment.Place, settings: config.Run, arguments: argparse.Namespace) -> int:
    """Under torchrun, Slurm or MPI: the first process of each host prepares the data, then the others find it."""
    from lanewise.worker import join

    if arguments.workers not in (None, place.world):
        raise UserError(f"--workers {arguments.workers}: {place.launcher} started {place.world}; leave --workers out")
    if settings.layout.axes == "auto":
        raise UserError("layout.axes=auto is for workers that are started here: write the layout with `lanewise plan`")
    check(Layout.parse(settings.layout.axes), settings, place.world)

    locks = []  # held until the process ends

    def prepare_in_turn(world: "World") -> "Job":
        job, mistake = None, None
        if place.local_rank == 0:
            try:
                job = _prepare(settings, arguments, quiet=place.rank > 0)
                if place.rank == 0:
                    locks.append(open_run(job.run, job.out, job.resume, job.data))
            except UserError as error:
                mistake = str(error)
        mistakes = [m for m in world.gather(mistake) if m is not None]
        if mistakes:
            raise UserError(mistakes[0])
        return job or _prepare(settings, arguments, quiet=True)

    join(place, prepare_in_turn, settings.train.threads, settings.train.deterministic)


def _usable(settings: config.Run) -> int:
    """Workers this machine can keep busy, in whole replicas: one per GPU, or the cores by the threads of each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if visible is not None:
        gpus = min(gpus, len([word for word in visible.split(",") if word.strip() not in ("", "-1")]))
    replica = 1 if settings.layout.axes == "auto" else Layout.parse(settings.layout.axes).size
    return replica * max(1, min(settings.batch.lanes, (gpus or cores // settings.train.threads) // replica))
