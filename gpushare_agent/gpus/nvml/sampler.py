"""Sampling with an opening of NVML of its own, so that a sample that hangs keeps nobody from looking at the GPUs.

NVML may be called from several threads and counts its openings: it shuts down when the last one is closed, and only a
whole shutdown brings back a GPU that was reset, or a driver that was loaded anew. So the reader's thread, which notices
these, also makes the sampler let go. It waits for a round that is under way, but not for one that hangs.

Blocking, only for nvml.py: `sample` from the sampling thread, `looked` from the reader's, `let_go` from either. State owned:
the opening, whose turn it is to use it, and what the last look found.
"""

from __future__ import annotations

import threading

from gpushare_agent.gpus.nvml.session import NvmlSession
from gpushare_agent.gpus.nvml.usage import NvmlUsage
from gpushare_agent.model.usage import DriverSample

_LET_GO_WAIT_S = 0.25
"""A round takes about a tenth of a second; the look that waits for it has a timeout of its own."""


class NvmlSampler:
    def __init__(self) -> None:
        self._session = NvmlSession()
        self._usage = NvmlUsage(self._session)
        self._turn = threading.Lock()
        self._must_let_go = False
        self._found: object = None
        self._enumerated: object = None

    def sample(self) -> DriverSample:
        """One round over all GPUs. Raises Unavailable."""
        with self._turn:
            self._let_go_if_asked()
            found = self._found
            if found != self._enumerated:
                self._session.forget_gpus()
                self._enumerated = found
            try:
                return self._usage.sample()
            finally:
                self._let_go_if_asked()

    def let_go(self) -> None:
        """Closes the sampler's opening now, or when the round that is under way ends; the next sample opens it again."""
        self._must_let_go = True
        if self._turn.acquire(timeout=_LET_GO_WAIT_S):
            try:
                self._let_go_if_asked()
            finally:
                self._turn.release()

    def looked(self, found: object) -> None:
        """What a look found; where that is not what the look before found, the GPUs are enumerated anew."""
        self._found = found

    def _let_go_if_asked(self) -> None:
        if self._must_let_go:
            self._must_let_go = False
            self._session.close()
