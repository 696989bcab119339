"""Every decision of the whole agent explains itself: in its log of decisions, and in the Event on a refused pod."""

from __future__ import annotations

from typing import Any

from gpushare_agent.core.kube.events import COMPONENT
from gpushare_agent.core.model.decision_records import DecisionRecord
from gpushare_agent.core.model.names import GPU_ASSIGNED_ANNOTATION
from tests.agent.support_agent import InnerAgent, open_agent, poll_until, write_faults
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod


def record_of(agent: InnerAgent, name: str) -> DecisionRecord:
    """The newest decision about a pod."""
    return agent.parts.node.decisions.newest(1, pod=name)[0]


def verdicts(record: DecisionRecord) -> list[str]:
    return [candidate.verdict for candidate in record.candidates]


async def refuse(node: NodeUnderTest, agent: InnerAgent, manifest: dict[str, Any]) -> tuple[DecisionRecord, str]:
    """The decision, and the text of the Event."""
    name = manifest["metadata"]["name"]
    node.api.create_pod(manifest)
    await node.wait_phase(name, "Failed")

    def messages() -> list[str]:
        events = [one for one in node.api.events() if one["source"]["component"] == COMPONENT]
        return [one["message"] for one in events if one["involvedObject"]["name"] == name]

    await poll_until(messages, f"an Event on pod {name}")
    return record_of(agent, name), messages()[0]


async def test_what_was_refused_is_explained() -> None:
    """For memory, for fragmentation, and where a GPU is not counted because it is unhealthy."""
    async with open_test_node() as node:
        faults = node.paths.faults
        async with open_agent(node, "--simulated.gpus=3", "--placement.share-policy=spread") as agent:
            memory, memory_reported = await refuse(node, agent, pod("memory", container(cores=10, blocks=97)))
            await node.start_pods(*(pod(name, container(cores=50, blocks=10)) for name in ("first", "second", "third")))
            fragmented, fragmented_reported = await refuse(
                node, agent, pod("fragmented", container(cores=60, blocks=1))
            )
            node.api.delete_pod("default", record_on(agent, 2))
            await node.wait_until(lambda: len(agent.held()) == 2, "two shares left")
            write_faults(faults, lost={"2": "fell off the bus"})
            sick = agent.uuid_of(2)
            await node.wait_until(
                lambda: not agent.parts.node.inventory.current.by_uuid()[sick].is_healthy, "an unhealthy GPU"
            )
            unhealthy, unhealthy_reported = await refuse(node, agent, pod("unhealthy", container(cores=60, blocks=1)))
    assert memory.reason == "NotEnoughMemory" and verdicts(memory) == ["too small, with 24 GiB in all"] * 3
    each = "; ".join(f"GPU {n}: too small, with 24 GiB in all" for n in range(3))
    assert f"GPU by GPU: {each}." in memory_reported
    assert fragmented.reason == "Fragmented" and verdicts(fragmented) == ["10 cores short"] * 3
    assert "GPU 2: 10 cores short" in fragmented_reported
    assert verdicts(unhealthy)[:2] == ["10 cores short"] * 2
    assert verdicts(unhealthy)[2].startswith("unhealthy: ") and "fell off the bus" in verdicts(unhealthy)[2]
    assert "Out of service, and not counted: GPU 2" in unhealthy.explanation
    assert "fell off the bus" in unhealthy_reported
    assert not any(candidate.is_chosen for record in (memory, fragmented, unhealthy) for candidate in record.candidates)


def record_on(agent: InnerAgent, gpu: int) -> str:
    """The pod that was placed on this GPU."""
    placed = (r for r in agent.parts.node.decisions.newest(50) if r.gpus == (gpu,))
    return next(placed).pod


async def test_the_owner_of_a_share_hears_of_a_mistyped_annotation() -> None:
    """In an Event, one for all of them; a pod without a share, and one whose annotations are right, have none."""
    mistyped = {"tencent.com/vcuda-core-limits": "60", "gpushare-agent/isolaton": "mps"}
    async with open_test_node() as node, open_agent(node) as agent:
        node.api.create_pod(pod("other", container(), annotations=mistyped))
        right = {"tencent.com/vcuda-core-limit": "60", "tencent.com/team": "a"}
        node.api.create_pod(pod("right", container(cores=30, blocks=8), annotations=right))
        node.api.create_pod(pod("share", container(cores=30, blocks=8), annotations=mistyped))
        await node.wait_running("other", "right", "share")

        await poll_until(lambda: node.messages("AnnotationUnknown"), "an Event on pod share")
        [message] = node.messages("AnnotationUnknown")
        assert ("AnnotationUnknown", message) in node.events_of("share")
        assert (
            "gpushare-agent/isolaton is unknown and has no effect: did you mean tencent.com/gpu-isolation?" in message
        )
        assert "did you mean tencent.com/vcuda-core-limit?" in message
        assert record_of(agent, "share").ignored == message


async def test_an_instance_that_waits_reports_no_annotation() -> None:
    """The one that serves did: what is queued meanwhile would be sent hours later."""
    async with open_test_node() as node, open_agent(node) as agent:
        agent.parts.cluster.may_write.clear()
        await node.start_pods(
            pod("share", container(cores=30, blocks=8), annotations={"tencent.com/vcuda-core-limits": "60"})
        )
        store = agent.parts.node.pods

        def annotated() -> bool:
            """The agent's own annotation is the last change of the pod's annotations."""
            return any(one.name == "share" and GPU_ASSIGNED_ANNOTATION in one.annotations for one in store.pods())

        await poll_until(annotated, "the agent seeing the pod with its annotations")
        agent.parts.cluster.may_write.set()
        await node.start_pods(
            pod("next", container(cores=30, blocks=8), annotations={"tencent.com/vcuda-core-limits": "6"})
        )

        await poll_until(lambda: node.messages("AnnotationUnknown"), "an Event on pod next")
        assert len(node.messages("AnnotationUnknown")) == 1 and dict(node.events_of("next"))["AnnotationUnknown"]
