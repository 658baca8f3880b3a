"""Is this machine fit for a run; what is missing, and how to get it. Exit code 1 if something needed is missing."""

import argparse
import json

EXAMPLE = """example:
  lanewise doctor"""

MARKS = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", default="~/.cache/lanewise", help="folder for tokenizers and token files")


def run(arguments: argparse.Namespace) -> int:
    from lanewise.observe.doctor import examine

    findings = examine(arguments.cache)
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        for finding in findings:
            print(f"{MARKS[finding.verdict]} {finding.what}: {finding.found}")
            if finding.remedy:
                print(f"{'':8}{finding.remedy}")
    return int(any(finding.verdict == "missing" for finding in findings))
