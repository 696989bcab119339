"""`kubectl inspect gpushare` next to what the kubelet has given, on the embedded node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse
from tests.agent.support_agent import open_agent
from tests.agent.test_gpushare import FLAGS, memory
from tests.cluster.support_gpushare_inspect import GPU_MEM, Inspected, inspect_node
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod


def inspected(node: NodeUnderTest) -> Inspected:
    return inspect_node(node.api.store.find("nodes", ("", node.name)) or {}, node.api.pods())


def given(node: NodeUnderTest, *names: str) -> Counter[int]:
    """Units of each GPU that the kubelet has given these pods, by the answers and device IDs of its calls."""
    found: Counter[int] = Counter()
    for call in (call for name in names for call in node.calls_of(name, "Allocate") if call.resource == GPU_MEM):
        index = ContainerAllocateResponse.parse(call.response).envs["ALIYUN_COM_GPU_MEM_IDX"]
        found[int(index)] += len(call.device_ids)
    return found


def shows(node: NodeUnderTest, gpus: tuple[str, ...], of_node: str) -> Callable[[], bool]:
    return lambda: inspected(node) == Inspected(gpus, None, of_node)


async def test_its_sums_are_what_the_kubelet_has_given() -> None:
    """Pods on one GPU and on two, one that no node has room for, one that is deleted. Memory of other resources leaves the
    totals: the node's is what gpu-mem may have, and of a GPU the tool shows an equal part of that."""
    async with open_test_node() as node, open_agent(node, *FLAGS):
        await node.wait_until(shows(node, ("0/24", "0/24"), "0/48"), "the empty node")
        plan = {
            "tencent.com/predicate-node": node.name,
            "tencent.com/predicate-gpu-idx-0": "0",
            "tencent.com/predicate-gpu-idx-1": "1",
        }
        await node.start_pods(pod("one", memory(6), memory(2, "side")))
        await node.start_pods(pod("two", memory(3), memory(4, "side"), annotations=plan))
        node.api.create_pod(pod("waits", memory(40)))
        units = given(node, "one", "two")
        assert sorted(units.values()) == [4, 11]
        await node.wait_until(shows(node, (f"{units[0]}/24", f"{units[1]}/24"), "15/48"), "what was given")
        await node.start_pods(pod("share", container(cores=50, blocks=40)))
        await node.wait_allocatable(GPU_MEM, 38)
        assert shows(node, (f"{units[0]}/19", f"{units[1]}/19"), "15/38")()
        await node.remove_pod("one", grace_period_s=0)
        left = given(node, "two")
        await node.wait_until(shows(node, (f"{left[0]}/19", f"{left[1]}/19"), "7/38"), "what is left")


async def test_a_pod_that_is_not_admitted_yet_is_pending() -> None:
    """Bound to the node without an annotation, as in GPUShare before its plugin has answered."""
    async with open_test_node() as node, open_agent(node, *FLAGS):
        await node.wait_until(shows(node, ("0/24", "0/24"), "0/48"), "the empty node")
        await node.start_pods(pod("first", memory(6)))
        await node.wait_until(lambda: inspected(node).pending is None, "the annotations")
        bound = {"metadata": {"name": "bound"}, "spec": {**pod("bound", memory(5))["spec"], "nodeName": node.name}}
        found = inspect_node(node.api.store.find("nodes", ("", node.name)) or {}, [*node.api.pods(), bound])
        assert (found.pending, found.node.split("/")[0]) == (5, "11")
