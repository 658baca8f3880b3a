"""Layout strings, and what is refused before anything starts (A7, A10)."""

import pytest
from spread_ranks import DEEPSEEK, DENSE, make

from lanewise.errors import UserError
from lanewise.parallel.layout import Layout, check


def test_a_layout_is_its_axes_in_one_order():
    assert Layout.parse("tp2.pp4") == Layout(pp=4, tp=2)
    assert str(Layout.parse("tp2.pp4")) == "pp4.tp2"
    assert Layout.parse("") == Layout()
    assert str(Layout.parse("tp1")) == ""
    assert Layout.parse("pp2.fsdp2.cp3.tp2").size == 24
    assert Layout.parse("pp2.tp2").replicas(12) == 3


@pytest.mark.parametrize("text", ["tp", "tp0", "2", "dp2", "tp2,pp2", "tp2.tp2", "tp-1", "tp2.", "replica2"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(UserError, match="layout"):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("axes", "workers", "model", "words"),
    [
        ("tp2", 3, {}, "3 workers do not divide into replicas of 2 ranks"),
        ("tp5", 5, {}, "sequence_length .16. must be a multiple of 5 .tp."),
        ("cp4.tp4", 16, {}, "sequence_length .16. must be a multiple of 32 .twice cp, times tp."),
        ("ep2", 2, {}, "the model has no experts"),
        ("ep4", 4, {}, "batch.size .2. must be a multiple of 4"),
        ("tp8", 8, {}, "tp is more than model.heads"),
        ("tp4", 4, {"ffn_hidden": 3}, "tp is more than model.ffn_hidden"),
        ("tp2", 10, {}, "5 replicas but only 4 lanes"),
    ],
)
def test_the_broken_rule_is_named(axes, workers, model, words):
    with pytest.raises(UserError, match=words):
        check(Layout.parse(axes), make(DENSE, **model), workers)


def test_what_works_is_not_refused():
    for model in (DENSE, DEEPSEEK):
        for axes, workers in [("", 1), ("", 4), ("tp2", 8), ("tp4", 4), ("cp2.tp2", 4)]:
            check(Layout.parse(axes), make(model), workers)
