"""Which launcher started this process, if any: torchrun, Slurm or MPI, read from the environment."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lanewise.errors import UserError


@dataclass(frozen=True)
class Place:
    """This process among those of the run, and where the first one listens."""

    rank: int
    world: int
    local_rank: int
    host: str
    port: int
    launcher: str


def detect(env: Mapping[str, str] = os.environ) -> Place | None:
    """The place a launcher gave us; None if we were started alone and spawn the workers ourselves.

    Raises UserError if a launcher is recognised but does not say where the first process listens.
    """
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun, and anything that follows its convention
        local = int(env.get("LOCAL_RANK", "0"))
        return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), local, *_address(env, "torchrun", None), "torchrun")
    if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in env:
        first = _first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost"))
        # Each job step gets a port of its own in the range below the kernel's ephemeral ports.
        port = 15000 + (int(env.get("SLURM_JOB_ID", "0")) * 31 + int(env["SLURM_STEP_ID"])) % 15000
        host, port = _address(env, "Slurm", (first, port))
        return Place(
            int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", "0")), host, port, "Slurm"
        )
    if int(env.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        world = int(env["OMPI_COMM_WORLD_SIZE"])
        one_host = int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")) == world
        job = sum(map(ord, env.get("OMPI_MCA_ess_base_jobid", env.get("PMIX_NAMESPACE", "")))) * 7919
        digits = re.sub(r"\D", "", env.get("OMPI_MCA_ess_base_jobid", env.get("PMIX_NAMESPACE", "")))
        port = 15000 + (int(digits) if digits else job) % 15000
        host, port = _address(env, "MPI", ("127.0.0.1", port) if one_host else None)
        local = int(env.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
        return Place(int(env["OMPI_COMM_WORLD_RANK"]), world, local, host, port, "MPI")
    return None


def _address(env: Mapping[str, str], launcher: str, default: tuple[str, int] | None) -> tuple[str, int]:
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if default is None:
        raise UserError(f"{launcher} did not say where rank 0 listens: set MASTER_ADDR and MASTER_PORT")
    return env.get("MASTER_ADDR", default[0]), int(env.get("MASTER_PORT", default[1]))


def _first_host(nodes: str) -> str:
    """First host of a Slurm node list: 'n[1-3,7],m4' -> 'n1', 'gpu-[008-010]' -> 'gpu-008'."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if not match:
        raise UserError(f"cannot read the node list {nodes!r}: set MASTER_ADDR and MASTER_PORT")
    return match.group(1) + (match.group(2) or "")
