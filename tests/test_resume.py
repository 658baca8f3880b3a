"""A run that was stopped, in whatever way, and goes on in whatever layout, is the run that never stopped (rows C)."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from faulty_worker import at, killed, launcher_terminated, launcher_terminated_twice, terminated
from lanewise import config
from lanewise.checkpoint.pieces import Entry
from lanewise.checkpoint.store import Checkpoints
from lanewise.errors import UserError
from lanewise.models.build import build
from lanewise.parallel.mesh import Mesh
from lanewise.replica import Replica
from system import (
    BASE,
    DEEPSEEK,
    DENSE,
    bits,
    hashes,
    records,
    sentences,
    settings,
    train,
    train_with,
    write_documents,
)

EPOCHS = ["data.pack=document", "data.record_samples=true", "model.dropout=0.1", "train.epochs=2", "eval.every=3"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[..., config.Run], dict[str, Any]]:
    """(how to make its settings, its bits): two epochs of a DeepSeek model with dropout, the last step part padding."""
    folder = tmp_path_factory.mktemp("run")
    source = write_documents(folder / "text.jsonl", sentences(10))

    def make(*overrides: str) -> config.Run:
        return settings(folder, source, *DEEPSEEK, *EPOCHS, *overrides)

    assert train(make(), folder / "out") == 0
    whole = bits(folder / "out")
    first_epoch = [slot for slot in whole["samples"] for sample in slot["samples"] if sample.startswith("e0:")]
    assert (whole["step"], first_epoch[-1]["step"]) == (6, 3), "the epochs meet within the run"
    assert whole["samples"][-1]["samples"] == []
    return make, whole


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([(1, 1, 1), (None, 1, 1)], id="C1-after-1"),
        pytest.param([(5, 1, 1), (None, 1, 1)], id="C1-before-the-last"),
        pytest.param([(2, 1, 1), (4, 1, 1), (None, 1, 1)], id="C1-twice-across-an-epoch-end"),
        pytest.param([(2, 3, 2), (4, 1, 0), (None, 2, 1)], id="C2-other-layouts"),
        pytest.param([(3, 8, 1), (None, 3, 0)], id="C2-down"),
        pytest.param([(3, 2, 0), (None, 5, 2)], id="C2-up"),
    ],
)
def test_C1_C2_C3_stop_and_go_on(tmp_path: Path, uninterrupted: Any, legs: list[tuple[int | None, int, int]]) -> None:
    """Legs: (until, workers, ZeRO stage). C3: dropout masks come out the same, with no random state stored."""
    make, whole = uninterrupted
    for until, workers, zero in legs:
        assert train(make(f"layout.zero={zero}"), tmp_path / "out", workers, until=until) == 0
        assert records(tmp_path / "out")[-1]["step"] == (until or whole["step"])
    assert bits(tmp_path / "out") == whole
    assert train(make(), tmp_path / "out") == 0, "a finished run has nothing to do"
    assert bits(tmp_path / "out") == whole


def test_sigterm_to_one_worker_stops_all_after_the_step(tmp_path: Path, uninterrupted: Any) -> None:
    make, whole = uninterrupted
    assert train_with(at(1, 3, "forward", terminated), make(), tmp_path / "out", 3) == 75
    assert [line["step"] for line in records(tmp_path / "out")] == [1, 2, 3]
    assert train(make(), tmp_path / "out", 2) == 0
    assert bits(tmp_path / "out") == whole


def test_sigterm_to_the_launcher_stops_after_the_step(
    tmp_path: Path, uninterrupted: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    make, whole = uninterrupted
    assert train_with(at(1, 2, "backward", launcher_terminated), make(), tmp_path / "out", 2) == 75
    assert "stopping after this step" in capfd.readouterr().err
    assert len(records(tmp_path / "out")) in (2, 3), "of this step or of the next, as the signal travels"
    assert train(make(), tmp_path / "out", 1) == 0
    assert bits(tmp_path / "out") == whole


def test_a_second_signal_leaves_at_once(tmp_path: Path, uninterrupted: Any, capfd: pytest.CaptureFixture[str]) -> None:
    make, whole = uninterrupted
    started = time.monotonic()
    fault = at(1, 3, "forward", launcher_terminated_twice)
    assert train_with(fault, make("checkpoint.every=2"), tmp_path / "out", 2) == 1
    assert time.monotonic() - started < 30, "the step that was running takes a minute"
    assert "stopped at once" in capfd.readouterr().err
    assert train(make(), tmp_path / "out", 2) == 0
    assert bits(tmp_path / "out") == whole


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(
    tmp_path: Path, uninterrupted: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    make, whole = uninterrupted
    assert train_with(at(1, 4, "backward", killed), make("checkpoint.every=2"), tmp_path / "out", 2) == 1
    assert "rank 1 was killed by SIGKILL at step 4 in backward" in capfd.readouterr().err
    with open(tmp_path / "out" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # as a crash in the middle of a line leaves it
    assert train(make(), tmp_path / "out", 3) == 0
    assert bits(tmp_path / "out") == whole


def test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(tmp_path: Path, uninterrupted: Any) -> None:
    make, whole = uninterrupted
    assert train(make("checkpoint.every=2"), tmp_path / "out", 2, until=4) == 0
    victim = next((tmp_path / "out" / "checkpoints" / "step-00000004").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert train(make(), tmp_path / "out", 1) == 0
    assert bits(tmp_path / "out") == whole
    assert "checkpoint_damaged" in [e["event"] for e in records(tmp_path / "out", "events") if e.get("alarm")]


def test_a_named_checkpoint_starts_a_new_folder(tmp_path: Path, uninterrupted: Any) -> None:
    """The command may be given again after a stop: then the new folder's own checkpoints count."""
    make, whole = uninterrupted
    assert train(make(), tmp_path / "old", 2, until=2) == 0
    named = {"resume": str(tmp_path / "old" / "checkpoints" / "step-00000002")}
    assert train(make(), tmp_path / "new", 3, until=4, **named) == 0
    shutil.rmtree(tmp_path / "old")
    assert train(make(), tmp_path / "new", 1, **named) == 0
    steps = records(tmp_path / "new")
    assert [line["step"] for line in steps] == [3, 4, 5, 6]
    assert [line["loss"] for line in steps] == [line["loss"] for line in whole["metrics"][2:]]
    assert hashes(tmp_path / "new").items() <= whole.items()


def test_a_changed_run_file_is_refused_and_names_the_key(
    tmp_path: Path, uninterrupted: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    make, _ = uninterrupted
    assert train(make(), tmp_path / "out", until=1) == 0
    before = (tmp_path / "out" / "run.toml").read_text()
    with pytest.raises(UserError, match=r"optimizer\.lr was 0\.01, now 0\.02.*--out"):
        train(make("optimizer.lr=0.02"), tmp_path / "out")
    assert (tmp_path / "out" / "run.toml").read_text() == before
    with pytest.raises(UserError, match="already holds a run"):
        train(make(), tmp_path / "out", resume="never")
    # Into another folder the check is the workers': all of them refuse, the launcher says it once.
    assert train(make("optimizer.lr=0.02"), tmp_path / "new", 2, resume=str(tmp_path / "out")) == 2
    errors = capfd.readouterr().err
    assert errors.count("optimizer.lr was 0.01, now 0.02") == 1
    assert "Traceback" not in errors


def test_changed_data_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_documents(tmp_path / "text.jsonl", sentences(16))
    assert train(settings(tmp_path, source, *DENSE), tmp_path / "out", until=1) == 0
    write_documents(source, [*sentences(16), "one more"])
    assert train(settings(tmp_path, source, *DENSE), tmp_path / "out", 2) == 2
    errors = capfd.readouterr().err
    assert errors.count("data has changed") == 1
    assert "Traceback" not in errors


# ------------------------------------------------------------------------------------ what a checkpoint gives back


def frozen_replica(zero: int = 1) -> Replica:
    overrides = [*BASE, *DEEPSEEK, "model.vocab_size=257", "train.precision=bf16", f"layout.zero={zero}"]
    run = config.load(None, overrides)
    model = build(run.model)
    model.get_parameter("layers.0.ffn.up.weight").requires_grad_(False)
    return Replica(run, model, Mesh.alone(torch.device("cpu")))


def updated(replica: Replica) -> Replica:
    """Five updates with a gradient that is zero for the final norm: a parameter that is never really updated."""
    for update in range(5):
        chunks = []
        for bucket in (bucket for bucket in replica.buckets if bucket.trainable):
            chunk = torch.sin(torch.arange(bucket.size) * (update + 1.0))
            for place in bucket.places:
                if place.spec.name == "norm.weight":
                    chunk[place.start : place.stop] = 0
            chunks.append(chunk)
        replica.optimizer.step(chunks, 1.0, 0.01, update)
    return replica


def whole(entry: Entry) -> torch.Tensor:
    return torch.cat([piece.tensor.flatten() for piece in entry.pieces])


def test_C11_C12_frozen_and_idle_parameters_are_kept_and_loading_moves_nothing(tmp_path: Path) -> None:
    source = updated(frozen_replica())
    expected = {name: whole(entry).clone() for name, entry in source.state(share=True).items()}
    start = {name: whole(entry).clone() for name, entry in frozen_replica().state(share=True).items()}
    same = [n for n, t in expected.items() if n.startswith("model/") and torch.equal(t, start[n])]
    assert set(same) == {"model/layers.0.ffn.up.weight", "model/norm.weight"}, "the frozen one and the idle one"

    def checkpoints() -> Checkpoints:
        return Checkpoints(tmp_path, keep=1, background=False, group=None, alarm=lambda *a: pytest.fail(str(a)))

    checkpoints().save(5, source.state(share=True), {})
    target = frozen_replica(zero=0)
    found = checkpoints().find()
    checkpoints().load(found, target.state(share=False))
    target.loaded()
    for name, entry in target.state(share=True).items():
        assert torch.equal(whole(entry), expected[name]), name
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, source.model.get_parameter(name)), "the computing weights, too"
    assert torch.equal(
        whole(updated(source).state(share=True)["model/head.weight"]),
        whole(updated(target).state(share=True)["model/head.weight"]),
    ), "and the next updates are the same"
