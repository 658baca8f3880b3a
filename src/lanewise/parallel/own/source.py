"""Where `prove --module` gets a module from: a function of the user's, or the config of a Hugging Face folder."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lanewise.errors import UserError
from lanewise.parallel.layout import Layout

HF = "hf:"
HEAD = 8  # width of a head, shrunk
MOST = {"intermediate_size": 64, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}


def made(source: str, layout: Layout, full: bool) -> tuple[nn.Module, Any]:
    """The module `source` names, the same on every rank, and its batch (inputs, labels), or None.

    source: `PKG.MOD:FUNCTION`, called without arguments, which returns a module or (module, (inputs, labels)); or
    `hf:PATH`, a config.json or its folder, from which transformers makes a language model with random weights, shrunk
    unless `full`. Raises UserError.
    """
    torch.manual_seed(0)
    if source.startswith(HF):
        return _from_config(Path(source.removeprefix(HF)), layout, full), None
    name, _, function = source.partition(":")
    if not function:
        raise UserError(f"--module {source}: give PKG.MOD:FUNCTION, or hf:PATH of a config.json")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(name), function)()
    except (ImportError, AttributeError) as error:
        raise UserError(f"--module {source}: {error}") from error
    module, batch = found if isinstance(found, tuple) else (found, None)
    if not isinstance(module, nn.Module):
        raise UserError(f"--module {source}: it returned {type(module).__name__}, not an nn.Module")
    return module.float(), batch


def _from_config(path: Path, layout: Layout, full: bool) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UserError("hf: needs the package transformers: pip install 'transformers>=5'") from error
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text())
        config = AutoConfig.for_model(**settings)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--module {HF}{path}: {str(error).splitlines()[0]}") from error
    if not full:
        config = _shrunk(config, layout)
    config.use_cache = False
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise UserError(f"--module {HF}{path}: {str(error).splitlines()[0]}") from error


def _shrunk(config: Any, layout: Layout) -> Any:
    """Heads, their groups, ties and kinds of layers stay; so does whether the vocabulary divides by tp."""
    settings = config.to_dict()
    names = {key: config.attribute_map.get(key, key) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    layers = max(2, layout.pp)
    heads = config.num_attention_heads
    settings[names["num_hidden_layers"]] = layers
    settings[names["hidden_size"]] = heads * HEAD
    settings[names["vocab_size"]] = 256 + config.vocab_size % layout.tp
    if settings.get("head_dim"):
        settings["head_dim"] = HEAD
    for key, most in MOST.items():
        if isinstance(settings.get(key), int):
            settings[key] = min(settings[key], most)
    if isinstance(settings.get("layer_types"), list):
        settings["layer_types"] = settings["layer_types"][:layers]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if settings.get(key) is not None:
            settings[key] = 0
    return type(config)(**settings)
