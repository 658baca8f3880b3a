"""What it costs to change the layout of a run on two processes: in memory, through a checkpoint within the run, and by
stopping and resuming it. Seconds from the last commit in the old layout to the first in the new one, less a step.

    python benchmarks/switch.py
    python benchmarks/switch.py --hidden 768 --layers 8 --rounds 5
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lanewise import config, trainer, worker
from lanewise.data.prepare import prepare
from lanewise.data.store import read_meta
from lanewise.elastic import launcher
from lanewise.job import Job
from lanewise.models.build import build
from lanewise.planner.adaptive import Adviser, Switch
from lanewise.runfolder import open_run

SWITCH, STEPS = 6, 14  # the step after which the layout changes, and the last


@dataclass(frozen=True)
class SwitchingJob(Job):
    to: str = ""
    bytes: float = 0.0  # said of the new layout's state: infinitely many do not fit


def work(rank: int, size: int, given: SwitchingJob, *arguments: Any) -> None:
    """A worker whose adviser has made up its mind."""

    class Decided(Adviser):
        def step(self, seconds: float, left: int) -> None:
            self.known = seconds
            if STEPS - left == SWITCH - 1:  # told in the vote of the next step
                layout = self.run.layout.model_copy(update={"axes": given.to})
                self.choice = Switch(self.run.model_copy(update={"layout": layout}), given.bytes)

    trainer.Adviser = Decided
    worker.work(rank, size, given, *arguments)


def gap(out: Path) -> float:
    """Seconds between the commits around the switch, less a step."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    times = {row["step"]: row["time"] for row in map(json.loads, lines)}
    step = statistics.median(times[s + 1] - times[s] for s in range(SWITCH + 2, STEPS))
    return times[SWITCH + 1] - times[SWITCH] - step


def within(words: list[str], old: str, new: str, out: Path, size: float) -> float:
    run = config.load(None, [*words, f"layout.axes='{old}'"])
    data = prepare(run.data)
    run = config.with_vocabulary(run, read_meta(data)["vocab_size"])
    launcher.WORKER = "switch"
    with open_run(run, out, "auto", data):
        assert launcher.launch(SwitchingJob(run, data, out, display="none", to=new, bytes=size), 2) == 0
    return gap(out)


def stopped(words: list[str], old: str, new: str, out: Path) -> float:
    command = [sys.executable, "-c", "import sys; from lanewise.cli.main import main; sys.exit(main())", "train"]
    for layout, more in ((old, ["--until", str(SWITCH)]), (new, [])):
        given = [*words, "--workers", "2", "--layout", layout, "--out", str(out), *more]
        subprocess.run([*command, *given], check=True, stdout=subprocess.DEVNULL)
    return gap(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    source = Path(config.__file__).parent
    words = [
        *["model.preset=tiny-dense", f"model.layers={arguments.layers}", f"model.hidden={arguments.hidden}"],
        *[f"model.ffn_hidden={3 * arguments.hidden}", "batch.lanes=2", "batch.size=2", "batch.sequence_length=64"],
        *["data.tokenizer=bytes", f"data.source={source}/**/*.py"],
        *[f"train.steps={STEPS}", "checkpoint.every=0", "eval.every=0"],
    ]
    with tempfile.TemporaryDirectory() as folder:
        words.append(f"data.cache={folder}/cache")
        run = config.load(None, [*words, "model.vocab_size=257"])
        million = sum(math.prod(spec.shape) for spec in build(run.model).table()) / 1e6
        print(f"{million:.1f}M parameters, fp32, {12 * million:.0f} MB of state; median of {arguments.rounds}, seconds")
        print(f"{'from':8}{'to':8}{'in memory':>12}{'checkpoint':>12}{'stop, resume':>14}{'ratio':>8}")
        for old, new in (("pp2", ""), ("tp2", "fsdp2"), ("", "tp2")):
            rows = []
            for i in range(arguments.rounds):
                out = Path(folder) / f"{old}-{new}-{i}"
                memory = within(words, old, new, out / "memory", 0.0)
                through = within(words, old, new, out / "checkpoint", math.inf)
                rows.append((memory, through, stopped(words, old, new, out / "stopped")))
            memory, through, stop = (statistics.median(column) for column in zip(*rows, strict=True))
            names = [name or "none" for name in (old, new)]
            print(f"{names[0]:8}{names[1]:8}{memory:12.2f}{through:12.2f}{stop:14.2f}{stop / memory:7.0f}x", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
