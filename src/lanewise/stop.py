"""The wish that a run stops."""

import signal

from lanewise.elastic.status import Board


class StopRequest:
    """Asked by any of the given signals, or by the launcher; the run then finishes its step and stops.

    A second Ctrl-C kills. A second SIGTERM does not: whoever stops a whole group of processes may well send each of
    them two, one directly and one through its launcher.
    """

    def __init__(self, *signals: signal.Signals, board: Board | None = None) -> None:
        self.signalled, self.board = False, board
        for number in signals:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        self.signalled = True
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    @property
    def asked(self) -> bool:
        return self.signalled or (self.board is not None and self.board.stop_asked)
