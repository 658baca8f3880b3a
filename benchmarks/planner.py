"""How good the planner's predictions are, on published runs and on runs of this machine.

    python benchmarks/planner.py --tables FOLDER           published_{runs,memory}.csv and single_node_a100.csv
    python benchmarks/planner.py --tables FOLDER --fit     fits the time model's constants and the correction anew
    python benchmarks/planner.py --local                   40 runs of this machine against `lanewise probe`

Published runs are scored with all runs of the same source left out ("source"), and with all of the same publisher left
out ("publisher", the word before the first blank): the second is what to expect of somebody new. Beside it stands the
predictor that knows only a mean MFU for each device and precision, under the same rules.
"""

import argparse
import datetime
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from lanewise import config
from lanewise.planner import correction, cost, machine
from lanewise.planner.fit import predict, space_of
from lanewise.planner.published import analytic, described, peak_memory, summary
from lanewise.planner.table import Case, Refused, read_table

# Where the fit of the constants starts, and is drawn towards: first principles and data sheets.
PRIOR = {
    "rows": 40.0, "launch": 0.35e-3, "launch_routed": 2.5e-3, "scores": 0.0, "products": 0.72, "attention": 0.32,
    "pointwise": 1.5, "head": 0.42, "link": 0.55, "network": 0.7, "hidden_tensor": 0.2, "hidden_expert": 0.3,
    "hidden_data": 0.6, "seen": 0.45, "bubble": 1.0, "uneven": 0.45, "jitter": 0.01, "fixed": 2.5e-3, "issue": 0.0,
    "update": 1.0,
}  # fmt: skip
EAGER = {"scores": 8.0, "launch": 0.86e-3}  # before attention was fused and graphs were compiled
EVERY = 5  # of the runs on one node, which are many and alike, one in so many is learned from


def cases(path: Path, needs: str) -> tuple[list[Case], list[tuple[str, str]]]:
    found, refused = [], []
    for cells, case in read_table(path):
        if isinstance(case, Refused):
            refused.append((cells["id"], str(case)))
        elif needs == "peak_mem_GB" or case.step_time is not None:
            found.append(case)
    return found, refused


def publisher(source: str) -> str:
    return source.split(" [", maxsplit=1)[0].split(maxsplit=1)[0]


def line(name: str, errors: Sequence[float], extra: str = "") -> None:
    s = summary(errors)
    print(f"{name:44}{s['scored']:6}{s['median']:9.1%}{s['p90']:9.1%}{s['worst']:9.0%}  {extra}")


def runs(folder: Path) -> None:
    found, refused = cases(folder / "published_runs.csv", "step_time_s_derived")
    single, _ = cases(folder / "single_node_a100.csv", "step_time_s_derived")
    print(f"\n{'step time, absolute relative error':44}{'runs':>6}{'median':>9}{'p90':>9}{'worst':>9}")
    for title, group in (("source", lambda s: s), ("publisher", publisher)):
        learned = found + single[::EVERY]
        ratio, x = ratios(learned)
        sources = [case.source for case in learned]
        off, deviation = correction.held_out(x, ratio, sources, list(map(group, sources)))
        errors = np.abs(np.exp(-off) - 1)[: len(found)]
        spread = correction.shipped().spread
        inside = np.mean(np.abs(off[: len(found)]) <= spread * deviation[: len(found)])
        line(f"planner, {title} left out", errors, f"80% interval holds {inside:.0%}")
        line(f"constant MFU, {title} left out", constant_mfu(found, group))
        if title == "source":
            worst = np.argsort(-errors)[:10]
        else:
            line(f"one A100 node, {title} left out", np.abs(np.exp(-off[len(found) :]) - 1))
    ratio, _ = ratios(single)
    line("one A100 node, analytic alone", np.abs(np.exp(-ratio) - 1))
    line("published, analytic alone", np.abs(np.exp(-ratios(found)[0]) - 1))
    print(f"\nrefused: {len(refused)}, for: {sorted({reason for _, reason in refused})}")
    print("\nthe ten worst")
    for i in worst:
        case, time = found[i], analytic(found[i])
        parts = sorted(((float(getattr(time, f.name)) / float(time.total), f.name) for f in fields(time)), reverse=True)
        shares = ", ".join(f"{name} {share:.0%}" for share, name in parts[:3])
        print(f"  {case.id:14}{errors[i]:7.0%}  {case.cluster} {case.precision}, {case.step_time:.3g} s; {shares}")


def ratios(found: Sequence[Case]) -> tuple[np.ndarray, np.ndarray]:
    """log(measured / analytic) [n], features [n, F]."""
    times = [analytic(case) for case in found]
    ratio = [np.log(case.step_time / float(time.total)) for case, time in zip(found, times, strict=True)]
    return np.array(ratio), np.array([described(case, time) for case, time in zip(found, times, strict=True)])


def constant_mfu(found: Sequence[Case], group: Callable[[str], str]) -> list[float]:
    rate = np.array(
        [c.model.step_flops(c.sequence, c.batch * c.sequence) / c.cluster.devices / c.step_time for c in found]
    )
    kinds = np.array([f"{c.cluster.device.name} {c.precision}" for c in found])
    groups = np.array([group(c.source) for c in found])
    errors = []
    for i in range(len(found)):
        others = groups != groups[i]
        alike = others & (kinds == kinds[i])
        errors.append(abs(rate[i] / np.median(rate[alike if alike.any() else others]) - 1))
    return errors


def memory(folder: Path) -> None:
    found, _ = cases(folder / "published_memory.csv", "peak_mem_GB")
    print(f"\n{'peak memory, absolute relative error':44}{'rows':>6}{'median':>9}{'p90':>9}{'worst':>9}")
    for title, told in (("allocator", True), ("nvidia-smi", False)):
        rows = [c for c in found if c.memory_GB and ("smi" not in c.memory_kind) == told]
        line(f"{title}-reported", [abs(peak_memory(c) / 1e9 / c.memory_GB - 1) for c in rows])


def fit(folder: Path) -> None:
    """Rates first, then the correction of what they leave."""
    from scipy.optimize import least_squares

    found, _ = cases(folder / "published_runs.csv", "step_time_s_derived")
    single, _ = cases(folder / "single_node_a100.csv", "step_time_s_derived")
    learned = found + single[:: 2 * EVERY]
    target = np.log([case.step_time for case in learned])
    _, which, count = np.unique([case.source for case in learned], return_inverse=True, return_counts=True)
    weight = count[which] ** -0.25
    names = list(PRIOR)  # what is only measured on a machine itself stays as it is
    shares = {
        "hidden_tensor",
        "hidden_expert",
        "hidden_data",
        "seen",
        "network",
        "link",
        "products",
        "attention",
        "head",
    }
    prior = {kind: [(PRIOR | more)[name] for name in names] for kind, more in (("fused", {}), ("eager", EAGER))}

    def rates(p: np.ndarray) -> dict[str, cost.Rates]:
        made = {}
        for kind, values in prior.items():
            moved = dict(zip(names, np.asarray(values) * np.exp(p[: len(names)]), strict=True))
            made[kind] = cost.Rates(**{k: min(v, 0.95) if k in shares else v for k, v in moved.items()})
        return made | {"eager": replace(made["eager"], launch=made["eager"].launch * float(np.exp(p[-1])))}

    def off(p: np.ndarray) -> np.ndarray:
        by_kind = rates(p)
        times = [step_time(case, by_kind["eager" if case.precision == "fp16" else "fused"]) for case in learned]
        e = (np.log(times) - target) / 0.1
        return np.concatenate((weight * 0.1 * np.sign(e) * np.sqrt(2 * (np.sqrt(1 + e**2) - 1)), 0.15 * p))

    best = least_squares(off, np.zeros(len(names) + 1), max_nfev=8, diff_step=0.02).x
    today = datetime.date.today()
    text = [
        f"# Constants of the time model, fitted by `benchmarks/planner.py --fit` on {today} to {len(found)} published",
        f"# runs and {len(learned) - len(found)} of one A100 node:",
        "# robust least squares on the logarithm of the step time.",
    ]
    notes = {"fused": "bf16 and narrower: fused attention", "eager": "fp16: before fused attention"}
    for kind, made in rates(best).items():
        text += ["", f"[{kind}] # {notes[kind]}", *(f"{name} = {getattr(made, name):.3g}" for name in names)]
    (Path(cost.__file__).parent / "rates.toml").write_text("\n".join(text) + "\n", encoding="utf-8")
    cost.calibrated.cache_clear()

    learned = found + single[::EVERY]
    ratio, x = ratios(learned)
    about = {"fitted": str(today), "runs": len(learned), "method": "Gaussian process with inducing points"}
    sources = [case.source for case in learned]
    correction.fit(x, ratio, sources, list(map(publisher, sources)), about).save(correction.SHIPPED)
    correction.shipped.cache_clear()


def step_time(case: Case, rates: cost.Rates) -> float:
    return float(cost.step_time(case.model, case.choice, case.sequence, case.cluster, case.precision, rates).total)


# -------------------------------------------------------------------------------------------------- this machine

# layers, hidden, feed-forward, sequences, length, lanes: none of them is among those that probe measures
ALONE = [
    (*model, *batch)
    for model in ((2, 192, 512), (3, 256, 640), (5, 320, 1024), (3, 448, 1280), (8, 256, 512))
    for batch in ((2, 256, 2), (6, 96, 1), (4, 320, 1))
]
ROUTED = [(a, 320, 128, b, c, d, experts) for a, b, c, d in ((2, 4, 192, 2), (4, 2, 128, 4)) for experts in (6, 12)]
TOGETHER = [(3, 256, 640, 4, 192, 4), (2, 448, 1280, 4, 128, 2), (6, 192, 512, 4, 256, 2)]
AXES = ("", "tp2", "pp2", "cp2", "fsdp2")


def local(most: int | None, cache: str) -> None:
    """Steps as the engine makes them, without data and records, timed as `probe` times its own (`planner.steps`)."""
    from lanewise.planner import probe, steps  # imports torch
    from lanewise.planner.resident import peaks

    probed = machine.read_probe(cache)
    alone = [probe.dense(shape) for shape in ALONE] + [probe.routed(shape) for shape in ROUTED]
    alone += [probe.dense(shape, recompute="full") for shape in ALONE[::3]]
    two = [probe.dense(shape, axes) for shape in TOGETHER for axes in AXES]
    two += [probe.routed(shape, axes) for shape in ROUTED[::2] for axes in ("", "ep2", "tp2", "pp2")]
    alone, two = alone[:most], two[:most]
    errors: dict[str, list[float]] = {}
    times: dict[str, dict[str, tuple[float, float]]] = {}  # of a run, by layout: predicted, measured
    print(f"\n    {'run':48}{'layout':10}{'step, s':>9}{'said':>8}{'off':>7}{'peak, MB':>9}{'said':>8}{'off':>7}")
    for workers, runs_ in ((1, alone), (2, two)):
        took = steps.step_seconds(runs_, steps.alone()) if workers == 1 else steps.on_two(runs_)[0]
        held = peaks(runs_, workers)
        where = machine.local(probed, workers)
        for run, seconds, bytes_ in zip(runs_, took, held, strict=True):
            said = predict(run, *where)
            fill = float(np.ravel(space_of(run, *where, machine.engine(probed)).memory.total)[0])
            off, off_memory = said / seconds - 1, fill / bytes_ - 1
            name, layout = told(run), run.layout.axes or ("replicas" if workers > 1 else "alone")
            kind = "one process" if workers == 1 else f"two, {layout}"
            errors.setdefault(kind, []).append(abs(off))
            errors.setdefault(f"memory, {kind}", []).append(abs(off_memory))
            row = f"{seconds:9.3f}{said:8.3f}{off:+7.1%}{bytes_ / 1e6:9.0f}{fill / 1e6:8.0f}{off_memory:+7.1%}"
            print(f"    {name:48}{layout:10}{row}")
            if workers == 2:
                times.setdefault(name, {})[layout] = said, seconds
    print(f"\n{'this machine, absolute relative error':44}{'runs':>6}{'median':>9}{'p90':>9}{'worst':>9}")
    for kind, found in errors.items():
        line(kind, found)
    line("step time, all", [e for kind, found in errors.items() if "memory" not in kind for e in found])
    line("peak memory, all", [e for kind, found in errors.items() if "memory" in kind for e in found])
    print("\nthe layout chosen for two processes, against the best that was measured")
    for name, layouts in times.items():
        chosen = min(layouts, key=lambda layout: layouts[layout][0])
        best = min(layouts, key=lambda layout: layouts[layout][1])
        print(f"    {name:48}{chosen:10}best {best:10}{layouts[chosen][1] / layouts[best][1] - 1:+7.1%}")


def told(run: config.Run) -> str:
    m, b = run.model, run.batch
    kind = f"{m.experts} experts" if hasattr(m, "experts") else "dense"
    again = ", recomputed" if run.layout.recompute == "full" else ""
    return f"{kind}, {m.layers} of {m.hidden}, {b.lanes} lanes of {b.size}x{b.sequence_length}{again}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, help="folder of the published tables")
    parser.add_argument("--fit", action="store_true", help="fit constants and correction, and write them")
    parser.add_argument("--local", action="store_true", help="score predictions for this machine on runs of it")
    parser.add_argument("--most", type=int, help="with --local: only so many runs of each kind")
    parser.add_argument("--cache", default="~/.cache/lanewise", help="where `lanewise probe` stored its measurements")
    arguments = parser.parse_args()
    if arguments.local:
        local(arguments.most, arguments.cache)
    if arguments.tables is not None:
        if arguments.fit:
            fit(arguments.tables)
        runs(arguments.tables)
        memory(arguments.tables)


if __name__ == "__main__":
    main()
