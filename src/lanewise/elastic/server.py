"""Imported, for its effect, into the server process that workers are forked from, and nowhere else.

Whoever signals a whole group or container of processes means the launcher, which asks the workers to stop. A server
that died of it would take the workers' exit codes with it.
"""

import signal

for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, signal.SIG_IGN)
