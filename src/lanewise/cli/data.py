"""Make shard sets from files (build), look into them (show), check them (verify)."""

import argparse
import json
import os
import sys

from lanewise.errors import EXIT_DONE, EXIT_FAILED, UserError

EXAMPLE = """examples:
  lanewise data build corpora/ more.jsonl --out sets/web data.tokenizer=tokenizer.json
  lanewise data show sets/web --count 3
  lanewise data verify sets/web --json
  lanewise train data.source=sets/web"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("build", "show", "verify"))
    parser.add_argument(
        "words", nargs="*", metavar="SOURCE | SET | data.key=value", help="what to build from, or the set to look at"
    )
    parser.add_argument("--out", metavar="SET", help="build: where the set goes; a build that was killed goes on")
    parser.add_argument("--workers", type=int, help="build: processes (default: one a core)")
    parser.add_argument("--count", type=int, default=5, help="show: documents to decode (default: 5)")
    parser.add_argument("--first", type=int, help="show: from this document on (default: spread over the set)")
    parser.add_argument("--held-out", action="store_true", help="show: of the held-out documents")


def run(arguments: argparse.Namespace) -> int:
    overrides = [word for word in arguments.words if word.startswith("data.") and "=" in word]
    names = [word for word in arguments.words if word not in overrides]
    try:
        if arguments.action == "build":
            return _build(arguments, names, overrides)
        if len(names) != 1 or overrides:
            raise UserError(f"data {arguments.action}: name one shard set")
        return _show(arguments, names[0]) if arguments.action == "show" else _verify(arguments, names[0])
    except OSError as error:
        where = error.filename or arguments.out or names[0]
        raise UserError(f"{where}: {error.strerror or error}: name a folder that can be used") from None


def _build(arguments: argparse.Namespace, names: list[str], overrides: list[str]) -> int:
    if not names:
        raise UserError("data build: name at least one source")
    if arguments.out is None:
        raise UserError("data build: say with --out where the set goes")
    if arguments.workers is not None and arguments.workers < 1:
        raise UserError(f"--workers {arguments.workers}: at least one is needed")
    from lanewise import config
    from lanewise.data.shard_build import build_shards

    def say(text: str) -> None:
        print(text, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    data = config.load(None, overrides).data
    if data.mix:
        raise UserError("data build: a mixture is made when training; build its sources one by one")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    manifest = build_shards(names, data, arguments.out, arguments.workers or cores, say)
    if arguments.json:
        print(json.dumps({key: manifest[key] for key in ("documents", "tokens", "shard_count", "notes")}))
    else:
        say(f"look into it:  lanewise data show {arguments.out}")
        say(f"train on it:   lanewise train data.source={arguments.out}")
    return EXIT_DONE


def _show(arguments: argparse.Namespace, name: str) -> int:
    from lanewise.data.shard_look import show

    facts = show(name, "held" if arguments.held_out else "train", arguments.count, arguments.first)
    if arguments.json:
        print(json.dumps(facts))
        return EXIT_DONE
    samples = facts.pop("samples")
    for key, value in facts.items():
        print(f"{key}: {', '.join(f'{k} {v:,}' for k, v in value.items()) if isinstance(value, dict) else value}")
    for sample in samples:
        print(f"\n-- document {sample['document']} ({sample['id']}), {sample['tokens']:,} tokens --")
        text = sample["text"]
        print(text if len(text) <= 400 else f"{text[:200]} [...] {text[-200:]}")
    return EXIT_DONE


def _verify(arguments: argparse.Namespace, name: str) -> int:
    from lanewise.data.shard_look import verify

    found = []
    for complaint in verify(name):
        found.append(complaint)
        if not arguments.json:
            print(complaint, flush=True)
    if arguments.json:
        print(json.dumps({"set": name, "whole": not found, "damage": found}))
    elif not found:
        print(f"{name} is whole")
    return EXIT_FAILED if found else EXIT_DONE
