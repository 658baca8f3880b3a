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
        ("pp3", 3, {}, "3 stages .* are more than model.layers .2.: each stage needs one"),
        ("tp2", 10, {}, "5 replicas but only 4 lanes"),
    ],
)
def test_the_broken_rule_is_named(axes, workers, model, words):
    with pytest.raises(UserError, match=words):
        check(Layout.parse(axes), make(DENSE, lanes=4, **model), workers)


def test_what_works_is_not_refused():
    for model in (DENSE, DEEPSEEK):
        for axes, workers in [("", 1), ("", 4), ("tp2", 8), ("tp4", 4), ("cp2.tp2", 4)]:
            check(Layout.parse(axes), make(model, lanes=4), workers)


@pytest.mark.parametrize(
    ("axes", "workers", "layout", "words"),
    [
        ("", 1, {"schedule": "zbv"}, "layout.schedule .zbv. is for a pipeline"),
        ("tp2", 2, {"stages": (3, 5)}, "layout.stages .3,5. is for a pipeline"),
        ("pp2", 2, {"chunks": 2}, "schedule 1f1b has one stage on each worker"),
        ("pp2", 2, {"schedule": "dualpipev", "chunks": 3}, "schedule dualpipev has two stages on each worker"),
        ("pp2", 2, {"stages": (3, 3, 2)}, "layout.stages cuts 3 stages, but layout pp2 with schedule 1f1b has 2"),
        ("pp2", 2, {"stages": (3, 3)}, "layout.stages adds up to 6 layers, but model.layers is 8"),
        ("pp3", 3, {"schedule": "interleaved", "chunks": 3}, "9 stages .* are more than model.layers .8."),
        ("pp2", 2, {"recompute_stages": (0,)}, "layout.recompute is none"),
        ("pp2", 2, {"recompute_stages": (2,), "recompute": "full"}, "there is no stage 2 in layout pp2, .* 0 to 1"),
        ("pp2", 4, {"schedule": "dualpipev"}, "dualpipev needs microbatches no fewer than its stages .4., .* has 2"),
        ("pp2", 2, {"schedule": "interleaved"}, "interleaved needs microbatches that go into its 2 rounds"),
    ],
)
def test_the_broken_rule_of_a_pipeline_is_named(axes, workers, layout, words):
    lanes = 5 if "go into" in words else 4
    with pytest.raises(UserError, match=words) as e:
        check(Layout.parse(axes), make(DENSE, layers=8, lanes=lanes, microbatches=1, layout=layout), workers)
    assert "\n" not in str(e.value)


def test_a_pipeline_that_works_is_not_refused():
    for layout in ({"stages": (1, 7)}, {"schedule": "zbv"}, {"schedule": "interleaved", "chunks": 4}):
        check(Layout.parse("pp2"), make(DENSE, layers=8, layout=layout), 2)
