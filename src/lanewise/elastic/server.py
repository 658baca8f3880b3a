"""Imported, for its effect, into the server process that workers are forked from, and nowhere else.

Whoever signals a whole group or container of processes means the launcher, which asks the workers to stop. A server
that died of it would take the workers' exit codes with it. When its launcher is gone it leaves at once: taking torch
down in good order takes seconds, in which it holds the terminal, or the pipe of whoever started the run.
"""

import atexit
import os
import signal

for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, signal.SIG_IGN)
atexit.register(os._exit, 0)
