import pytest

from lanewise import config
from lanewise.errors import UserError


def refuses(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config.load(None, overrides)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def test_resolved_file_reads_back_as_the_same_run():
    run = config.load(
        None, ["model.preset=llama3-8b", "train.steps=7", "optimizer.betas=[0.8, 0.9]", 'data.source="a \\"b\\" \\\\c"']
    )
    again = config.parse(config.dump(run))
    assert again == run
    assert again.optimizer.betas == (0.8, 0.9)
    assert again.data.source == 'a "b" \\c'


def test_every_setting_is_documented():
    for name, section in config.Run.model_fields.items():
        fields = getattr(section.annotation, "model_fields", {})
        for key, field in fields.items():
            assert field.description or key in ("name", "family"), f"{name}.{key}"


def test_unknown_keys_name_the_nearest():
    assert "'steps'" in refuses("train.stepz=3")
    assert "'heads'" in refuses("model.head=3")
    assert "'model'" in refuses("modle.layers=3")
    assert "'factor'" in refuses("model.rope_scaling.kind=linear", "model.rope_scaling.factr=2")
    assert "'tiny'" in refuses("model.preset=tinyy")


def test_wrong_values_name_key_and_value():
    assert refuses("train.steps=many").startswith("train.steps")
    assert "'many'" in refuses("train.steps=many")
    assert "heads 7" in refuses("model.preset=tiny-dense", "model.heads=7")
    assert "kv_heads 3" in refuses("model.preset=tiny-dense", "model.kv_heads=3")
    assert "experts_per_token" in refuses("model.experts_per_token=9")
    assert "batch.lanes" in refuses("batch.lanes=0")
    assert "section.key=value" in refuses("train.steps")
    assert "train is a value" not in refuses("train=3")
    assert "family" in refuses("model.family=dense")


def test_a_run_file_and_overrides(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "tiny-dense"\n[train]\nsteps = 5\n')
    run = config.load(file, ["train.steps=6"])
    assert (run.model.family, run.train.steps) == ("dense", 6)
    with pytest.raises(UserError, match="no such run file"):
        config.load(tmp_path / "none.toml")
    file.write_text("[model\n")
    with pytest.raises(UserError, match="not valid TOML"):
        config.load(file)


def test_differences_are_what_defines_the_bits():
    run = config.load(None, [])
    free = config.load(None, ["layout.zero=2", "checkpoint.every=1", "eval.every=9", "name=other"])
    assert list(config.differences(run, free)) == []
    other = config.load(None, ["train.seed=1", "optimizer.lr=0.5"])
    assert [key for key, _, _ in config.differences(run, other)] == ["train.seed", "optimizer.lr"]


def test_vocabulary_comes_from_the_tokenizer_or_must_hold_it():
    run = config.load(None, [])
    assert config.with_vocabulary(run, 300).model.vocab_size == 300
    wide = config.load(None, ["model.vocab_size=512"])
    assert config.with_vocabulary(wide, 300).model.vocab_size == 512
    with pytest.raises(UserError, match="smaller than the tokenizer"):
        config.with_vocabulary(wide, 513)


def test_what_is_missing_or_misplaced_has_a_remedy():
    assert (
        refuses("model.rope_scaling.kind=linear")
        == "model.rope_scaling.factor: has no value: set model.rope_scaling.factor=..."
    )
    assert refuses("train=3") == "train: is a section, not a value: set train.SETTING=..."
    assert "use letters, digits" in refuses("name=../x")


def test_any_text_survives_the_written_run_file():
    run = config.load(None, []).model_copy(update={"data": config.Data(source='\x01\x1f\x7f"\\\t\n é')})
    assert config.parse(config.dump(run)) == run


@pytest.mark.parametrize("override", ["train.epochs=inf", "layout.bucket_mb=inf", "optimizer.lr=nan"])
def test_numbers_are_finite(override):
    assert "finite" in refuses(override)
