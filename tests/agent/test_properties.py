"""Any sequence of admissions, failures, deletions, agent restarts and kubelet restarts leaves the ledger correct.

The embedded node knows the container of each call, so a wrong identification shows as a difference between its records
and the agent's ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.agent.support_agent import InnerAgent, open_agent
from tests.sandbox.support_sandbox import HELD_ADMISSIONS, NodeUnderTest, container, limits_of, open_test_node, pod

GPUS = 3
QUIET_S = 0.5
"""The kubelet's calls for one pod are closer together than this also where the machine is busy."""
PLUGIN_DOWN = ["error reading from server: EOF", "has been stopped", "no healthy devices present"]
"""The kubelet's words of a pod that it admits while the agent restarts: in the call, after it, once the devices are gone."""

KINDS: dict[str, dict[str, Any]] = {
    "small": pod("", container(cores=10, blocks=4)),
    "same": pod("", container(cores=30, blocks=20)),
    "large": pod("", container(cores=70, blocks=60)),
    "hungry": pod("", container(cores=20, blocks=80)),
    "two": pod("", container("a", cores=30, blocks=20), container("b", cores=30, blocks=20)),
    "whole": pod("", container(cores=100)),
    "pair": pod("", container(cores=200, blocks=150)),
    "bad": pod("", container(cores=150, blocks=4)),
    "late": pod("", container("a", cores=10, blocks=4), container("b", cores=10, blocks=97)),
    "plain": pod("", limits_of("main", {})),
    "chain": pod(
        "",
        container("m", cores=20, blocks=8),
        init=(
            container("i", cores=10, blocks=4),
            limits_of("s", {"tencent.com/vcuda-core": 10, "tencent.com/vcuda-memory": 4}, restartPolicy="Always"),
        ),
    ),
    "init": pod("", container("m", cores=40, blocks=8), init=(container("i", cores=10, blocks=30),)),
}

STEP = st.one_of(
    st.tuples(st.just("create"), st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4)),
    st.tuples(st.just("create"), st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4)),
    st.tuples(st.just("delete"), st.integers(0, 20)),
    st.tuples(st.just("force-delete"), st.integers(0, 20)),
    st.tuples(st.just("restart-agent"), st.just(0)),
    st.tuples(st.just("restart-kubelet"), st.just(0)),
)


class Play:
    """Carries the steps out and checks after each that nothing is shared and the ledger is correct."""

    def __init__(self, node: NodeUnderTest) -> None:
        self.node = node
        self.agent: InnerAgent | None = None
        self._stack = AsyncExitStack()
        self._count = 0
        self._has_restarted_agent = False

    async def start_agent(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()
        flags = ("--gpus", str(GPUS), "--allocation.cleanup-rejected-pods=false")
        self.agent = await self._stack.enter_async_context(open_agent(self.node, *flags))
        self.agent.parts.kubelet.gate.quiet_s = QUIET_S

    async def end(self) -> None:
        await self._stack.aclose()

    async def step(self, name: str, value: Any) -> None:
        if name == "create":
            for kind in value:
                self._count += 1
                raw = {**KINDS[kind], "metadata": {"name": f"{kind}-{self._count}"}}
                self.node.api.create_pod(raw)
        elif name in ("delete", "force-delete"):
            names = sorted(raw["metadata"]["name"] for raw in self.node.api.pods())
            if names:
                grace = 0 if name == "force-delete" else None
                self.node.api.delete_pod("default", names[value % len(names)], grace_period_s=grace)
        elif name == "restart-agent":
            # A pending pod may be scheduled at this moment, as another's rejection frees its capacity.
            self._has_restarted_agent = True
            await self.start_agent()
        else:
            await self.node.kubelet.restart()
            await self.node.wait_until(self._is_registered, "registered with the new kubelet")
            # A kubelet that admits pods before its plugins are registered again kills running pods (measured).
            self.node.kubelet.begin_admissions()

    async def check(self) -> None:
        await self.node.wait_until(self._is_settled, "every pod settled")
        assert self.agent is not None
        await self.node.wait_sound(self.agent)
        for raw in self.node.api.pods():
            kind, status = raw["metadata"]["name"].split("-")[0], raw["status"]
            if status.get("phase") == "Failed":
                assert status["reason"] == "UnexpectedAdmissionError", status
                # The last is the kubelet's own: the scheduler learns of a pod's end before its devices are free.
                reasons = ["NotEnough", "Fragmented", "requested number of devices unavailable"]
                reasons += ["InvalidRequest"] if kind == "bad" else []
                reasons += PLUGIN_DOWN if self._has_restarted_agent else []
                assert any(reason in status["message"] for reason in reasons), status["message"]
            else:
                assert kind != "bad" or status.get("phase") == "Pending", status

    def _is_settled(self) -> bool:
        return not self.node.calls.open_calls and all(map(_is_settled, self.node.api.pods()))

    def _is_registered(self) -> bool:
        assert self.agent is not None
        healthy = [count for _, count in self.node.kubelet.devices.capacity().values()]
        parts = self.agent.parts
        return len(healthy) == 2 and all(healthy) and not parts.kubelet.not_ready() and not parts.cluster.not_ready()


def _is_settled(raw: dict[str, Any]) -> bool:
    status = raw["status"]
    if raw["metadata"].get("deletionTimestamp"):
        return False
    if status.get("phase") in ("Running", "Succeeded", "Failed"):
        return True
    return any(c.get("reason") == "Unschedulable" for c in status.get("conditions", ()))


async def play(steps: Sequence[tuple[str, Any]], seed: int, version: str) -> None:
    async with open_test_node(seed=seed, kubelet_version=version, times=HELD_ADMISSIONS) as node:
        script = Play(node)
        await script.start_agent()
        node.kubelet.begin_admissions()
        try:
            for name, value in steps:
                await script.step(name, value)
                await script.check()
            for raw in node.api.pods():
                node.api.delete_pod("default", raw["metadata"]["name"])
            assert script.agent is not None
            await node.wait_until(lambda: not node.api.pods(), "every pod gone")
            await node.wait_until(lambda: not node.kubelet_held(), "the kubelet holds nothing")
            await node.wait_ledger_equal(script.agent)
            assert script.agent.holders_of() == 0 and len(script.agent.parts.node.cache) == 0
            assert script.agent.count("gpushare_pod_resources_lists_total", purpose="overlapped") == 0
        finally:
            await script.end()


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    # An example takes a second or two and failures may hang on time: shrinking would take minutes and find little.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    steps=st.lists(STEP, min_size=2, max_size=8),
    seed=st.integers(0, 1000),
    version=st.sampled_from(["1.31", "1.34", "1.36"]),
)
def test_the_ledger_stays_correct(steps: list[tuple[str, Any]], seed: int, version: str) -> None:
    """Never over-committed, never a wrong container, equal to the kubelet's records, and empty at the end."""
    asyncio.run(play(steps, seed, version))
