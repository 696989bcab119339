"""Writes log lines from a thread of its own, so that logging never waits for whoever reads standard error.

A pipe takes 64 KiB; once it is full and nobody reads it, a write blocks for ever, and on the event loop it would block
the node's admissions. So lines are formatted where they are made (their values may change later) and queued; what
does not fit is dropped and counted, and the count is logged as soon as lines move again. The thread is a daemon and
starts with the first line.

Not logging.handlers.QueueListener: its `stop` joins the thread without a limit, so a process whose pipe nobody reads would
not end, and its handler keeps a lock while it writes; its queue reports a full one by writing to standard error itself.

State owned: the queue, its thread, the number of lines dropped since the last report.
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TextIO

MAX_LINES = 10_000
TURN_S = 10.0
FLUSH_TIMEOUT_S = 0.5
"""How long the end of the process waits for lines that are not written yet."""


class LogWriter:
    """Queue and thread. One per process, `WRITER`."""

    def __init__(self, turn_s: float = TURN_S) -> None:
        self._turn_s = turn_s
        self._queue: SimpleQueue[tuple[TextIO, str] | threading.Event] = SimpleQueue()
        self._lock = threading.Lock()  # never locked while something is written
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._written = 0
        self._stuck_at = -1
        self.on_turn: Callable[[], None] = lambda: None
        """Called by the thread after each line, and every `turn_s` where none comes. It may log, and must not block."""

    def put(self, stream: TextIO, text: str, *, must_fit: bool = True) -> None:
        """Write this later, or drop it where the queue is full and `must_fit`."""
        with self._lock:
            if must_fit and self._queue.qsize() >= MAX_LINES:
                self._dropped += 1
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="log-writer", daemon=True)
                self._thread.start()
        self._queue.put((stream, text))

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until what was put is written. Where a flush had no success, the next one waits only after progress."""
        if self._thread is None:
            return True
        if self._stuck_at == self._written:
            return False
        is_written = threading.Event()
        self._queue.put(is_written)
        if is_written.wait(timeout_s):
            return True
        self._stuck_at = self._written
        return False

    def _write_all(self) -> None:
        while True:
            self.on_turn()
            try:
                item = self._queue.get(timeout=self._turn_s)
            except Empty:
                continue
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                _write(*item)
            except (OSError, ValueError):  # the reader is gone, the disk is full, the stream is closed
                with self._lock:
                    self._dropped += 1
                continue
            self._written += 1
            self._report_dropped()

    def _report_dropped(self) -> None:
        with self._lock:
            if not self._dropped or self._queue.qsize() > MAX_LINES // 2:
                return  # with the queue still that full, the report would be followed by the next
            dropped, self._dropped = self._dropped, 0
        logging.getLogger(__name__).error("log_lines_dropped", extra={"lines": dropped})


WRITER = LogWriter()


class QueuedHandler(logging.Handler):
    """A stream handler that never waits. `logging.shutdown`, at the end of the process, flushes it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Format now, write later."""
        try:
            WRITER.put(self._stream, self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - logging must not raise; the way of the base class may block
            WRITER.put(self._stream, traceback.format_exc())

    def flush(self) -> None:
        """Bounded."""
        WRITER.flush()


def write_stderr(text: str) -> None:
    """For what ends the process: to standard error, behind the log lines before it, waiting a bounded time."""
    WRITER.put(sys.stderr, text, must_fit=False)
    WRITER.flush()


def _write(stream: TextIO, text: str) -> None:
    """Past the stream's buffer where there is a descriptor: a thread stuck in it would keep its lock at the end."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        stream.write(text)
        stream.flush()
        return
    errors = "backslashreplace" if stream.errors in (None, "strict") else stream.errors
    rest = memoryview(text.encode(stream.encoding, errors))
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # someone else who has the same pipe made it so
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
