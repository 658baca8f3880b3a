"""The guarantee: no bit depends on the number of workers or on the ZeRO stage. `benchmarks/same_bits.py` runs the
full matrix; here a choice in which every worker count, stage, precision, family and accumulation occurs."""

from pathlib import Path

import pytest

from system import FAMILIES, bits, records, sentences, settings, train, write_documents

CASES = [
    # family, precision, microbatches, [(workers, ZeRO stage)]
    ("dense", "fp32", 1, [(2, 1), (3, 0), (5, 2), (8, 1)]),
    ("dense", "bf16", 2, [(2, 2), (3, 1), (4, 0)]),
    ("deepseek", "fp32", 2, [(2, 0), (3, 2), (8, 1)]),
    ("deepseek", "bf16", 1, [(4, 1), (5, 0), (8, 2)]),
]


@pytest.mark.parametrize(("family", "precision", "microbatches", "layouts"), CASES)
def test_same_bits_on_any_number_of_workers(
    tmp_path: Path, family: str, precision: str, microbatches: int, layouts: list[tuple[int, int]]
) -> None:
    """With dropout, documents of uneven length, and a last step that is part padding."""
    source = write_documents(tmp_path / "text.jsonl", sentences(18 * microbatches))
    overrides = [
        *FAMILIES[family],
        "model.dropout=0.1",
        "data.pack=document",
        "data.record_samples=true",
        "train.epochs=1",
        "layout.bucket_mb=0.02",  # several buckets
        f"train.precision={precision}",
        f"batch.microbatches={microbatches}",
    ]
    assert train(settings(tmp_path, source, *overrides), tmp_path / "alone") == 0
    alone = bits(tmp_path / "alone")
    slots = records(tmp_path / "alone", "samples")
    assert slots[-1]["step"] >= 3
    assert slots[-1]["samples"] == [], "the last step is part padding"
    for workers, zero in layouts:
        out = tmp_path / f"{workers}-{zero}"
        assert train(settings(tmp_path, source, *overrides, f"layout.zero={zero}"), out, workers) == 0
        assert bits(out) == alone, (workers, zero)


def test_other_settings_give_other_bits(tmp_path: Path) -> None:
    """The comparison above can fail: each of these changes the run."""
    source = write_documents(tmp_path / "text.jsonl", sentences(30))
    seen = []
    for i, change in enumerate(["train.seed=0", "train.seed=1", "model.dropout=0.1", "batch.lanes=4"]):
        assert train(settings(tmp_path, source, *FAMILIES["dense"], "train.steps=2", change), tmp_path / f"{i}") == 0
        seen.append(bits(tmp_path / f"{i}"))
    assert all(a["model/"] != b["model/"] for i, a in enumerate(seen) for b in seen[:i])
    assert all(a["metrics"] != b["metrics"] for i, a in enumerate(seen) for b in seen[:i])
