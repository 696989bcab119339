"""Logging for the whole process: structlog and the standard library's records through one handler on standard error.

Console text on a terminal, one JSON object a line elsewhere. Logging never waits (log_writer.py), and what tenants cause
has a limit (tenant_lines.py). Tracebacks never
show local variables: they may contain a token, and they hide the message.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import structlog
from msgspec import Struct

from gpushare_agent.kit.log_writer import WRITER, QueuedHandler, write_stderr
from gpushare_agent.kit.rate import TokenBucket
from gpushare_agent.kit.tenant_lines import TenantLines

if TYPE_CHECKING:
    from structlog.typing import Processor

_LIBRARY_LEVELS = {
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
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    handler = QueuedHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(as_json=format == "json" or (format == "auto" and not is_terminal), colors=is_terminal),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name, least in _LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel(least)
    for name in _REPEATING_LIBRARIES:
        logging.getLogger(name).addFilter(_FILTER)  # a second time changes nothing
    WRITER.on_turn = _TENANT_LINES.report
    atexit.unregister(_report_at_end)
    atexit.register(_report_at_end)  # before logging's own end, which was registered when it was imported
    logging.captureWarnings(True)
    sys.excepthook = _write_uncaught
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            _TENANT_LINES,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
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
        key = (record.name, str(record.msg).partition("\n")[0][:100], record.exc_info and record.exc_info[0])
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(TokenBucket(rate=1 / _REPEAT_AFTER_S, burst=1, clock=self._clock))
            if len(self._kinds) > _MAX_KINDS:
                self._kinds.popitem(last=False)
        if not kind.lines.take():
            kind.left_out += 1
            return False
        if kind.left_out:
            record.msg = f"{record.msg} ({kind.left_out} more of these were left out)"
        kind.left_out = 0
        return True


class _Kind(Struct):
    lines: TokenBucket
    left_out: int = 0


_FILTER = RepeatedLines()


_TENANT_LINES = TenantLines()


def _report_at_end() -> None:
    _TENANT_LINES.report(is_end=True)


def _write_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The interpreter's own hook would wait for whoever reads standard error, and the process would not end."""
    write_stderr("".join(traceback.format_exception(kind, error, trace)))


def _rendering(*, as_json: bool, colors: bool) -> list[Processor]:
    if not as_json:
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
