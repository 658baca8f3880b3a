"""The training loop. A step is a transaction: compute -> reduce -> vote -> commit.

Before the commit nothing has changed, after it everything has, on every replica.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lanewise import config
from lanewise.checkpoint.store import Checkpoints
from lanewise.data.dataset import Dataset
from lanewise.data.live import Live, is_stream
from lanewise.data.stages import Feed
from lanewise.data.tokenizer import load
from lanewise.elastic.status import Status
from lanewise.elastic.world import World
from lanewise.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from lanewise.evaluation import evaluate
from lanewise.generation import sample
from lanewise.job import Job
from lanewise.lanes.vote import Verdict
from lanewise.livedata import LiveData
from lanewise.observe.display import make_display
from lanewise.observe.records import Events, JsonLines, cut_after, plain
from lanewise.observe.slots import SlotRecords
from lanewise.origin import check_origin, checkpoint_to_resume, what_it_holds
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.stages import turns_back
from lanewise.parallel.sync import first_difference
from lanewise.planner.adaptive import Adviser
from lanewise.replica import Replica
from lanewise.schedule import learning_rate
from lanewise.stop import StopRequest
from lanewise.switching import switch


@dataclass
class Progress:
    """How far the run is: everything that is not a tensor. updates: steps that were not skipped."""

    step: int = 0
    updates: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_row: int = 0


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


class Trainer:
    def __init__(self, job: Job, world: World, status: Status, stop: StopRequest) -> None:
        self.job, self.run, self.world, self.status, self.stop = job, job.run, world, status, stop
        self.prints = world.rank == 0
        self.display = make_display(job.display if self.prints else "none", self.run.observe.every)
        settings = self.run.data, self.run.batch, self.run.train.seed, self.run.train.epochs
        self.dataset: Dataset | Live
        self.live = LiveData(job, world, stop, self.display.note) if is_stream(self.run.data.source) else None
        self.dataset = self.live.dataset if self.live else Dataset(job.data, *settings)
        self.steps = self.dataset.steps(self.run.train.steps)
        self.meshes: dict[tuple[Layout, bool], Mesh] = {}  # groups of a layout that was left wait for its return
        self.replica = self.make_replica(self.run)
        self.feed = Feed(self.dataset, self.replica.reducer.mine, self.run.data, self.run.batch)
        self.progress = Progress()
        self.saved = -1  # step of the newest checkpoint
        self.events = Events(job.out / "events.jsonl" if self.prints else None, self.display.note)
        self.adviser: Adviser | None = None
        self.checkpoints = Checkpoints(
            job.out / "checkpoints",
            keep=self.run.checkpoint.keep,
            background=self.run.checkpoint.background,
            group=world.side,
            alarm=self.events.alarm,
            published=self._published,
        )

    @property
    def mesh(self) -> Mesh:
        return self.replica.mesh

    def make_replica(self, run: config.Run, initialise: bool = True) -> Replica:
        """This rank's part of one in the run's layout."""
        key = Layout.parse(run.layout.axes), turns_back(run.layout)
        if key not in self.meshes:
            self.meshes[key] = Mesh(self.world, *key)
        return Replica(run, build_part(run, self.meshes[key]), self.meshes[key], initialise)

    def train(self) -> int:
        """Run to the end, to `until`, or to a stop request; returns the exit code."""
        self._resume()
        self._open_records()
        members = self.world.members(self.mesh.replica)
        for member in members:
            self.events.write("joined", **member)
        here = self.world.device.type == "cpu" and len({member["host"] for member in members}) == 1
        if self.prints and here and self.world.size > 1:  # the planner knows the cores of this machine, and no others
            self.adviser = Adviser(self.run, self.world.size, self.events.write, self.display.note)
        for note in self.dataset.notes:
            self.display.note(note)
        self.display.start(self.progress.step, self.steps)
        try:
            code = self._loop(min(self.steps, self.job.until or self.steps))
        finally:
            self.display.stop()
            self.feed.close()
            if self.live is not None:
                self.live.close()
        if code == EXIT_DONE and self.progress.step == self.steps:
            self._farewell()
        return code

    def _loop(self, last: int) -> int:
        code, self.last = EXIT_DONE, last
        if self.progress.step == 0:
            self._evaluate()
        while self.progress.step < last:
            if self.live is not None and not self.live.ready(self.progress.step + 1):
                code = EXIT_RESUMABLE
                break
            verdict = self._step(self.progress.step + 1)
            step = self.progress.step
            if self.progress.skipped_in_row >= self.run.train.max_skips:
                code = self._give_up(verdict)
                break
            if step == last or _due(self.run.eval.every, step):
                self._evaluate()
            if verdict.stop and step < last:
                code = EXIT_RESUMABLE
                break
            if _due(self.run.checkpoint.every, step):
                self.save()
            if verdict.switch and step < last:
                switch(self)
        self.save()
        if not self.checkpoints.wait() and code == EXIT_DONE:
            code = EXIT_FAILED
        return code

    # ---------------------------------------------------------------------------------------------------- a step

    def _step(self, step: int) -> Verdict:
        started = time.perf_counter()
        self.status.begin_step(step)
        self.events.step = step
        ballot = self.replica.compute(step, self.feed.slot, self.status.enter)
        self.status.enter("exchange")
        switches = self.adviser is not None and self.adviser.choice is not None
        verdict, chunks = self.replica.voter.vote(ballot, self.replica.reducer.finish(), self.stop.asked, switches)
        self.status.enter("commit")
        lr = self._learning_rate()
        if verdict.finite and verdict.tokens:
            self._commit(verdict, chunks, lr)
        else:
            self._skip(verdict)
        self.progress.step = step
        self._check_sync()
        self.progress.tokens += verdict.tokens
        self._record(verdict, lr, time.perf_counter() - started)
        return verdict

    def _learning_rate(self) -> float:
        return learning_rate(self.run.schedule, self.run.optimizer.lr, self.progress.updates, self.steps)

    def _commit(self, verdict: Verdict, chunks: list[Tensor], lr: float) -> None:
        self.replica.commit(verdict, chunks, lr, self.progress.updates)
        self.progress.updates += 1
        self.progress.skipped_in_row = 0

    def _skip(self, verdict: Verdict) -> None:
        """Every replica sees the same verdict, so all of them skip."""
        self.progress.skipped += 1
        self.progress.skipped_in_row += 1
        reason = "no valid token" if not verdict.tokens else f"loss {verdict.loss}, norm {verdict.gradient_norm}"
        self.events.alarm("step_skipped", {"reason": reason, "in_row": self.progress.skipped_in_row})

    def _check_sync(self) -> None:
        """A debug check. Copies are equal by construction, so a difference is a fault of ours, or of the machine."""
        if _due(self.run.train.check_sync, self.progress.step) and (difference := first_difference(self.replica)):
            raise RuntimeError(f"copies of a tensor are not equal after step {self.progress.step}: {difference}")

    def _give_up(self, verdict: Verdict) -> int:
        reason = f"{self.progress.skipped_in_row} steps in a row were not finite (loss {verdict.loss})"
        self.events.alarm("stopped", {"reason": reason, "remedy": "lower optimizer.lr or try train.precision=fp32"})
        return EXIT_FAILED

    # ---------------------------------------------------------------------------------------- what the run writes

    def _open_records(self) -> None:
        """Steps after the one resumed from are written again; their old lines go."""
        if not self.prints:
            return
        out, step, complain = self.job.out, self.progress.step, self.events.cannot_write
        cut_after(out / "metrics.jsonl", step)
        self.metrics = JsonLines(out / "metrics.jsonl", complain)
        self.slots = SlotRecords(out, self.run.data, self.run.batch, self.dataset.samples, step, complain)

    def _record(self, verdict: Verdict, lr: float, seconds: float) -> None:
        seconds_by_phase = {f"{phase}_s": round(spent, 6) for phase, spent in self.status.lap().items()}
        stages = self.feed.lap()
        seconds_by_phase |= {f"data_{stage}_s": round(spent, 6) for stage, spent in stages.items()}
        losses = self.replica.losses_by_slot() if self.run.data.record_losses else None
        if not self.prints:
            return
        record = plain(
            {
                "step": self.progress.step,
                "loss": verdict.loss,
                "grad_norm": verdict.gradient_norm,
                "lr": lr,
                "tokens": verdict.tokens,
                "time": time.time(),
                "tokens_per_s": verdict.tokens / seconds,
                "skipped": int(self.progress.skipped_in_row > 0),
                "tokens_total": self.progress.tokens,
                "skipped_total": self.progress.skipped,
                **seconds_by_phase,
                "data_wait_share": round(stages["wait"] / seconds, 6),
                **({"padding": self.dataset.padding} if self.dataset.padding is not None else {}),
            }
        )
        self.metrics.write(record)
        self.display.step(record)
        self.slots.write(self.progress.step, losses)
        if self.adviser is not None:
            self.adviser.step(seconds - stages["wait"], self.last - self.progress.step)

    def _evaluate(self) -> None:
        size, limit = self.run.batch.size, self.run.eval.sequences
        batches = self.dataset.held_batches(size, limit)
        if self.run.eval.every == 0 or batches == 0:
            return
        self.status.enter("evaluate")
        loss, tokens = evaluate(
            self.replica.model, self.replica.losses, lambda i: self.dataset.held(i, size, limit), batches, self.mesh
        )
        self.events.write("evaluated", loss=loss, tokens=tokens)
        self.display.note(f"step {self.progress.step}  held-out loss {loss:.4f}")

    def _farewell(self) -> None:
        """What came out, and what to do with it."""
        if not self.prints:
            return
        out = self.job.out
        prompt = "..."
        if self.mesh.layout.size == 1:  # else no rank has a whole model at hand; `generate` has
            length = self.run.batch.sequence_length
            prompt, text = sample(self.replica.model, self.dataset, load(self.job.data), length)
            rule = "-" * 24
            self.display.note(f"{rule} a sample (prompt: {prompt!r}) {rule}\n{prompt}{text}\n{rule * 2}")
        self.display.note(f"look into the run:   lanewise inspect {out}")
        self.display.note(f"continue a text:     lanewise generate {out} --prompt 'how it begins'")
        self.display.note("train on your own:   lanewise train data.source=FOLDER_OR_FILE --out runs/mine")

    # --------------------------------------------------------------------------------------------- stop and resume

    def save(self) -> None:
        """Checkpoint this step, unless the last one is of this step already."""
        if self.saved == self.progress.step:
            return
        self.status.enter("checkpoint")
        if self.prints:
            self.slots.drain()  # a checkpoint's steps have all their lines
        meta = {
            "progress": asdict(self.progress),
            "run": config.dump(self.run),
            "data": self.dataset.identity,
            "mixture": self.dataset.segments(),
            "layout": {"replicas": self.mesh.replicas, "axes": str(self.mesh.layout), "zero": self.run.layout.zero},
        }
        self.checkpoints.save(self.progress.step, self.replica.state(share=True), meta)
        self.saved = self.progress.step

    def _published(self, about: dict[str, Any]) -> None:
        self.events.write("checkpoint", **about)
        if self.live is not None:
            self.live.published(about["step"])

    def _resume(self) -> None:
        """Go on from the newest good checkpoint of this run, or from the one that was named."""
        found = checkpoint_to_resume(self.job, self.checkpoints)
        if found is None:
            return
        check_origin(found.meta, self.run, self.dataset.identity)
        self.checkpoints.load(found, what_it_holds(found.meta, self.replica.state(share=False)))
        self.replica.loaded()
        self.progress = Progress(**found.meta["progress"])
        self.saved = self.progress.step if found.path.parent == self.checkpoints.root else -1
        changed = self.dataset.go_on(found.meta.get("mixture", []), self.progress.step)
        if changed and isinstance(self.dataset, Dataset):
            self.steps = self.dataset.steps(self.run.train.steps)
            self.display.note(
                f"from step {self.progress.step + 1} on the mixture is {self.dataset.mixture.segments[-1].weights}"
            )
        self.events.step = self.progress.step
        self.display.note(f"resuming after step {self.progress.step} from {found.path}")
