"""A plan as numbers for machines, as a table for people, and as a run file."""

from typing import Any

from lanewise.config import Run
from lanewise.planner.search import Plan, Space

HOUR = 3600.0


def numbers(space: Space, plan: Plan) -> dict[str, Any]:
    """Everything a table shows and more, in SI units but for GB, kWh and hours."""
    run, cluster = space.run, space.cluster
    tokens = run.batch.sequences * run.batch.sequence_length
    flops = space.model.step_flops(run.batch.sequence_length, tokens)
    peak = cluster.device.peak.get(space.precision, max(cluster.device.peak.values()))
    watts = cluster.devices * (cluster.device.power + cluster.overhead)
    hours = plan.step * run.train.steps / HOUR
    energy = watts * hours / 1000
    exposed = sum(plan.time[name] for name in ("tensor", "expert", "context", "data"))
    return {
        "layout": str(plan.layout),
        "replicas": plan.replicas,
        "microbatch": plan.micro,
        "microbatches": plan.count,
        "recompute": plan.recompute,
        "schedule": plan.schedule,
        "stages_per_rank": plan.chunks,
        "zero": plan.zero,
        "step_s": plan.step,
        "p10_s": plan.low,
        "p90_s": plan.high,
        "extrapolates": plan.extrapolates,
        "tokens_per_s": tokens / plan.step,
        "mfu": flops / plan.step / cluster.devices / peak,
        "waterfall_s": plan.time,
        "memory_GB": {name: held / 1e9 for name, held in plan.memory.items()},
        "memory_total_GB": plan.bytes / 1e9,
        "bubble": plan.time["bubble"] / plan.step,
        "exposed": exposed / plan.step,
        "hours": hours,
        "kWh": energy,
        "cost": None if cluster.price is None else cluster.price * cluster.devices * hours,
        "kgCO2e": None if cluster.carbon is None else energy * cluster.carbon / 1000,
    }


def table(space: Space, plans: list[Plan]) -> str:
    """One line a plan."""
    head = (
        f"{'':>2} {'layout':22}{'repl':>5}{'micro':>7}{'recompute':>11} {'schedule':15}{'ZeRO':>4}{'step':>9}"
        f"{'p10-p90':>16}{'tokens/s':>11}{'MFU':>6}{'bubble':>8}{'exposed':>8}{'GB/rank':>9}{'kWh':>9}{'cost':>10}"
    )
    lines = [head]
    for place, plan in enumerate(plans, 1):
        n = numbers(space, plan)
        cost = "-" if n["cost"] is None else f"{n['cost']:,.0f}"
        chunks = f" x{plan.chunks}" if plan.chunks > 1 else ""
        interval = f"{plan.low:.3g}-{plan.high:.3g}"
        lines.append(
            f"{place:>2} {n['layout'] or '-':22}{plan.replicas:>5}{f'{plan.micro}x{plan.count}':>7}{plan.recompute:>11}"
            f" {plan.schedule + chunks:15}{plan.zero:>4}{plan.step:>8.3g}s{interval:>15}s{n['tokens_per_s']:>11,.0f}"
            f"{n['mfu']:>6.0%}{n['bubble']:>8.0%}{n['exposed']:>8.0%}{n['memory_total_GB']:>9.3g}{n['kWh']:>9,.0f}{cost:>10}"
        )
    return "\n".join(lines)


def waterfall(plan: Plan) -> str:
    """The parts of the step and of the memory, each with its share; both add up."""
    lines = [f"step {plan.step:.4g} s"]
    lines += [f"  {name:14}{value:>10.4g} s{value / plan.step:>7.1%}" for name, value in plan.time.items() if value]
    lines.append(f"memory of the fullest rank {plan.bytes / 1e9:.4g} GB")
    lines += [
        f"  {name:14}{held / 1e9:>10.4g} GB{held / plan.bytes:>6.1%}" for name, held in plan.memory.items() if held
    ]
    return "\n".join(lines)


def chosen(run: Run, plan: Plan) -> Run:
    """The run with the plan's layout and batch. Sequences of a step stay as many; lanes stay if the replicas divide
    them, else there is one for each replica."""
    size = plan.micro * plan.layout.fsdp * plan.layout.ep
    lanes = run.batch.lanes
    if lanes % plan.replicas or run.batch.sequences % (lanes * size):
        lanes = plan.replicas
    batch = {"size": size, "lanes": lanes, "microbatches": run.batch.sequences // (lanes * size)}
    layout = plan.settings()
    return run.model_copy(
        update={"batch": run.batch.model_copy(update=batch), "layout": run.layout.model_copy(update=layout)}
    )
