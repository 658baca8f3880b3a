"""A TCP relay that a test can cut: connections are reset and new ones refused until it is mended."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close() sends RST, as a dead host's router would


class Proxy:
    def __init__(self, target: int, port: int = 0):
        self.target = target
        self.lock = threading.Lock()
        self.open: set[socket.socket] = set()
        self.passed = 0  # bytes from the server to clients
        self.cut_after: int | None = None  # cuts by itself once so many bytes have passed
        self.port = port
        self.listener: socket.socket | None = None
        self.mend()

    def mend(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = listener.getsockname()[1]
        self.listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        with self.lock:
            listener, self.listener = self.listener, None
            if listener is not None:
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
                listener.close()
            for s in self.open:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                s.shutdown(socket.SHUT_RDWR) if s.fileno() >= 0 and _connected(s) else None
                s.close()
            self.open.clear()

    @contextmanager
    def away(self, seconds: float, after: int = 0) -> Iterator[threading.Event]:
        """Cut once `after` more bytes have passed, for so long; the event is set when it has been cut."""
        was_cut = threading.Event()

        def run() -> None:
            goal = self.passed + after
            while self.passed < goal and not stop.is_set():
                stop.wait(0.002)
            self.cut()
            was_cut.set()
            stop.wait(seconds) if not stop.is_set() else None
            self.mend()

        stop = threading.Event()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield was_cut
        finally:
            thread.join(seconds + 30)
            stop.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                server.settimeout(None)
            except OSError:
                return
            with self.lock:
                if self.listener is not listener:
                    client.close()
                    server.close()
                    return
                self.open |= {client, server}
            for pair, counted in ((client, server), False), ((server, client), True):
                threading.Thread(target=self._relay, args=(*pair, counted), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(2**16):
                sink.sendall(data)
                self.passed += len(data) * counted
        except OSError:
            pass
        with self.lock:
            for s in (source, sink):
                self.open.discard(s)
                s.close()


def _connected(s: socket.socket) -> bool:
    try:
        s.getpeername()
        return True
    except OSError:
        return False
