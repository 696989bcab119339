"""What the parts of a node share, and who hears of the embedded kubelet's calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from msgspec import Struct, field

from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.runtime.containers import ContainerRuntime
from gpushare_agent.sandbox.state_directory import NodePaths


class CallSubject(NamedTuple):
    """The container that a call is for, and the resource. Never sent: the device-plugin API names no pod."""

    pod_uid: str
    pod_name: str
    container: str
    resource: str


class CallObserver:
    """Hears of each call to plugins and drivers, and of PodResources. This one keeps nothing: a sandbox may run for long."""

    @contextmanager
    def plugin_call(
        self, method: str, subject: CallSubject, ids: Sequence[str], must_include: Sequence[str] = (), size: int = 0
    ) -> Iterator[Callable[[bytes], None]]:
        """The call is open while the block runs, which hands over the answer. `ids` are those asked for (Allocate,
        PreStartContainer) or the available ones (GetPreferredAllocation)."""
        yield lambda answer: None

    def pod_resources_call(self, method: str) -> None:
        """A client has called; it has no answer yet."""

    def dra_call(self, method: str, claims: Sequence[str] = ()) -> None:
        """A DRA driver is called about these claims."""


class NodeParts(Struct, frozen=True, kw_only=True, eq=False):
    """What the parts of a node share, over all starts of its kubelet."""

    name: str
    paths: NodePaths
    api: EmbeddedApiServer
    runtime: ContainerRuntime
    times: KubeletTimes
    rng: random.Random
    calls: CallObserver = field(default_factory=CallObserver)
