"""Logging for the whole process: structlog's lines and the standard library's records, in one form, on standard error.

Console text on a terminal, one JSON object a line elsewhere. Tracebacks never show local variables: they may contain a
token, and they hide the message.

**Logging never waits for whoever reads standard error.** A pipe takes 64 KiB; once it is full and nobody reads it, a
write blocks for ever, and on the event loop it would block the node's admissions. So lines are formatted where they are
made (their values may change later) and queued for a thread; what does not fit is dropped and counted, and the count is
logged as soon as lines move again. Not logging.handlers.QueueListener: its `stop` joins the thread without a limit, so a
process whose pipe nobody reads would not end, and its handler keeps a lock while it writes; its queue reports a full one
by writing to standard error itself.

**The log lines that tenants can cause have one limit**: BURST at once and PER_S from then on, so at most 80 in a minute.
It is a structlog processor: no caller knows of it. Lines below `info` pass: whoever sets that level wants them. A line
costs a token of a bucket. The first line of a namespace and its pod passes while there is a token; a further one only
while as many are left as its namespace and its pod used lately, on average. So a flood leaves to others about as many
tokens as it takes, with whatever number of pods. Many lines name a pod's UID alone: its namespace is known from the lines
before that name both, as each Allocate's does; where it is not, the event takes its place.

State owned: the queue, its thread and the number of lines dropped since the last report (`LogWriter`); the bucket, who
used how much of it, the namespaces of UIDs, and what was left out since the last report (`TenantLines`). Any thread may
log.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import math
import os
import select
import sys
import threading
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import structlog
from msgspec import Struct

from gpushare_agent.core.kit.rate import TokenBucket
from gpushare_agent.core.model.tenant_lines import TENANT_EVENTS, TENANT_FIELDS

if TYPE_CHECKING:
    from structlog.typing import Processor

log = structlog.get_logger(__name__)

# --- the thread that writes ---

MAX_LINES = 10_000
TURN_S = 10.0
FLUSH_TIMEOUT_S = 0.5
"""How long the end of the process waits for lines that are not written yet."""


class LogWriter:
    """Queue and thread. One per process, `WRITER`."""

    def __init__(self, turn_s: float = TURN_S) -> None:
        self.flush_timeout_s = FLUSH_TIMEOUT_S
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
        if sys.is_finalizing():  # Python has ended all threads: one that is started now is waited for for ever
            return
        with self._lock:
            # Dropped and not awaited: an admission must not wait for a reader of the log.
            if must_fit and self._queue.qsize() >= MAX_LINES:
                self._dropped += 1
                return
            # With the first line: most commands log nothing.
            if self._thread is None:
                thread = threading.Thread(target=self._write_all, name="log-writer", daemon=True)
                with suppress(RuntimeError):  # the node has its most processes: the line waits for the next one's try
                    thread.start()
                    self._thread = thread
        self._queue.put((stream, text))

    def flush(self) -> bool:
        """Wait until what was put is written, bounded. Where a flush had no success, the next one waits only after
        progress."""
        if self._thread is None:
            while not self._queue.empty():  # no thread could be started: without these lines nobody knows why all ends
                self._do(self._queue.get())
            return True
        # Each end of a process flushes several times: only the first one waits for a reader that does not read.
        if self._stuck_at == self._written:
            return False
        is_written = threading.Event()
        self._queue.put(is_written)
        if is_written.wait(self.flush_timeout_s):
            return True
        self._stuck_at = self._written
        return False

    def _write_all(self) -> None:
        while True:
            # Before the wait: what was left out is reported also where no line comes any more.
            self.on_turn()
            try:
                item = self._queue.get(timeout=self._turn_s)
            except Empty:
                continue
            self._do(item)

    def _do(self, item: tuple[TextIO, str] | threading.Event) -> None:
        # A flush: all that was put before it is written.
        if isinstance(item, threading.Event):
            item.set()
            return
        try:
            _write(*item)
        # Nothing can be logged of it: the log is what fails.
        except (OSError, ValueError):  # the reader is gone, the disk is full, the stream is closed
            with self._lock:
                self._dropped += 1
            return
        self._written += 1
        self._report_dropped()

    def _report_dropped(self) -> None:
        with self._lock:
            if not self._dropped or self._queue.qsize() > MAX_LINES // 2:
                return  # with the queue still that full, the report would be followed by the next
            # Taken before it is logged, because the line may itself be dropped.
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


class QueuedLines:
    """What structlog gives the lines to that it has rendered. Past the standard library's records: structlog makes two of
    each line, and renders a copy of it."""

    disabled = False

    def __init__(self, stream: TextIO, name: str = "") -> None:
        self.name = name
        self.getEffectiveLevel = logging.getLogger(name).getEffectiveLevel
        self._stream = stream

    def _put(self, line: str) -> None:
        WRITER.put(self._stream, line + "\n")

    debug = info = warning = error = exception = critical = _put


def write_stderr(text: str) -> None:
    """Writes what ends the process to standard error, behind the log lines before it, and waits a bounded time."""
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
    # A letter that the terminal's encoding lacks must not cost the line.
    errors = "backslashreplace" if stream.errors in (None, "strict") else stream.errors
    rest = memoryview(text.encode(stream.encoding, errors))
    while rest:
        try:
            # A pipe may take a part: the rest follows, or lines would be torn.
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # someone else who has the same pipe made it so
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


# --- the limit of what tenants cause ---

BURST = 50
PER_S = 0.5
REPORT_S = 60.0
_REPORT = "log_lines_left_out"
_FORGET_S = 60.0
"""The time after which use counts a third (1/e) of what it did."""
_LEAST = 0.05
_MAX_USERS = 2048
_NAME_CHARS = 320

Key = tuple[str, str]


class TenantLines:
    """`report` is called now and then, from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # never locked while something is logged
        self._tokens = TokenBucket(rate=PER_S, burst=BURST, clock=clock)
        self._used: OrderedDict[Key, tuple[float, float]] = OrderedDict()
        self._namespaces: OrderedDict[str, str] = OrderedDict()
        """By UID; a line that was left out counts too."""
        self._left_out: Counter[str] = Counter()
        self._since = 0.0

    def __call__(self, _logger: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """The processor. Raises DropEvent: the line is left out."""
        # The report itself must pass, or nobody would hear of what was left out.
        keys = self._user(line) if method != "debug" and line.get("event") != _REPORT else ()
        if not keys:
            return line
        with self._lock:
            if self._take(keys):
                return line
            if not self._left_out:
                self._since = self._clock()
            self._left_out[str(line.get("event"))] += 1
        raise structlog.DropEvent

    def report(self, *, is_end: bool = False) -> None:
        """Logs how many lines of each event were left out, once a minute where some were."""
        with self._lock:
            if not self._left_out or (self._clock() - self._since < REPORT_S and not is_end):
                return
            left_out, self._left_out = self._left_out, Counter()
        log.warning(
            _REPORT,
            lines=left_out.total(),
            events=dict(left_out.most_common()),
            why=f"tenants caused more than {BURST} at once, or {PER_S * 60:g} a minute",
        )

    def _take(self, keys: tuple[Key, ...]) -> bool:
        now = self._clock()
        used = {key: self._lately(key, now) for key in keys}
        # Whoever used the bucket lately must leave as much in it: so a flood takes half of it, whatever it is called.
        reserve = sum((1 + one) / len(keys) for one in used.values() if one > 0)
        if self._tokens.level < 1 + reserve:
            return False
        # After the look: a line that is left out costs nothing.
        self._tokens.take()
        for key, one in used.items():
            self._used[key] = one + 1, now
            self._used.move_to_end(key)
        # The longest unused first: its use has faded anyway.
        while len(self._used) > _MAX_USERS:
            self._used.popitem(last=False)
        return True

    def _lately(self, key: Key, now: float) -> float:
        used, at = self._used.get(key, (0.0, now))
        left = used * math.exp((at - now) / _FORGET_S)
        # A trace of use would else make a tenant known for ever.
        return left if left >= _LEAST else 0.0

    def _user(self, line: MutableMapping[str, Any]) -> tuple[Key, ...]:
        """Namespace and subject of a line that a tenant can cause, its event where it has none; nothing for other
        lines."""
        event = ("event", str(line.get("event")))
        found = (name for field in TENANT_FIELDS if isinstance(name := line.get(field), str))
        subject = next(found, None)
        if subject is None:
            return (event,) if event[1] in TENANT_EVENTS else ()
        subject = subject[:_NAME_CHARS]
        other = next(found, "") or subject  # next to a UID the pod's name, which may be `NAMESPACE/NAME`
        named = (
            (subject if "/" in subject else other).rpartition("/")[0].rpartition(" ")[2]
        )  # of "Pod NAMESPACE/NAME" too
        namespace = str(line.get("namespace") or named)[:_NAME_CHARS]
        with self._lock:
            if namespace and "/" not in subject:
                self._namespaces[subject] = namespace
                self._namespaces.move_to_end(subject)
                if len(self._namespaces) > _MAX_USERS:
                    self._namespaces.popitem(last=False)
            elif not namespace:
                namespace = self._namespaces.get(subject, "")
        return ("namespace", namespace) if namespace else event, ("subject", subject)


# --- the set-up ---

LIBRARY_LEVELS = {
    "aiohttp.access": logging.WARNING,
    "asyncio": logging.WARNING,
    "grpclib.server": logging.WARNING,  # at INFO each call that its peer resets has a line
    "hpack": logging.WARNING,
    "kubernetes_asyncio": logging.WARNING,
}
"""Libraries whose debug lines are louder than the agent's own."""
_REPEATING_LIBRARIES = ("asyncio", "grpclib.server")
"""They log a line for each thing that a peer causes."""
_REPEAT_AFTER_S = 60.0
_MAX_KINDS = 100

LOG_LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str = "info", format: str = "auto") -> None:
    """Sets up the root logger; a second call replaces the first. `format`: auto, json or console."""
    is_terminal = sys.stderr.isatty()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering = _rendering(as_json=format == "json" or (format == "auto" and not is_terminal), colors=is_terminal)
    handler = QueuedHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), structlog.processors.StackInfoRenderer()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    # force: a reload sets the level and format again, and the former handler must go.
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # After basicConfig, which sets the root's level alone.
    for name, least in LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel(least)
    for name in _REPEATING_LIBRARIES:
        logging.getLogger(name).addFilter(_FILTER)  # a second time changes nothing
    WRITER.on_turn = _TENANT_LINES.report
    atexit.unregister(_report_at_end)
    atexit.register(_report_at_end)  # before logging's own end, which was registered when it was imported
    # Python's warnings go to standard error past all handlers otherwise, and may block there.
    logging.captureWarnings(True)
    sys.excepthook = _write_uncaught
    # In place: a logger with values bound to it keeps the chain, and has to follow a reload too.
    _CHAIN[:] = [structlog.stdlib.filter_by_level, *shared, _TENANT_LINES, partial(_render, rendering)]
    structlog.configure(
        processors=_CHAIN,
        logger_factory=cache(partial(QueuedLines, sys.stderr)),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # SIGHUP may change the level; a cached logger would keep the old chain
    )


def log_level() -> str:
    """The level in force, in lower case."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_log_level(level: str) -> str:
    """Changes the level until the next change or `setup_logging`; the old one. `level` is one of LOG_LEVELS."""
    old = log_level()
    logging.getLogger().setLevel(level.upper())
    return old


class RepeatedLines(logging.Filter):
    """Lets one line a minute through of each template and class of error, with how many it stands for.

    What a library logs for each input or failure has no limit of its own: while descriptors are used up, asyncio's servers
    fail a hundred thousand times a minute, each time with a traceback.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, str, object], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        # The template, not the text: the text has the peer's address in it, and no two would be equal.
        key = (record.name, str(record.msg).partition("\n")[0][:100], record.exc_info and record.exc_info[0])
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(TokenBucket(rate=1 / _REPEAT_AFTER_S, burst=1, clock=self._clock))
            if len(self._kinds) > _MAX_KINDS:
                # The oldest kind: what a peer can vary must not grow this without end.
                self._kinds.popitem(last=False)
        if not kind.lines.take():
            kind.left_out += 1
            return False
        if kind.left_out:
            # In the message, because the record of a library has no fields.
            record.msg = f"{record.msg} ({kind.left_out} more of these were left out)"
        kind.left_out = 0
        return True


class _Kind(Struct):
    lines: TokenBucket
    left_out: int = 0


_FILTER = RepeatedLines()


_TENANT_LINES = TenantLines()
_CHAIN: list[Processor] = []


def _report_at_end() -> None:
    _TENANT_LINES.report(is_end=True)


def _write_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The interpreter's own hook would wait for whoever reads standard error, and the process would not end."""
    write_stderr("".join(traceback.format_exception(kind, error, trace)))


def is_printable(text: str) -> bool:
    """Whether a terminal shows all of it, and obeys none; line ends and tabs may be in it."""
    return text.isprintable() or all(map(str.isprintable, text.replace("\t", "").split("\n")))


def printable(text: str, escape: Callable[[str], str] | None = None) -> str:
    """The text with escapes, by default JSON's, for control characters, letters that turn the direction of others, and what
    is not seen."""
    if is_printable(text):
        return text
    # By line: a document of a cluster has megabytes, and few letters to escape.
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if not is_printable(line):
            lines[number] = "".join(one if is_printable(one) else (escape or _escaped)(one) for one in line)
    return "\n".join(lines)


def _escaped(letter: str) -> str:
    # json leaves DEL as it is.
    return json.dumps(letter)[1:-1] if letter > "\x7f" else f"\\u{ord(letter):04x}"


def _printable_line(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For the console: what a tenant has written must not move its cursor."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in line.items()}


def _printable_traceback(out: TextIO, exc_info: Any) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    out.write(printable(text.getvalue()))


def _render(rendering: list[Processor], logger: Any, method: str, line: Any) -> str:
    """Logging must not raise, whatever is in a line."""
    try:
        for processor in rendering:
            line = processor(logger, method, line)
    except Exception:  # noqa: BLE001
        return traceback.format_exc().rstrip()
    return str(line)


def _rendering(*, as_json: bool, colors: bool) -> list[Processor]:
    if not as_json:
        return [_printable_line, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_printable_traceback)]
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
