"""Isolation driver on the embedded node with the whole agent: limits on real cgroups, kept over a restart, and honesty.

The simulated driver remembers limits and has no memory to refuse; that programs are held is shown by `nox -s isolation`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.isolation.driver.limits import DriverLimits
from gpushare_agent.agent.isolation.kept import NOBODY
from gpushare_agent.agent.runtime.cgroups import CgroupVersion, cgroup_version
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.isolation import MemoryLimit
from gpushare_agent.core.model.names import ISOLATION_ANNOTATION
from tests.agent.support_agent import InnerAgent, open_agent, poll_until
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod

MIB = 1 << 20
MAY_SET = ("--isolation=driver", "--driver-limits.set-by-agent=true")


def share(name: str, *, blocks: int = 8, annotations: dict[str, str] | None = None, **env: str) -> dict[str, Any]:
    main = {**container("cuda", cores=30, blocks=blocks), "image": "sandbox/host", "command": ["sleep", "600"]}
    main["env"] = [{"name": key, "value": value} for key, value in env.items()]
    return pod(name, main, annotations=annotations)


def key_of(node: NodeUnderTest, name: str) -> ContainerKey:
    return ContainerKey(node.uid_of(name), "cuda")


async def has_limit(node: NodeUnderTest, agent: InnerAgent, name: str, mib: int) -> bool:
    """Whether the driver has this limit, on the pod's cgroup and on the container's."""
    key = key_of(node, name)
    found = node.kubelet.runtime.find(key.pod_uid, key.container)
    assert found is not None
    gpu = agent.parts.node.cache.view()[key].gpus[0]
    wanted = [MemoryLimit(gpu=gpu, cgroup=path, limit_bytes=mib * MIB) for path in (found.cgroup, found.cgroup.parent)]
    outcomes = await agent.parts.gpus.driver.keep_memory_limits(wanted, may_set=False)  # type: ignore[attr-defined]
    return not any(one.problem for one in outcomes)


async def wait_limit(node: NodeUnderTest, agent: InnerAgent, name: str, mib: int) -> None:
    limits = agent.parts.isolation.parts["driver"].services["driver limits"]
    assert isinstance(limits, DriverLimits)
    await limits.reconcile()
    assert await has_limit(node, agent, name, mib)


def require_v2(node: NodeUnderTest) -> None:
    if cgroup_version(Path(node.kubelet.runtime.cgroup_root)) is not CgroupVersion.V2:
        pytest.skip("the sandbox's containers are in no cgroup v2 here")


async def test_a_share_has_its_limit_and_again_after_a_restart() -> None:
    """An agent that comes back finds no limit at this driver, which has forgotten, and sets it on what runs."""
    async with open_test_node() as node:
        require_v2(node)
        async with open_agent(node, *MAY_SET) as agent:
            await node.start_pods(share("first"))
            await wait_limit(node, agent, "first", 8 * 256)
            kept = agent.parts.isolation.kept(agent.parts.node.cache.view()[key_of(node, "first")])
            assert kept is not None and (kept.memory_by, kept.compute_by) == ("driver", NOBODY)
        async with open_agent(node, *MAY_SET) as agent:
            await wait_limit(node, agent, "first", 8 * 256)


async def test_a_container_without_its_limit_is_kept_by_nobody_and_its_pod_hears_of_it() -> None:
    """Where the agent may not set it and nobody else did: in the document, the metric's source, and an Event."""
    async with open_test_node() as node:
        require_v2(node)
        async with open_agent(node, "--isolation=driver") as agent:
            await node.start_pods(share("bare"))
            limits = agent.parts.isolation.parts["driver"].services["driver limits"]
            assert isinstance(limits, DriverLimits)
            await poll_until(lambda: limits.problem(key_of(node, "bare")), "a container without its limit")
            kept = agent.parts.isolation.kept(agent.parts.node.cache.view()[key_of(node, "bare")])
            assert kept is not None and kept.memory_by == NOBODY
            await poll_until(lambda: node.messages("MemoryLimitMissing"), "an Event on the pod")


async def test_a_spec_with_a_limit_of_its_own_is_refused() -> None:
    """It would replace the agent's; also where the isolation is the pod's choice."""
    async with open_test_node() as node:
        require_v2(node)
        async with open_agent(node, "--isolation=none", "--isolations-allowed=driver") as agent:
            node.api.create_pod(
                share("own", annotations={ISOLATION_ANNOTATION: "driver"}, NVIDIA_GPU_MEMORY_LIMIT="999999")
            )
            words = await node.wait_settled("own")
            assert "NVIDIA_GPU_MEMORY_LIMIT" in words and "Nothing was allocated" in words
            assert agent.held() == {}
