"""Ctrl-C outside a command's own code: it ends the process at once, quietly, with the exit code of an interrupted program.

KeyboardInterrupt is for code that has something to clean up. Raised during an import, or at Python's own end, it is printed
with a traceback, or lost: Python before 3.12 makes a RuntimeError of it while a class is made. State: SIGINT's handler, and
whether SIGHUP waits.
"""

import os

# `signal` imports more, and until then Ctrl-C is Python's own: so nothing else is imported.
_signal = __import__("_signal")

INTERRUPTED = 130
"""The exit code after Ctrl-C, as a shell gives it: 128 and the number of SIGINT."""


def end_at_once() -> None:
    """From now on Ctrl-C ends the process. What ignores it, as a shell's background job does, goes on ignoring it."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _end)


def raise_error() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as Python does by itself: a command begins. Undoes `end_at_once`."""
    if _signal.getsignal(_signal.SIGINT) is _end:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def hold_hangup() -> None:
    """SIGHUP waits until the agent has its handler (agent/program.py): what changes the settings while it starts sends it at
    once, and the signal's own effect is the process's end."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGHUP,))


def is_behind(error: BaseException | None) -> bool:
    """Whether the error is KeyboardInterrupt, or what somebody made of one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
