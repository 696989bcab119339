"""The API server is unavailable, stalls, and returns: at the agent's start and later."""

from __future__ import annotations

from gpushare_agent.agent.auto_isolation import NodeSettings
from gpushare_agent.agent.composition import build
from gpushare_agent.agent.kubelet.device_plugin import CALL_TIMEOUT_S
from gpushare_agent.core.settings.settings import load_settings
from tests.agent.support_agent import open_agent, open_child, wait_synced
from tests.cluster.support_kube import pod_named
from tests.sandbox.support_sandbox import HELD_ADMISSIONS, NodeUnderTest, container, open_test_node, pod

SHORT_LOOKUP = "--kubelet.pod-lookup-timeout-s=1"


async def _refused(node: NodeUnderTest, name: str) -> str:
    """The message of a pod that must have been refused as UNAVAILABLE."""
    message = await node.wait_settled(name)
    assert node.api.pod("default", name)["status"]["phase"] == "Failed", message
    assert "code = Unavailable" in message, message
    return message


async def test_without_an_api_server_the_agent_registers_and_says_why_it_refuses() -> None:
    """No pod can be identified before the kubelet's version is known; then admissions go on."""
    async with open_test_node() as node:
        await node.api.stop_listening()
        async with open_agent(node, SHORT_LOOKUP, wait=False) as agent:
            await node.wait_registered()
            node.api.create_pod(pod("early", container(cores=30, blocks=10)))
            message = await _refused(node, "early")
            assert "version is not known" in message and "Create the pod again" in message
            assert agent.holders_of() == 0
            [why] = agent.parts.cluster.not_ready()
            assert "has not listed this node's pods yet: cannot list the pods" in why and ": refused" in why
            silent_s = agent.parts.node.metrics.registry.get_sample_value("gpushare_pod_event_age_seconds")
            assert silent_s is not None, "an API server that was never heard is silent, too"
            await node.api.start_listening()
            await wait_synced(agent.parts)
            await node.start_pods(pod("late", container(cores=30, blocks=10)))
            await node.wait_ledger_equal(agent)


async def test_the_longest_lookup_ends_before_its_call() -> None:
    """Else the reason is lost with the call, and the Allocate that follows blames a restart of the agent."""
    async with open_test_node() as node:
        settings = load_settings(node.arguments("--kubelet.pod-lookup-timeout-s=10"), {}).settings
        agent = build(NodeSettings(settings=settings))
        assert agent.kubelet.admission.identification.lookup_s < CALL_TIMEOUT_S


async def test_an_api_server_that_is_back_while_an_admission_waits_still_serves_it() -> None:
    """The admission that found no API server is answered as soon as there is one, within its two seconds."""
    async with open_test_node() as node:
        await node.api.stop_listening()
        async with open_agent(node, "--kubelet.pod-lookup-timeout-s=5", wait=False) as agent:
            await node.wait_registered()
            node.api.create_pod(pod("patient", container(cores=30, blocks=10)))
            await node.wait_until(lambda: node.calls.open_calls, "the admission to begin")
            await node.api.start_listening()
            await node.wait_running("patient")
            await node.wait_ledger_equal(agent)


async def test_pods_known_before_the_api_server_went_are_served_without_it() -> None:
    """A pod that the watch has delivered needs no further answer of the API server: admission, restart of a container."""
    async with open_test_node(times=HELD_ADMISSIONS) as node, open_agent(node, SHORT_LOOKUP) as agent:
        await node.kubelet.stop()
        node.api.create_pod(pod("known", container("a", cores=30, blocks=10), container("b", cores=20, blocks=5)))
        await node.wait_until(lambda: pod_named(agent.parts.node.pods, "known"), "the agent to hear of the pod")
        await node.api.stop_listening()
        await node.kubelet.start()
        await node.wait_healthy_devices()
        node.kubelet.begin_admissions()
        await node.wait_running("known")
        node.kill_container("known", "a")
        await node.wait_until(lambda: len(node.calls_of("known", "PreStartContainer")) == 3, "the container's restart")
        assert not node.calls_of("known", "PreStartContainer")[-1].error
        await node.wait_sound(agent)


async def test_pods_unknown_while_the_api_server_is_gone_are_refused_and_come_in_when_it_is_back() -> None:
    """The text names the API server; what ended meanwhile is freed when it is back."""
    async with open_test_node() as node, open_agent(node, SHORT_LOOKUP, "--simulated.gpus=1") as agent:
        await node.start_pods(pod("before", container(cores=60, blocks=40)))
        await node.api.stop_listening()
        node.api.create_pod(pod("unheard", container(cores=40, blocks=10)))
        assert "API server did not answer" in await _refused(node, "unheard")
        node.api.delete_pod("default", "before", grace_period_s=0)
        await node.api.start_listening()
        await node.wait_until(lambda: agent.holders_of() == 0, "the ended pod's share freed")
        await node.start_pods(pod("after", container(cores=100)))
        await node.wait_ledger_equal(agent)


async def test_an_api_server_that_stalls_costs_an_admission_its_bound_and_no_more() -> None:
    """Connections that are accepted and never answered: refused in time, and the node goes on."""
    async with open_test_node() as node, open_agent(node, SHORT_LOOKUP) as agent:
        node.api.running.clear()
        node.api.create_pod(pod("stuck", container(cores=30, blocks=10)))
        assert "API server did not answer" in await _refused(node, "stuck")
        node.api.running.set()
        await node.wait_until(lambda: pod_named(agent.parts.node.pods, "stuck"), "the watch to go on")
        await node.start_pods(pod("after", container(cores=30, blocks=10)))
        await node.wait_ledger_equal(agent)


async def test_an_api_server_that_forgets_its_history_loses_the_agent_nothing() -> None:
    """410 Gone in the middle of the watch, deletions missed: the next list corrects it."""
    async with open_test_node() as node, open_agent(node) as agent:
        await node.start_pods(*(pod(name, container(cores=60, blocks=40)) for name in ("one", "two", "three")))
        await node.api.stop_listening()
        node.api.delete_pod("default", "two", grace_period_s=0)
        node.api.store.compact()
        await node.api.start_listening()
        await node.wait_until(lambda: pod_named(agent.parts.node.pods, "two") is None, "a new list")
        await node.wait_ledger_equal(agent)
        assert agent.holders_of() == 120


async def test_an_agent_that_is_reported_of_no_api_server_ends_before_the_kubelet_hears_of_it() -> None:
    """Exit code 1 with the cure; registering first would make the resources come and go with every restart."""
    async with open_test_node() as node, open_child(node, "--kubeconfig=/none", wait=False) as child:
        assert await child.wait() == 1
        assert "--kubeconfig" in node.paths.agent_log.read_text()
        assert not node.kubelet.devices.capacity()
