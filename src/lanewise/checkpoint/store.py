"""Saves and finds the checkpoints of a run, together with the other ranks.

Saving: the pieces are copied, then a background thread writes them into a hidden folder, which gets its name only after
every rank has written and synced its file. Whatever happens before, on any rank, leaves the earlier checkpoints as they
were. Finding: the newest checkpoint of which every byte is as it was written.

A step is saved once: if its checkpoint is already there and verifies, it is left alone (it holds the same step of the
same run). If it is there and does not verify, the new one takes its place.
"""

import atexit
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from lanewise.checkpoint import manifest
from lanewise.checkpoint.dcp import LoadPieces, Reader, SavePieces, Writer
from lanewise.checkpoint.manifest import Damaged, Manifest
from lanewise.checkpoint.pieces import State, snapshot
from lanewise.errors import UserError

T = TypeVar("T")
LEAVE = 10.0  # seconds a process that ends without `wait` gives its save in flight


@dataclass(frozen=True)
class Found:
    """A checkpoint that verified."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        return self.manifest.meta


class Checkpoints:
    """The checkpoints under `root`, a folder that all ranks of `group` share.

    `keep` good ones are kept, the newest always among them. `group` is a gloo group that nothing else uses (a save in
    the background runs collectives on it; its timeout bounds how long a rank waits for a slower one), or None for a
    single process. `alarm(event, details)` is called on every rank, in the thread where the fault was noticed, with

    - "checkpoint_failed": step, path, reason: nothing was published, training may go on;
    - "checkpoint_damaged": path, file, reason: skipped by `find`;
    - "checkpoint_not_removed": path, reason: an old one that `keep` no longer covers (first rank only).

    Every method is called by all ranks alike.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        background: bool,
        group: ProcessGroup | None,
        alarm: Callable[[str, dict[str, Any]], None],
        published: Callable[[dict[str, Any]], None] = lambda about: None,
    ) -> None:
        assert keep >= 1, "the last checkpoint is always kept"
        self.root, self.keep, self.background, self.group, self.alarm = root, keep, background, group, alarm
        self.announce = published  # told the step and the path of each checkpoint that is whole, as soon as it is
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._damaged: set[Path] = set()
        self._thread: Thread | None = None
        self._published = True  # what became of the last save
        self._about: dict[str, Any] = {}  # its step and path
        self._bug: BaseException | None = None

    # ---------------------------------------------------------------------------------------------------- saving

    def save(self, step: int, state: State, meta: Mapping[str, Any]) -> None:
        """Save `state` as of now; `meta` is anything JSON holds. Returns once the pieces are copied (`background`).

        An I/O error on any rank, in this call or later, is an alarm and not an exception. Raises TypeError if `meta`
        is not JSON, AssertionError if the ranks' pieces do not make up each tensor exactly once (in the background:
        at the next `save` or `wait`).
        """
        self.wait()
        copied_meta = json.loads(json.dumps(meta))
        path = manifest.folder_of(self.root, step)
        self._published, self._about = False, {"step": step, "path": str(path)}
        if not self.background:
            self._run(path, step, state, copied_meta)
            self._raise_bug()
            return
        arguments = (path, step, snapshot(state), copied_meta)
        # A daemon, so that a peer that died in the middle cannot keep this process from leaving; but not one that is
        # still running when the interpreter goes down, for then its next step aborts the process (SIGABRT).
        self._thread = Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        atexit.register(self._thread.join, LEAVE)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save in flight: was the last save published? Call it before the process ends.

        Gives up, with an alarm, after `timeout` seconds. Without one, a peer that dies ends the wait as soon as gloo
        notices, and at the latest after the group's timeout.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                self.alarm("checkpoint_failed", {"reason": f"the save is not done after {timeout} s", **self._about})
                return False
            atexit.unregister(self._thread.join)
            self._thread = None
        self._raise_bug()
        return self._published

    def _run(self, path: Path, step: int, state: State, meta: dict[str, Any]) -> None:
        errors: dict[int, BaseException]
        try:
            self._write(path, step, state, meta)
            self._published = True
            self.announce(self._about)
            return
        except CheckpointException as failed:
            errors = {rank: error for rank, (error, _) in failed.failures.items()}
            self._bug = next((e for e in errors.values() if not isinstance(e, OSError)), None)
        except OSError as error:  # of the first rank's preparations
            errors = {0: error}
        except RuntimeError as error:  # of a collective: a peer is gone
            errors = {self.rank: error}
        except BaseException as error:
            errors, self._bug = {self.rank: error}, error
        if self.rank == 0:
            manifest.remove_hidden(self.root)
        reason = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, e in sorted(errors.items()))
        self.alarm("checkpoint_failed", {"reason": reason, **self._about})

    def _write(self, path: Path, step: int, state: State, meta: dict[str, Any]) -> None:
        def prepare() -> Path | None:
            self.root.mkdir(parents=True, exist_ok=True)
            manifest.remove_hidden(self.root)
            if path.exists() and manifest.verify(path) is None:
                return None
            temporary = manifest.hidden_name(path)
            temporary.mkdir()
            return temporary

        temporary = self._on_first_rank(prepare)
        if temporary is None:
            return
        writer = Writer(temporary, path, step, meta)
        dcp.save(
            dict(state),
            storage_writer=writer,
            planner=SavePieces(),
            process_group=self.group,
            no_dist=self.group is None,
        )
        if self.rank == 0:
            self._remove_old(path)

    def _remove_old(self, newest: Path) -> None:
        """Keep `newest`, just written, and the `keep - 1` newest others that are not known to be damaged."""
        manifest.remove_hidden(self.root)
        self._damaged.discard(newest)
        kept = 1
        for path in manifest.checkpoints_in(self.root):
            if path == newest:
                continue
            if kept < self.keep:
                kept += self._looks_good(path)
                continue
            try:
                manifest.remove(path)
            except OSError as error:
                self.alarm("checkpoint_not_removed", {"path": str(path), "reason": str(error)})

    def _looks_good(self, path: Path) -> bool:
        if path in self._damaged:
            return False
        try:
            Manifest.read(path).check(path, content=False)
        except Damaged:
            return False
        return True

    def _raise_bug(self) -> None:
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    # --------------------------------------------------------------------------------------------------- finding

    def find(self) -> Found | None:
        """The newest checkpoint that verifies, the reading shared by the ranks; None if there is no checkpoint at all.

        Raises UserError, and touches nothing, if there are checkpoints and none of them verifies.
        """
        self.wait()
        try:
            paths = self._on_first_rank(lambda: manifest.checkpoints_in(self.root))
        except OSError as error:
            raise UserError(f"{self.root}: not a readable folder ({error}); choose another with --out") from None
        damages: list[Damaged] = []
        for path in paths:
            damage = next((d for d in self._gather(self._verify_share(path)) if d is not None), None)
            if damage is None:
                return Found(path, Manifest.read(path))
            damages.append(damage)
            self._damaged.add(path)
            self.alarm("checkpoint_damaged", {"path": str(path), "file": damage.file, "reason": damage.reason})
        if damages:
            raise UserError(
                f"{self.root}: none of its {len(damages)} checkpoints can be read (the newest: {damages[0]}); "
                "restore one from a copy, or start anew in another folder with --out"
            )
        return None

    def _verify_share(self, path: Path) -> Damaged | None:
        try:
            found = Manifest.read(path)
            found.check(path, sorted(found.files)[self.rank :: self.world])
        except Damaged as damage:
            return damage
        return None

    def load(self, found: Found, state: State) -> None:
        """Fill the pieces of `state` in place, from whatever layout wrote them; nothing else is touched.

        Raises UserError that names the tensor if one is missing, has another shape or dtype, or if the checkpoint
        holds one that no rank asks for.
        """
        self.wait()
        try:
            dcp.load(
                dict(state),
                storage_reader=Reader(found.path),
                planner=LoadPieces(found.path, all_names=True),
                process_group=self.group,
                no_dist=self.group is None,
            )
        except CheckpointException as failed:
            raise next(error for error, _ in failed.failures.values()) from None

    # ---------------------------------------------------------------------------------------------- among ranks

    def _gather(self, value: T) -> list[T]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _on_first_rank(self, work: Callable[[], T]) -> T:
        """The first rank's result, on every rank; its OSError is every rank's OSError."""
        outcome: list[Any] = [None]
        if self.rank == 0:
            try:
                outcome = [work()]
            except OSError as error:
                outcome = [error]
        if self.group is not None:
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if isinstance(outcome[0], OSError):
            raise outcome[0]
        return cast(T, outcome[0])
