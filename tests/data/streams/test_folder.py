import json
import os
import time

import pytest

from lanewise.data.stores import open_store
from lanewise.data.streams import Sealed, open_stream
from lanewise.errors import UserError


@pytest.fixture
def inbox(tmp_path):
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"


@pytest.fixture
def opened(tmp_path, inbox):
    def make(**options):
        return open_stream(inbox, tmp_path / "sealed", **{"rows": 2, "settle": 0.1, **options})

    return make


def texts(stream) -> list[str]:
    sealed = Sealed(stream.sealed.store)  # as another process sees it
    return [text for i in range(len(sealed.segments)) for text in sealed.table(i)["text"].to_pylist()]


def settled(stream) -> int:
    """What is new once all files have stood still."""
    first = stream.poll()
    time.sleep(0.11)
    return first + stream.poll()


def test_new_files_are_sealed_in_the_order_of_names(inbox, opened):
    stream = opened()
    assert stream.poll() == 0
    (inbox / "b.txt").write_text("bee")
    (inbox / "a.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(5)))
    assert settled(stream) == 4, "two, two and one row, and a file of one"
    (inbox / "a0.txt").write_text("late")
    (inbox / "empty.txt").touch()
    settled(stream)
    assert texts(stream) == [*(f"line {i}" for i in range(5)), "bee", "late", ""]
    assert [(s.part, s.start, s.stop) for s in stream.segments[:4]] == [
        ("a.jsonl", 0, 2),
        ("a.jsonl", 2, 4),
        ("a.jsonl", 4, 5),
        ("b.txt", 0, 1),
    ]
    places = [stream.sealed.locate(row) for row in range(stream.sealed.rows)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (5, 0)]


def test_a_file_being_written_waits(inbox, opened):
    stream = opened()
    (inbox / ".hidden.txt").write_text("hidden")
    with open(inbox / "slow.txt", "w") as file:
        for i in range(3):
            file.write(f"part {i} ")
            file.flush()
            assert stream.poll() == 0
            time.sleep(0.06)
    (inbox / ".hidden.txt").rename(inbox / "renamed.txt")
    settled(stream)
    assert texts(stream) == ["hidden", "part 0 part 1 part 2 "]


def test_a_new_process_goes_on_where_the_last_one_ended(inbox, opened):
    (inbox / "a.txt").write_text("one")
    first = opened()
    settled(first)
    first.commit(1)
    (inbox / "b.txt").write_text("two")
    second = opened()
    assert settled(second) == 1
    assert texts(second) == ["one", "two"]
    assert (second.sealed.state.committed, len(second.segments)) == (1, 2)


def test_what_was_written_but_not_listed_is_written_again(inbox, opened, tmp_path):
    (inbox / "a.txt").write_text("one")
    (tmp_path / "sealed").mkdir()
    (tmp_path / "sealed/segment-00000000.arrow").write_bytes(b"of a process that was killed")
    stream = opened()
    settled(stream)
    assert texts(stream) == ["one"]


def test_an_error_in_the_middle_keeps_what_came_before(inbox, opened):
    (inbox / "a.txt").write_text("fine")
    (inbox / "b.txt").write_bytes(b"fine\xff")
    stream = opened()
    with pytest.raises(UserError, match=r"message 0 of b.txt: not UTF-8 at byte 4; set data.errors"):
        settled(stream)
    assert texts(stream) == ["fine"]
    with pytest.raises(UserError, match="not UTF-8"):
        stream.poll()


@pytest.mark.parametrize(("errors", "rows"), [("replace", ["fine\ufffd"]), ("skip", [])])
def test_bad_bytes_by_policy(inbox, opened, errors, rows):
    (inbox / "b.txt").write_bytes(b"fine\xff")
    stream = opened(errors=errors)
    settled(stream)
    assert texts(stream) == rows


def test_a_file_changed_after_it_was_sealed(inbox, opened):
    (inbox / "a.txt").write_text("one")
    stream = opened()
    settled(stream)
    with open(inbox / "a.txt", "a") as file:
        file.write(" more")
    with pytest.raises(UserError, match=r"a.txt changed after it was sealed \(3 bytes then, 8 now\)"):
        stream.poll()
    os.unlink(inbox / "a.txt")
    assert stream.poll() == 0, "gone is no matter: its text is sealed"


def test_a_damaged_segment_is_named(inbox, opened, tmp_path):
    (inbox / "a.txt").write_text("one")
    stream = opened()
    settled(stream)
    path = tmp_path / "sealed/segment-00000000.arrow"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"segment-00000000.arrow \(messages 0 to 0 of a.txt\) is not what was sealed"):
        stream.sealed.table(0)
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        stream.sealed.table(0)


def test_two_that_seal_into_one_folder(inbox, opened):
    one, two = opened(), opened()
    (inbox / "a.txt").write_text("one")
    settled(one)
    with pytest.raises(UserError, match="another process seals into it too"):
        settled(two)
    assert texts(one) == ["one"]


def test_another_stream_is_refused(inbox, opened):
    (inbox / "a.txt").write_text("one")
    settled(opened())
    with pytest.raises(UserError, match=r"holds another stream: its cut is .*'rows': 2.* not .*'rows': 3"):
        opened(rows=3)
    with pytest.raises(UserError, match="no stream of this kind"):
        open_stream("ftp://host/x", inbox)
    with pytest.raises(UserError, match="no such folder"):
        open_stream(inbox / "none", inbox)


def test_tokens(inbox, opened):
    (inbox / "a.txt").write_text("ab")
    stream = opened(encode=lambda texts: [list(text.encode()) for text in texts])
    settled(stream)
    assert Sealed(open_store(stream.sealed.store.folder)).table(0)["tokens"].to_pylist() == [[97, 98]]
