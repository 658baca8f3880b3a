"""What the processes that help with data have in common."""

import multiprocessing
import os
import threading
from multiprocessing import connection


def leave_with_parent() -> None:
    """If the parent is killed, even by SIGKILL, leave at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch-parent").start()
