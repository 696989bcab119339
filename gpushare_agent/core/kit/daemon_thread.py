"""Blocking calls for asyncio, each bounded, none able to keep the process from ending.

A hung driver or a stalled disk can block a call for ever. asyncio's own pool is no place for it: the pool's threads are
joined when the loop closes. So each worker has a daemon thread of its own for one call at a time, started by a call and
ended when there is none for `KEEP_S`: what is called each second does not start a thread each second. While a call is
overdue, further ones are refused at once, so that neither threads nor waiting times pile up.

For calls that do not hang, `asyncio.to_thread` and the loop's own look-ups of names, the program's loop is a `Loop`.

State owned: the thread, and the call that is under way.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple, cast

from gpushare_agent.core.model.errors import Unavailable, file_remedy

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

KEEP_S = 6.5
"""Longer than the periods of the frequent callers: one to six seconds. To start a thread wakes the loop too."""


class Loop(asyncio.SelectorEventLoop):
    """Where no thread of its pool can be started, as on a node that has its most processes, the caller gets Unavailable and
    not a RuntimeError, which nobody expects of a request to a server. A child process takes no thread."""

    def __init__(self) -> None:
        super().__init__()
        # Before 3.12 asyncio starts a thread for each child that it has just started, and loses the child where it cannot.
        if sys.version_info < (3, 12):
            with suppress(OSError):  # a kernel before 5.3
                os.close(os.pidfd_open(os.getpid()))
                watcher = asyncio.PidfdChildWatcher()
                watcher.attach_loop(self)
                asyncio.set_child_watcher(watcher)

    def close(self) -> None:
        if sys.version_info < (3, 12):
            asyncio.set_child_watcher(None)  # type: ignore[arg-type]  # the next loop's may be another
        super().close()

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        try:
            return super().run_in_executor(executor, func, *args)
        except RuntimeError as error:
            raise Unavailable(f"no thread could be started ({error})") from error

    async def shutdown_default_executor(self, *timeout: Any) -> None:
        # asyncio waits for the pool's threads in one more; Python's own end waits for them as well.
        with suppress(RuntimeError):
            await super().shutdown_default_executor(*timeout)


class DaemonThread:
    """One worker, for calls that may hang on the same thing. `advice` ends every error's text: what to check."""

    def __init__(self, name: str, *, advice: str) -> None:
        self._name = name
        self._advice = advice
        self._lock = asyncio.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._has_thread = False
        self._thread_lock = threading.Lock()
        self._is_over = asyncio.Event()
        self._is_over.set()
        self._overdue_at = 0.0

    async def call(self, blocking: Callable[[], T], what: str, timeout_s: float) -> T:
        """Returns or raises the result of `blocking`. A cancelled call goes on in its thread and its result is dropped.

        Raises Unavailable: no answer in time, an earlier call is overdue, or it ended in an OSError. `what` names the call
        in the message.
        """
        answer: asyncio.Future[tuple[T | None, BaseException | None]] | None = None
        try:
            # The time for the lock counts too: whoever waits for a slow call before it waits no longer than it said.
            async with asyncio.timeout(timeout_s), self._lock:
                await self._wait_for_earlier(what)
                answer = self._start(blocking, what)
                # The time is the call's, not its caller's: the call goes on also where nobody waits for it any more.
                self._overdue_at = time.monotonic() + timeout_s
                result, failure = await answer
        except TimeoutError as error:
            if answer is not None:
                self._overdue_at = 0.0  # not left to two clocks that may differ by a moment
            raise Unavailable(f"{what} got no answer within {timeout_s:g} s. {self._advice}") from error
        # Also of what opens a file only now and then: an import, without a free descriptor.
        if isinstance(failure, OSError):
            at = f" ({failure.filename})" if failure.filename else ""
            remedy = file_remedy(failure, self._advice)
            text = f"{what} failed: {failure.strerror or failure}{at}. {remedy[0].upper()}{remedy[1:]}"
            raise Unavailable(text) from failure
        if failure is not None:
            raise failure
        return cast(T, result)

    async def _wait_for_earlier(self, what: str) -> None:
        """An earlier call that nobody waits for any more may yet be quick; one whose time is over is not waited for."""
        if self._is_over.is_set():
            return
        if time.monotonic() >= self._overdue_at:
            raise Unavailable(f"{what} was not tried: an earlier call still hangs. {self._advice}")
        await self._is_over.wait()

    def _start(self, blocking: Callable[[], T], what: str) -> asyncio.Future[tuple[T | None, BaseException | None]]:
        """Its result or its error, as a value: an error of the call is none of the waiting."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def end(result: T | None, failure: BaseException | None) -> None:
            self._is_over.set()
            if not answer.done():  # else its caller was cancelled, and nobody waits any more
                answer.set_result((result, failure))

        def work() -> None:
            try:
                outcome: tuple[T | None, BaseException | None] = blocking(), None
            except BaseException as error:  # noqa: BLE001 - handed to the waiting coroutine, whatever it is
                outcome = None, error
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(end, *outcome)

        with self._thread_lock:
            # A thread that is about to end looks at the queue under the same lock: no job is put behind its back.
            if not self._has_thread:
                try:
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                except RuntimeError as error:
                    raise Unavailable(f"{what} was not tried: no thread could be started ({error})") from error
                self._has_thread = True
            # Under the lock, too: else the thread could end between this and the look at `_has_thread`.
            self._jobs.put(work)
        self._is_over.clear()
        return answer

    def _work(self) -> None:
        """The thread's: calls, until there is none for a while."""
        while True:
            try:
                job = self._jobs.get(timeout=KEEP_S)
            except queue.Empty:
                with self._thread_lock:
                    # A job may have come in the moment after the wait was over.
                    if self._jobs.empty():
                        self._has_thread = False
                        return
            else:
                job()
                del job  # what it refers to is not kept until the next one
