"""What each slot of a step read, and its loss, if the run file asks for them: samples.jsonl and losses.jsonl."""

from collections.abc import Callable
from pathlib import Path

from lanewise.config import Batch, Data
from lanewise.data.stages import WriteBack
from lanewise.observe.records import JsonLines, cut_after

Losses = list[list[float]]  # [lane][k], summed over a microbatch's labels


class SlotRecords:
    """Written in the background, in order.

    samples(step, lane, k): the ids that a slot reads. Lines of steps after `step` are dropped: they come again.
    """

    def __init__(
        self,
        out: Path,
        data: Data,
        batch: Batch,
        samples: Callable[[int, int, int], list[str]],
        step: int,
        complain: Callable[[str], None],
    ) -> None:
        self.lanes, self.microbatches, self.samples_of = batch.lanes, batch.microbatches, samples
        for name in ("samples.jsonl", "losses.jsonl"):
            cut_after(out / name, step)
        self.samples = JsonLines(out / "samples.jsonl", complain) if data.record_samples else None
        self.losses = JsonLines(out / "losses.jsonl", complain) if data.record_losses else None
        self.write_back = WriteBack()

    def write(self, step: int, losses: Losses | None) -> None:
        if self.samples is not None or self.losses is not None:
            self.write_back(self._write, step, losses)

    def drain(self) -> None:
        """Wait until all is written."""
        self.write_back.drain()

    def _write(self, step: int, losses: Losses | None) -> None:
        for lane in range(self.lanes):
            for k in range(self.microbatches):
                slot = {"step": step, "lane": lane, "k": k, "samples": self.samples_of(step, lane, k)}
                if self.samples is not None:
                    self.samples.write(slot)
                if self.losses is not None and losses is not None:
                    self.losses.write({**slot, "loss": losses[lane][k]})
