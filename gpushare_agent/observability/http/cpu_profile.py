"""A sampling profile of this process, taken by a thread of its own so that the event loop never waits for it.

Many times a second the thread reads every thread's stack (`sys._current_frames`) and counts it. Samples are of the clock
on the wall: a loop that hangs in a blocking call shows there, which a processor clock would hide. What only waits is left
out: the loop in its selector, and another thread whose processor time (Linux: schedstat) has not moved since the last
sample. The result is collapsed stacks, one a line, as flame graph tools read them. Nothing of a frame but its code is
kept, no variable.

State owned: one profile's counts, and its thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

MAX_DEPTH = 200
MAX_STACKS = 10_000
"""Different ones. A profile of an hour's odd code must not fill the memory."""
_WAITS = frozenset(
    {
        ("selectors.py", "select"),
        ("thread.py", "_worker"),
        ("threading.py", "wait"),
        ("threading.py", "_wait_for_tstate_lock"),
    }
)
"""File and function of a frame in which a thread waits for work."""
_TASKS = Path("/proc/self/task")
_END_GRACE_S = 5.0
_OTHER_STACKS = "(further stacks)"

_Stack = tuple[CodeType, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`stacks` counts the samples of each collapsed stack, `thread;outermost;…;innermost`. `samples` is how often the
    thread looked, `idle` how many stacks it saw that only waited."""

    stacks: Mapping[str, int]
    samples: int
    idle: int
    seconds: float

    def text(self) -> str:
        """One stack a line with its count, sorted."""
        return "".join(f"{stack} {count}\n" for stack, count in sorted(self.stacks.items()))


async def take_profile(seconds: float, hz: float, *, with_idle: bool = False) -> Profile:
    """Samples all threads but the sampling one. Cancelled, it ends within one sample's time.

    Raises:
        RuntimeError: no thread could be started.
        TimeoutError: the sampling thread did not end, for it got no processor time.
    """
    sampler = _Sampler(seconds, hz, with_idle=with_idle)
    try:
        async with asyncio.timeout(seconds + _END_GRACE_S):
            return await sampler.run()
    finally:
        sampler.stop()


class _Sampler:
    def __init__(self, seconds: float, hz: float, *, with_idle: bool) -> None:
        self._seconds = seconds
        self._interval_s = 1 / hz
        self._with_idle = with_idle
        self._is_over = threading.Event()
        self._counts: Counter[tuple[str, _Stack]] = Counter()
        self._samples = self._idle = 0
        self._cpu_ns: dict[int, int] = {}

    def stop(self) -> None:
        self._is_over.set()

    async def run(self) -> Profile:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Profile] = loop.create_future()

        def finish(profile: Profile) -> None:
            if not done.done():
                done.set_result(profile)

        def work() -> None:
            profile = self._sample_all()
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish, profile)

        threading.Thread(target=work, name="cpu-profile", daemon=True).start()
        return await done

    def _sample_all(self) -> Profile:
        own = threading.get_ident()
        started_at = time.monotonic()
        next_at = started_at
        while (now := time.monotonic()) < started_at + self._seconds and not self._is_over.is_set():
            self._sample(own)
            next_at = max(next_at + self._interval_s, now)  # samples that came too late are not made up for
            self._is_over.wait(max(0.0, next_at - time.monotonic()))
        return Profile(
            stacks=self._collapsed(),
            samples=self._samples,
            idle=self._idle,
            seconds=time.monotonic() - started_at,
        )

    def _sample(self, own: int) -> None:
        self._samples += 1
        threads = {thread.ident: thread for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident == own:
                continue
            thread = threads.get(ident)
            if self._is_idle(frame, thread) and not self._with_idle:
                self._idle += 1
                continue
            self._count(thread.name if thread is not None else f"thread {ident}", _codes_of(frame))

    def _is_idle(self, frame: FrameType, thread: threading.Thread | None) -> bool:
        code = frame.f_code
        if (code.co_filename.rpartition("/")[2], code.co_name) in _WAITS:
            return True
        if thread is None or thread.native_id is None or thread is threading.main_thread():
            return False
        return not self._has_run(thread.native_id)

    def _has_run(self, native_id: int) -> bool:
        """Since the last sample; the first look at a thread counts as no. Where the kernel does not tell, it has."""
        try:
            text = (_TASKS / str(native_id) / "schedstat").read_text()
            now_ns = int(text.split()[0])
        except (OSError, ValueError, IndexError):
            return True
        before_ns, self._cpu_ns[native_id] = self._cpu_ns.get(native_id, now_ns), now_ns
        return now_ns > before_ns

    def _count(self, name: str, codes: _Stack) -> None:
        key = (name, codes)
        if key not in self._counts and len(self._counts) >= MAX_STACKS:
            key = (_OTHER_STACKS, ())
        self._counts[key] += 1

    def _collapsed(self) -> dict[str, int]:
        """Code objects that read alike (a function defined twice) are one stack."""
        found: Counter[str] = Counter()
        for (name, codes), count in self._counts.items():
            found[";".join([_plain(name), *map(_label, codes)])] += count
        return dict(found)


def _codes_of(frame: FrameType) -> _Stack:
    """Outermost first; of a deeper stack the inner part."""
    codes: list[CodeType] = []
    current: FrameType | None = frame
    while current is not None and len(codes) < MAX_DEPTH:
        codes.append(current.f_code)
        current = current.f_back
    return tuple(reversed(codes))


def _label(code: CodeType) -> str:
    module = code.co_filename.rpartition("/")[2].removesuffix(".py")
    return _plain(f"{module}.{code.co_qualname}")


def _plain(text: str) -> str:
    """A semicolon parts frames and a space the count."""
    return text.replace(";", ":").replace("\n", " ")
