"""Write a checkpoint as a Hugging Face folder, which `transformers` loads: config, weights, tokenizer.

Llama, Qwen2, Qwen3 and DeepSeek-V3. The weights are the fp32 masters unless --dtype bf16 rounds them.
"""

import argparse
import json
import re
from pathlib import Path

from lanewise.errors import UserError

EXAMPLE = """examples:
  lanewise export runs/default --out models/default
  lanewise export runs/default/checkpoints/step-00000050 --out models/half-way --dtype bf16 --shard-size 2GB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a run's folder, or one checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default: fp32)")
    parser.add_argument("--shard-size", default="5GB", help="largest file: a number and KB, MB or GB (default: 5GB)")
    parser.add_argument("--strip-vocab", action="store_true", help="leave out rows beyond the tokenizer's entries")


def run(arguments: argparse.Namespace) -> int:
    size = _bytes(arguments.shard_size)
    import torch

    from lanewise.checkpoint.huggingface import export_checkpoint
    from lanewise.checkpoint.locate import locate

    checkpoint = locate(arguments.path)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    made = export_checkpoint(checkpoint, arguments.out, dtype, size, strip_vocab=arguments.strip_vocab)
    if arguments.json:
        print(json.dumps({"checkpoint": str(checkpoint), "out": str(arguments.out), **made}))
    else:
        print(f"{made['architecture']}: {made['tensors']:,} tensors, {made['bytes'] / 1e9:,.2f} GB in {arguments.out}")
    return 0


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG])B", text, re.IGNORECASE)
    size = int(float(found[1]) * {"K": 1e3, "M": 1e6, "G": 1e9}[found[2].upper()]) if found else 0
    if size < 1:
        raise UserError(f"--shard-size {text!r}: write a number and KB, MB or GB, such as 500MB")
    return size
