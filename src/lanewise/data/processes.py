"""What the processes that help with data have in common."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection


def leave_with_parent() -> None:
    """For a process of a pool: if the parent is killed, even by SIGKILL, leave at once.

    Ctrl-C is the parent's matter. SIGTERM ends the process, and another does its work again: it is how a pool of which
    one was killed ends the others, and ignored it would wait for them for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch-parent").start()
