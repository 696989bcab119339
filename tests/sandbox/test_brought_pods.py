"""What becomes of a pod that people bring: which of its commands run, its Events, and what says why it waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.sandbox.kubelet.container_config import is_harmless
from gpushare_agent.sandbox.manifests import read_manifests
from gpushare_agent.sandbox.node import open_embedded_cluster
from gpushare_agent.sandbox.pod_controllers import PodControllers
from gpushare_agent.sandbox.report import reason_and_message
from tests.sandbox.support_sandbox import (
    CORE,
    MEMORY,
    SHORT_TIMES,
    SmallPlugin,
    device_ids,
    limits_of,
    open_test_node,
    pod,
    under_test,
)
from tests.support_deadline import poll_until

CLAIMS_SAMPLE = Path(__file__).parents[2] / "manifests/samples/claims/share.yaml"


@pytest.mark.parametrize(
    "script",
    [
        "true", "echo a; sleep 1 && exit 3", "while true; do echo x; sleep 5; done", "for i in 1 2; do echo $i; done",
        'if [ -n "$X" ]; then echo "a; rm b"; else exit 1; fi', "echo one\necho two", "printf 'a\\n'", "! false || true",
    ],
)  # fmt: skip
def test_a_script_that_prints_sleeps_and_ends_is_run(script: str) -> None:
    """By either shell, by its name or where a system has it."""
    assert is_harmless(("sh", "-c", script)) and is_harmless(("/bin/bash", "-c", script))


@pytest.mark.parametrize(
    "script",
    [
        "rm -rf /data", "echo a; rm b", "echo a\nrm b", "echo a > b", "echo $(rm b)", "echo `rm b`", "sleep 1 & rm b",
        "true | rm b", "(rm b)", "rm() { true; }", "$RM b", "echo$X b", "while rm b; do true; done", "# a\nrm b",
        "for i in 1; do rm b; done", "eval rm b", "true 'open", "exec rm b",
        "echo a # don't\nrm b\n# it's", "echo \"$\\\n(rm b)\"", "echo $'\\''; rm b #'",
        "printf -v X a; echo ${X@P}", "echo $[X]", "test -v X", "X=1 rm b", 'e"ch"; rm b', "nvidia-smi -L",
    ],
)  # fmt: skip
def test_a_script_with_anything_else_is_not(script: str) -> None:
    """It was written for the files of an image."""
    assert not is_harmless(("sh", "-c", script))


@pytest.mark.parametrize(
    ("command", "is_run"),
    [
        (("sleep", "infinity"), True), (("/bin/echo", "rm"), True), (("python", "-c", "1"), False), (("sh",), False),
        (("sh", "script.sh"), False), (("sh", "-c", "true", "x"), False), (("env", "rm"), False),
        (("/opt/app/bin/test",), False), (("./true",), False),
    ],
)  # fmt: skip
def test_a_program_is_run_by_its_name(command: tuple[str, ...], is_run: bool) -> None:
    """Of a shell only a script that is in the manifest."""
    assert is_harmless(command) is is_run


def of_image(*command: str, **extra: Any) -> dict[str, Any]:
    return {"name": "main", "image": "busybox:1.36", "command": list(command), **extra}


async def test_an_ordinary_images_command_ends_with_its_code() -> None:
    """Its output is the log."""
    async with open_test_node() as node:
        for name, code, phase in (("good", 0, "Succeeded"), ("bad", 3, "Failed")):
            script = of_image("sh", "-c", f"echo {name}; exit {code}")
            node.api.create_pod(pod(name, script, restartPolicy="Never"))
            await node.wait_phase(name, phase)
            assert node.printed(name) == f"{name}\n"
        assert node.messages("CommandNotRun") == []


async def test_what_is_not_run_sleeps_and_says_so() -> None:
    """In an Event and in the log; a time from the annotation wins over a command that could be run."""
    timed = {"sandbox.gpushare/run-seconds": "0"}
    async with open_test_node() as node:
        await node.start_pods(pod("a", of_image("python", "train.py")))
        said = "The sandbox runs no image: instead of `{}` of busybox:1.36 this container sleeps {}"
        first = said.format("python train.py", "until it is deleted")
        assert node.messages("CommandNotRun") == [first] and node.printed("a") == f"{first}\n"
        shown = Path(f"/proc/{node.container_of('a').pid}/cmdline")
        await poll_until(lambda: shown.read_bytes() == b"sleep\0infinity\0", "the stand-in")
        node.api.create_pod(pod("b", of_image("sleep", "infinity"), annotations=timed))
        await node.wait_phase("b", "Succeeded")
        assert node.messages("CommandNotRun")[1:] == [said.format("sleep infinity", "0 s and ends well")]


async def test_a_jobs_container_ends_though_its_command_is_not_run() -> None:
    """A Job that never ends would be no Job."""
    template = {"spec": {"containers": [of_image("python", "train.py")], "restartPolicy": "Never"}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": {"template": template}}
    async with open_test_node() as node:
        node.api.create("jobs", job)
        PodControllers(node.api).reconcile()
        (made,) = node.api.pods()
        await node.wait_phase(made["metadata"]["name"], "Running")
        (said,) = node.messages("CommandNotRun")
        assert said.endswith("this container sleeps 10 s and ends well")


async def test_a_pod_has_the_events_of_a_cluster() -> None:
    """In their order, before those that only the sandbox has."""
    async with open_test_node() as node:
        await node.start_pods(pod("a", of_image("sleep", "infinity")))
        assert [(one["reason"], one["source"]["component"], one["type"]) for one in node.api.events()] == [
            ("Scheduled", "default-scheduler", "Normal"), ("Pulled", "kubelet", "Normal"),
            ("Created", "kubelet", "Normal"), ("Started", "kubelet", "Normal"),
        ]  # fmt: skip
        assert node.messages("Scheduled") == ["Successfully assigned default/a to node-a"]
        assert {one["involvedObject"].get("fieldPath") for one in node.api.events()[1:]} == {"spec.containers{main}"}
        await node.remove_pod("a")
        assert node.messages("Killing") == ["Stopping container main"]


async def test_the_oldest_events_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cluster's are after an hour."""
    monkeypatch.setattr("gpushare_agent.sandbox.api.objects.MAX_EVENTS", 3)
    async with open_test_node() as node:
        raw = node.api.create_pod(pod("a", schedulerName="none"))
        for number in range(5):
            node.api.record_event(raw, reason="Seen", message=str(number), source="test")
        assert node.messages("Seen") == ["2", "3", "4"]


async def test_a_pod_for_another_scheduler_waits_for_it() -> None:
    """Without a word, as on a cluster; pods of the default one go on."""
    async with open_test_node() as node:
        for name, scheduler in (("a", "volcano"), ("b", "gpushare-scheduler"), ("c", "default-scheduler")):
            node.api.create_pod(pod(name, schedulerName=scheduler))
        await node.wait_phase("c", "Running")
        for name in ("a", "b"):
            assert node.api.pod("default", name)["status"]["phase"] == "Pending"
            assert not any(one["involvedObject"]["name"] == name for one in node.api.events())
        assert reason_and_message(node.api.pod("default", "a")) == ("", "waits for the scheduler volcano")


async def test_claims_that_no_agent_serves_name_what_to_start() -> None:
    """The sample of claims: in the answer to a client, and in the pod's Event; also where its class is there."""
    template, claiming = (m.raw for m in read_manifests([CLAIMS_SAMPLE]))
    hint = "`gpushare-agent sandbox --dra` starts one."
    async with open_test_node() as node, ClientSession(headers=node.api.headers) as session:
        namespaced = "/namespaces/default"
        for path, raw in (
            (f"/apis/resource.k8s.io/v1{namespaced}/resourceclaimtemplates", template),
            (f"/api/v1{namespaced}/pods", claiming),
            (f"/api/v1{namespaced}/pods", pod("plain")),
        ):
            async with session.post(node.api.url + path, json=raw) as answer:
                assert answer.status == 201
                assert (hint in answer.headers.get("Warning", "")) == (raw["metadata"]["name"] != "plain")
        await node.kubelet.wait_for(lambda: node.messages("FailedScheduling"))
        lacks = "0/1 nodes are available: 1 request gpu: device class gpu.gpushare-agent does not exist."
        assert node.messages("FailedScheduling")[0].startswith(lacks)
        node.api.create("deviceclasses", {"metadata": {"name": "gpu.gpushare-agent"}, "spec": {}})
        await node.kubelet.wait_for(lambda: len(node.messages("FailedScheduling")) == 2)
        assert all(one.endswith(hint) for one in node.messages("FailedScheduling"))


async def test_a_resource_that_no_agent_offers_names_the_setting() -> None:
    """Only of those that a setting would offer, and not before an agent has offered anything."""
    async with open_test_node() as node:
        asked = limits_of("main", {"nvidia.com/gpu": 1, "example.com/fpga": 1})
        node.api.create_pod(pod("early", asked))
        await node.kubelet.wait_for(lambda: node.messages("FailedScheduling"))
        lacks = "0/1 nodes are available: 1 Insufficient example.com/fpga, 1 Insufficient nvidia.com/gpu."
        assert node.messages("FailedScheduling") == [lacks]
        async with node.open_plugin(SmallPlugin(CORE, device_ids("GPU-11111111", count=100))):
            node.api.create_pod(pod("late", asked))
            await node.kubelet.wait_for(lambda: len(node.messages("FailedScheduling")) >= 3)
            remedy = " A sandbox with --nvidia.enabled=true offers nvidia.com/gpu."
            assert set(node.messages("FailedScheduling")[1:]) == {lacks + remedy}
            # With a class it is for claims, and the agent has to serve what the class selects.
            served = {"extendedResourceName": "nvidia.com/gpu", "selectors": []}
            node.api.create("deviceclasses", {"metadata": {"name": "gpu.nvidia.com"}, "spec": served})
            node.api.create_pod(pod("last", asked))
            by_class = " A sandbox with --dra.nvidia_names=true offers nvidia.com/gpu."
            await node.kubelet.wait_for(lambda: any(m.endswith(by_class) for m in node.messages("FailedScheduling")))


async def test_a_wrong_request_is_told_what_to_write(short_dir: Path) -> None:
    """By the scheduler that asks no extender: an extender writes an Event of its own."""
    async with open_embedded_cluster(
        short_dir / "s", node_names=["desk"], times=SHORT_TIMES, names=ResourceNames()
    ) as cluster:
        node = under_test(*cluster.nodes)
        async with node.open_plugin(SmallPlugin(CORE, device_ids("GPU-11111111", count=100))):
            node.api.create_pod(pod("bytes", limits_of("main", {CORE: 30, MEMORY: "4Gi"})))
            await node.kubelet.wait_for(lambda: node.messages("FailedScheduling"))
        assert node.messages("FailedScheduling")[-1].endswith(f"Write {MEMORY}: 16 for 4 GiB.")
