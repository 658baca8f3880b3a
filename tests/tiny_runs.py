"""Run folders with a checkpoint of random weights, made without training."""

from pathlib import Path

import torch

from lanewise import config
from lanewise.checkpoint.manifest import folder_of
from lanewise.checkpoint.pieces import Entry
from lanewise.checkpoint.store import Checkpoints
from lanewise.data import tokenizer
from lanewise.models.build import build

STEP = 3


def model_of(**settings) -> config.DenseModel | config.DeepSeekModel:
    """A tiny model of the preset's structure; 264 rows are 7 more than the tokenizer's 257 entries."""
    sizes = {"vocab_size": 264, "layers": 2, "hidden": 48, "heads": 4, "ffn_hidden": 80}
    if settings["preset"] == "tiny-dense":
        return config.load_model(sizes | {"kv_heads": 2} | settings)
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    experts = {"experts": 8, "experts_per_token": 3, "expert_groups": 4, "groups_per_token": 2, "expert_hidden": 20}
    return config.load_model(sizes | latent | experts | {"routed_scale": 2.5} | settings)


@torch.no_grad()
def randomize(module: torch.nn.Module) -> None:
    """Every tensor random, norms and biases too, so that none can be swapped or dropped unnoticed."""
    generator = torch.Generator().manual_seed(0)
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0))


def run_folder(out: Path, model: config.DenseModel | config.DeepSeekModel) -> Path:
    """A run's folder as training leaves it: run.toml, tokenizer, checkpoint with moments. Returns the checkpoint."""
    out.mkdir(parents=True)
    tokenizer.train([], 257).save(out)
    run = config.Run(model=model, batch=config.Batch(sequence_length=64))
    (out / "run.toml").write_text(config.dump(run), encoding="utf-8")
    built = build(model)
    randomize(built)
    parameters = dict(built.named_parameters())
    state = {}
    for name, tensor in built.state_dict().items():
        kinds = ("model", "exp_avg", "exp_avg_sq") if name in parameters else ("buffer",)
        state |= {f"{kind}/{name}": Entry.whole(tensor) for kind in kinds}
    meta = {
        "progress": {"step": STEP, "updates": STEP, "tokens": 9, "skipped": 0, "skipped_in_row": 0},
        "run": config.dump(run),
        "data": {"train": "0"},
        "layout": {"replicas": 1, "zero": 0},
    }
    checkpoints = Checkpoints(out / "checkpoints", keep=1, background=False, group=None, alarm=_fail)
    checkpoints.save(STEP, state, meta)
    return folder_of(out / "checkpoints", STEP)


def _fail(event: str, details: dict[str, object]) -> None:
    raise AssertionError(f"{event}: {details}")
