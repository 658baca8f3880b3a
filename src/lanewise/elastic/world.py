"""The processes of a run and the groups they talk through."""

import os
import socket
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lanewise.elastic.environment import Place

TIMEOUT = timedelta(minutes=10)  # a dead peer is noticed at once by its closed sockets; this is for a stopped one


@dataclass(frozen=True)
class World:
    """This process's rank among `size`, its device, and its groups; both groups are None for one process alone.

    group: what gradients and weights travel through (NCCL on CUDA, gloo on CPU).
    side: gloo, for checkpoints written in the background: it never meets the main group's traffic.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    side: dist.ProcessGroup | None = None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, however long some take; one that dies is noticed all the same."""
        values = [value]
        if self.size > 1:
            patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
            values = [None] * self.size
            dist.all_gather_object(values, value, group=patient)
            dist.destroy_process_group(patient)
        return values

    def room(self, host: bool) -> float:
        """Bytes of memory (the devices', or the hosts') that each rank can still have where that is least; ranks on one
        share what is free there."""
        if self.device.type == "cuda" and not host:
            mine = f"{socket.gethostname()} {self.device}", torch.cuda.mem_get_info(self.device)[0]
        else:
            mine = socket.gethostname(), psutil.virtual_memory().available
        everyone = self.gather(mine)
        sharing = Counter(where for where, _ in everyone)
        return min(free / sharing[where] for where, free in everyone)

    def members(self, replica: int) -> list[dict[str, Any]]:
        """Who takes part: rank, pid, host and replica of each process, by rank."""
        return self.gather({"rank": self.rank, "pid": os.getpid(), "host": socket.gethostname(), "replica": replica})


def connect(
    rank: int, size: int, local_rank: int, store: dist.Store | None, threads: int, deterministic: bool
) -> World:
    """Join the run's processes. `threads` compute threads each: the number is part of what defines the bits."""
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
    else:
        device = torch.device("cpu")
    if size == 1:
        return World(rank, size, device)
    assert store is not None
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    side = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return World(rank, size, device, dist.group.WORLD, side)


def store_of(place: Place) -> dist.Store:
    """The meeting point a launcher named: rank 0 serves it unless the launcher (torchrun) already does."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(place.host, place.port, place.world, place.rank == 0 and not served, TIMEOUT)


def local_store(rank: int, size: int, port: int, listener: socket.socket | None) -> dist.Store:
    """The meeting point of workers we spawned: rank 0 serves it on the listening socket it was given."""
    if listener is not None:
        fd = listener.detach()
        return dist.TCPStore("127.0.0.1", port, size, True, TIMEOUT, wait_for_workers=False, master_listen_fd=fd)
    return dist.TCPStore("127.0.0.1", port, size, False, TIMEOUT)
