"""`lanewise prove` for every axis, every pair and the common hybrids, for both model families.

    python benchmarks/prove_all.py            all of them, shrunk models
    python benchmarks/prove_all.py tp2 pp2    only these layouts

Prints a row for each: the worst errors of gradients and of weights after three steps, whether the promised bits held.
"""

import itertools
import json
import subprocess
import sys
import time
from typing import Any

from lanewise.parallel.layout import Layout

SINGLE = ["tp2", "tp4", "pp2", "pp4", "cp2", "cp4", "ep2", "ep4", "fsdp2", "fsdp4"]
HYBRIDS = ["pp2.fsdp2.tp2", "pp2.ep2.tp2", "fsdp2.cp2.tp2", "pp4.fsdp2", "cp2.ep2.tp2", "pp2.cp2.tp2", "pp4.tp2"]
MODELS = {
    "dense": ["model.preset=tiny-dense"],
    "deepseek": ["model.preset=tiny", "model.expert_groups=2"],
}


def layouts() -> list[str]:
    pairs = [f"{a}2.{b}2" for a, b in itertools.combinations(("pp", "fsdp", "cp", "ep", "tp"), 2)]
    return ["", *SINGLE, *pairs, *HYBRIDS]


def proof(layout: Layout, replicas: int, words: list[str]) -> dict[str, Any]:
    program = [sys.executable, "-m", "lanewise.cli.main", "prove", "--json"]
    where = ["--layout", str(layout), "--workers", str(replicas * layout.size)]
    done = subprocess.run([*program, *where, *words], capture_output=True, text=True, check=False)
    if not done.stdout:
        sys.exit(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> int:
    asked = sys.argv[1:] or layouts()
    failed = 0
    print(f"{'model':9} {'layout':14} {'replicas':>8} {'gradients':>10} {'weights':>10} {'bits':>5} {'seconds':>8}")
    for (name, words), text in itertools.product(MODELS.items(), asked):
        layout = Layout.parse(text)
        if name == "dense" and layout.ep > 1:
            continue
        for replicas in (1, 2):
            started = time.perf_counter()
            answer = proof(layout, replicas, [*words, f"batch.size={2 * layout.ep * layout.fsdp}"])
            rows = answer["findings"]
            gradients = max(row["error"] for row in rows if row["what"].startswith("gradient of"))
            weights = max(row["error"] for row in rows if "after 3 steps" in row["what"])
            bits = [row["passed"] for row in rows if row["what"].startswith("bits")]
            held = "-" if not bits else "same" if all(bits) else "OTHER"
            verdict = "" if answer["passed"] else "  WRONG"
            failed += not answer["passed"]
            seconds = time.perf_counter() - started
            numbers = f"{replicas:8} {gradients:10.1e} {weights:10.1e} {held:>5} {seconds:8.1f}"
            print(f"{name:9} {text or 'one rank':14} {numbers}{verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
