"""Make a run's folder from a Hugging Face folder: Llama, Qwen2, Qwen3 or DeepSeek-V3.

`generate`, `eval`, `inspect` and `export` take the new folder as any run's, and training starts from it.
"""

import argparse
import json
from pathlib import Path

EXAMPLE = """examples:
  lanewise import models/Qwen3-0.6B --out runs/qwen3
  lanewise train runs/qwen3/run.toml data.source=corpus/ --resume runs/qwen3 --out runs/tuned"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="the Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run to make")
    parser.add_argument("--tokenizer", type=Path, help="folder or tokenizer.json to use instead of the folder's own")


def run(arguments: argparse.Namespace) -> int:
    from lanewise.checkpoint.huggingface import import_folder

    made = import_folder(arguments.path, arguments.out, arguments.tokenizer)
    if arguments.json:
        print(json.dumps({"out": str(arguments.out), **made}))
        return 0
    for note in made["notes"]:
        print(f"note: {note}")
    print(f"{made['architecture']}: {made['tensors']:,} tensors; vocabulary {made['vocabulary']}")
    print(f"continue a text:  lanewise generate {arguments.out} --prompt 'Once'")
    print(
        f"train from it:    lanewise train {arguments.out}/run.toml data.source=... --resume {arguments.out} --out ..."
    )
    return 0
