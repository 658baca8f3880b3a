"""A server program under test: started, killed, restarted on the same ports, gone when the tests are."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Server:
    """`ready` is asked until it says True; a server that leaves before is an error with the end of its log."""

    def __init__(self, words: Sequence[str], ready: Callable[[], bool], log: Path, env: dict[str, str] | None = None):
        # Killed with its parent, even where that is killed itself.
        bound = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self.words = [*bound, *words]
        self.ready = ready
        self.log = log
        self.env = env
        self.start()

    def start(self, limit: float = 60) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.env
            )
        end = time.monotonic() + limit
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                tail = self.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{' '.join(self.words)[:200]} did not start:\n{tail}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, and until it is gone."""
        self.process.kill()
        self.process.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False
