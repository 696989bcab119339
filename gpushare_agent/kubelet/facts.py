"""The kubelet's version, from the Node object, and how long it has been up, from its socket.

On 1.29 and older a PodResources List inside GetPreferredAllocation can panic the kubelet (measured), so the version must
be known before the first one; until then admissions wait, within their bound. State: the version last read.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import structlog
from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from gpushare_agent.kit.json_schema import decoded_or
from gpushare_agent.kit.supervision import wait_for
from gpushare_agent.model.errors import AgentError, StartupError, Unavailable

log = structlog.get_logger(__name__)

OLDEST = (1, 30)
RETRY_S = 2.0
ADMISSION_RETRY_S = 0.1
"""Between two reads of the Node while an admission waits for the version."""
_VERSION = re.compile(r"v?(\d{1,3})\.(\d{1,4})")


class _NodeInfo(Struct, frozen=True, rename="camel"):
    kubelet_version: str = ""


class _NodeStatus(Struct, frozen=True, rename="camel"):
    node_info: _NodeInfo = _NodeInfo()


class _Node(Struct, frozen=True):
    status: _NodeStatus = _NodeStatus()


_NODE = Decoder(_Node)


def kubelet_version(raw_node: Raw) -> str:
    """The kubelet's version as the Node has it, empty where it has none."""
    return decoded_or(_NODE, raw_node, _Node).status.node_info.kubelet_version


class ReadsNodes(Protocol):
    async def get_node(self, name: str) -> Raw: ...


class KubeletFacts(Struct, kw_only=True, eq=False):
    """Ask `wait_lists_inside` before a List; run `run` once an API connection may come."""

    node_name: str
    kubelet_socket: Path
    allow_unsupported: bool
    retry_s: float = RETRY_S
    wall_clock: Callable[[], float] = time.time
    _version: tuple[int, int] | None = None
    _text: str = ""
    _is_known: asyncio.Event = field(default_factory=asyncio.Event)
    _is_outdated: asyncio.Event = field(default_factory=asyncio.Event)
    _has_waiter: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: int = 0
    _unavailable_reason: str = "it has not been read yet"

    @property
    def version(self) -> str:
        """The version as in the Node object, empty while unknown."""
        return self._text

    def take_over(self, previous: KubeletFacts) -> None:
        """What was read before a reload: admissions need not wait until it is read again."""
        if previous._is_known.is_set():
            self._version, self._text = previous._version, previous._text
            self._is_known.set()

    def age_s(self) -> float | None:
        """Seconds since the kubelet created its socket, None where there is none."""
        try:
            # A file's times are of the wall clock, which may have been set back since: never negative.
            return max(0.0, self.wall_clock() - self.kubelet_socket.stat().st_ctime)
        except OSError:
            return None

    def kubelet_restarted(self) -> None:
        """It may have another version now: the Node is read again. The last version counts until then."""
        self._is_outdated.set()

    async def wait_lists_inside(self, *, timeout_s: float) -> bool:
        """Whether a List inside GetPreferredAllocation is safe. Raises Unavailable while the version is unknown."""
        self._waiting += 1
        self._has_waiter.set()
        try:
            if not await wait_for(self._is_known, timeout_s):
                raise Unavailable(
                    f"the kubelet's version is not known yet, because node {self.node_name} could not be read: "
                    f"{self._unavailable_reason}"
                )
        finally:
            self._waiting -= 1
        # None: it cannot be read, which `_read_version` has logged. Refusing every pod for a spelling would be worse.
        return self._version is None or self._version >= OLDEST

    async def run(self, api: ReadsNodes) -> NoReturn:
        """Reads the Node at the start and after each restart of the kubelet, until cancelled. Raises StartupError on a
        kubelet that is too old, unless the settings allow it."""
        while True:
            try:
                async with asyncio.timeout(10):
                    node = await api.get_node(self.node_name)
            except (AgentError, TimeoutError) as e:
                self._unavailable_reason = str(e) or "no answer within 10 s"
                log.warning("kubelet_version_unknown", node=self.node_name, error=self._unavailable_reason)
                await self._pause()
                continue
            self._read_version(kubelet_version(node))
            await self._is_outdated.wait()
            self._is_outdated.clear()

    async def _pause(self) -> None:
        """Waits until the next read of the Node; shorter where an admission waits for it."""
        # Always at least this long: an admission that waits must not make the agent ask the API server in a tight loop.
        await asyncio.sleep(min(ADMISSION_RETRY_S, self.retry_s))
        if not self._waiting:
            self._has_waiter.clear()
            await wait_for(self._has_waiter, self.retry_s)

    def _read_version(self, text: str) -> None:
        match = _VERSION.match(text)
        version = (int(match[1]), int(match[2])) if match else None
        if version is None:
            log.warning("kubelet_version_unreadable", node=self.node_name, version=text[:64], assumed="supported")
        elif version < OLDEST:
            if not self.allow_unsupported:
                raise StartupError(
                    f"kubelet {text} on node {self.node_name} is older than {OLDEST[0]}.{OLDEST[1]}: a PodResources "
                    "List during an admission can crash it. Upgrade the kubelet, or set --kubelet.allow-unsupported=true "
                    "(pods are then identified by the API server alone, and refused where two match)."
                )
            log.warning("kubelet_unsupported", version=text, identified_by="pod store alone")
        # Read again after each restart of the kubelet; the log says only what is new.
        if text != self._text:
            log.info("kubelet_version", version=text)
        self._version, self._text = version, text
        self._is_known.set()
