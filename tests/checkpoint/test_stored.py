import pickle

import pytest
import torch

from lanewise.checkpoint import manifest
from lanewise.checkpoint.pieces import Entry
from lanewise.checkpoint.store import Checkpoints
from lanewise.checkpoint.stored import Stored
from lanewise.errors import UserError


@pytest.fixture
def path(tmp_path):
    saver = Checkpoints(tmp_path, keep=1, background=False, group=None, alarm=lambda *_: None)
    b = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    saver.save(20, {"x/b": Entry.whole(b), "x/a": Entry.whole(torch.tensor(2)), "y": Entry.whole(b)}, {"lanes": 8})
    return tmp_path / "step-00000020"


def test_what_inspect_shows(path):
    stored = Stored(path)
    assert stored.forms == {
        "x/a": ((), torch.int64),
        "x/b": ((2, 3), torch.bfloat16),
        "y": ((2, 3), torch.bfloat16),
    }
    assert stored.manifest.step == 20
    assert stored.manifest.meta == {"lanes": 8}
    assert stored.nbytes == sum(f.stat().st_size for f in path.iterdir() if f.name != "manifest.json")
    assert [(name, t.tolist()) for name, t in stored.tensors("x/")] == [("a", 2), ("b", [[0, 1, 2], [3, 4, 5]])]
    assert manifest.verify(path) is None


def test_not_a_checkpoint(path):
    with pytest.raises(UserError, match="step-"):
        Stored(path.parent)
    with pytest.raises(UserError, match="no tensor 'z'"):
        Stored(path).tensor("z")


class Shell:
    def __reduce__(self):
        import os

        return os.system, ("touch run-by-pickle",)


def test_a_description_cannot_run_code(path, monkeypatch):
    monkeypatch.chdir(path)
    (path / ".metadata").write_bytes(pickle.dumps(Shell()))
    with pytest.raises(UserError, match="system"):
        Stored(path)
    assert not (path / "run-by-pickle").exists()


def test_a_later_format_says_so(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"version": 1', '"version": 2'))
    assert "newer Lanewise" in manifest.verify(path).reason
