"""Scheduler, manifests, state directory and report of the embedded node."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse, DeviceSpec, Mount
from gpushare_agent.sandbox.manifests import ManifestError, parse_manifests, read_manifests, sample_manifests
from gpushare_agent.sandbox.node import EmbeddedNode
from gpushare_agent.sandbox.pod_manifest import containers_of, pod_requests
from gpushare_agent.sandbox.render import pod_line
from gpushare_agent.sandbox.report import ReportedNode, is_offered, reason_and_message, report
from gpushare_agent.sandbox.run import RunningNode, build_node, check_driver
from gpushare_agent.sandbox.state_directory import owned_state_directory
from tests.sandbox.support_sandbox import CORE, MEMORY, SmallPlugin, container, device_ids, open_test_node, pod

# --- scheduler ---


async def test_a_pod_that_fits_no_node_says_what_is_missing_and_runs_when_there_is_room() -> None:
    """Pending, Unschedulable, with the resource's name and an Event; bound when another pod goes."""
    async with open_test_node() as node, node.open_plugin(SmallPlugin(CORE, device_ids("a", count=100))):
        await node.start_pods(pod("first", container("main", cores=80)))
        node.api.create_pod(pod("second", container("main", cores=30)))

        await node.kubelet.wait_for(lambda: node.condition_of("second"))
        shown = node.condition_of("second")
        assert shown["reason"] == "Unschedulable"
        assert shown["message"] == f"0/1 nodes are available: 1 Insufficient {CORE}."
        assert node.messages("FailedScheduling") == [shown["message"]]
        await node.start_pods(pod("small", container("main", cores=20)))
        await node.remove_pod("first")
        await node.wait_phase("second", "Running")


def test_init_containers_count_only_where_they_need_more() -> None:
    """The scheduler's sum: main and sidecars together, or an init container with the sidecars before it."""
    sidecar = {**container("s", cores=5), "restartPolicy": "Always"}
    raw = pod("p", container("m", cores=10), init=(container("i", cores=4), sidecar, container("j", cores=20)))
    assert pod_requests(raw) == {CORE: 25}
    assert [c.kind for c in containers_of(raw)] == ["init", "sidecar", "init", "main"]


# --- manifests ---


def test_a_file_may_hold_several_documents_and_lists() -> None:
    """In the order in which they stand."""
    text = "---\n".join(yaml.safe_dump(pod(name)) for name in ("b", "a"))
    text += "---\n" + yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": [pod("c")]}) + "---\n"
    assert [m.raw["metadata"]["name"] for m in parse_manifests(text, "x.yaml")] == ["b", "a", "c"]


def asking(**resources: Any) -> str:
    return yaml.safe_dump(pod("a", {"name": "m", "resources": resources}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "x.yaml, line 1: no valid YAML"),
        *((f"a: {odd}", "x.yaml: no valid YAML") for odd in ("9999-99-99", "!!timestamp x", "!!bool x", "9" * 5000)),
        ("- just\n- a list", "x.yaml: not a manifest"),
        ("kind: CronJob\n", "x.yaml: kind 'CronJob' cannot be applied"),
        (f"{asking()}---\nkind: Pod\nmetadata: {{name: b}}\n", "x.yaml, document 2: Pod 'b' is not valid: spec"),
        (asking(limits={CORE: "half"}), "must be an integer"),
        (asking(limits={CORE: "0.5"}), f"Write {CORE}: 50, in"),
        (asking(limits={CORE: "30%"}), f"Write {CORE}: 30, in"),
        (asking(limits={MEMORY: "0.5"}), "Write whole blocks, of 256"),
        (
            asking(limits={CORE: 5}, requests={CORE: 4}),
            rf"\[0\].resources.requests\[{CORE}\]: Invalid value: 4: must be",
        ),
        (yaml.safe_dump(pod("a", container("x"), container("x"))), "Duplicate value: 'x'"),
    ],
)
def test_a_bad_manifest_is_named_with_file_document_and_field(text: str, words: str) -> None:
    """One readable error, nothing applied."""
    with pytest.raises(ManifestError, match=words):
        parse_manifests(text, "x.yaml")


def test_a_directory_is_read_by_file_name_and_a_name_given_twice_is_refused(short_dir: Path) -> None:
    """Other files are ignored; the second origin names the first."""
    (short_dir / "2.yaml").write_text(yaml.safe_dump(pod("b")))
    (short_dir / "1.yml").write_text(yaml.safe_dump(pod("a")))
    (short_dir / "notes.txt").write_text("no manifest")
    assert [m.raw["metadata"]["name"] for m in read_manifests([short_dir])] == ["a", "b"]
    with pytest.raises(ManifestError, match=r"1.yml: Pod default/a is there already, in .*1.yml"):
        read_manifests([short_dir, short_dir / "1.yml"])
    with pytest.raises(ManifestError, match=r"absent\.yaml: cannot be read: No such file"):
        read_manifests([short_dir / "absent.yaml"])


def test_the_samples_are_valid_and_one_of_them_cannot_fit() -> None:
    """A share, two shares, a pair, and with "all" a pod that stays Pending."""
    assert [m.raw["metadata"]["name"] for m in sample_manifests("fitting")] == ["share", "two-shares", "pair"]
    assert [m.raw["metadata"]["name"] for m in sample_manifests("all")] == ["share", "two-shares", "pair", "too-large"]
    assert [m.raw["metadata"]["name"] for m in sample_manifests("waiting")] == ["too-large"]
    assert sample_manifests("none") == []


# --- state directory ---


def test_a_state_directory_is_removed_with_what_the_sandbox_made(short_dir: Path) -> None:
    """A new one goes; one that was there stays, empty."""
    with owned_state_directory(short_dir / "new") as paths:
        assert stat.S_IMODE(paths.state.stat().st_mode) == 0o700
        (paths.state / "device-plugins").mkdir()
    assert not (short_dir / "new").exists()
    (short_dir / "old").mkdir()
    with owned_state_directory(short_dir / "old"):
        pass
    assert list((short_dir / "old").iterdir()) == []


def test_leftovers_of_a_dead_owner_are_taken_over(short_dir: Path) -> None:
    """The kernel has given its lock back."""
    state = short_dir / "state"
    (state / "device-plugins").mkdir(parents=True)
    (state / "device-plugins" / "stale").write_text("")
    (state / "owner").write_text("12345\n")
    with owned_state_directory(state) as paths:
        assert not (state / "device-plugins").exists()
        assert paths.owner.read_text() == f"{os.getpid()}\n"


def test_a_state_directory_in_use_is_refused_with_advice(short_dir: Path) -> None:
    """The owner's PID, and how to speak to it."""
    with (
        owned_state_directory(short_dir / "s"),
        pytest.raises(StartupError, match=rf"PID {os.getpid()}\).*sandbox status --state-dir"),
        owned_state_directory(short_dir / "s"),
    ):
        pass


def test_somebodys_directory_is_not_touched(short_dir: Path) -> None:
    """Files that no sandbox left: refused, and still there."""
    (short_dir / "thesis.txt").write_text("x")
    with pytest.raises(StartupError, match="holds files that no sandbox left there"), owned_state_directory(short_dir):
        pass
    assert (short_dir / "thesis.txt").exists()


@pytest.mark.parametrize("name", ["file", "file/x", "x" * 90], ids=["a file", "below a file", "too long"])
def test_a_state_directory_that_cannot_serve_is_refused(short_dir: Path, name: str) -> None:
    """A file, an impossible path, or a path too long for sockets: named, with what to do."""
    (short_dir / "file").write_text("")
    state = short_dir / name
    with pytest.raises(StartupError, match=r"state directory .*--state-dir"), owned_state_directory(state):
        pass


# --- report ---


def _shown(node: EmbeddedNode, *uuids: str) -> ReportedNode:
    """With GPUs of these UUIDs."""
    gpus = tuple(
        Gpu(index=index, minor=index + 3, uuid=GpuUuid(uuid), bus_id="", name="Test", memory_mib=1024, numa_node=index)
        for index, uuid in enumerate(uuids)
    )
    return ReportedNode(node=node, gpus=gpus, names=ResourceNames(vcore=CORE, vmemory=MEMORY))


@pytest.mark.parametrize("phase", ["Pending", "Running", "Failed"])
def test_a_container_that_waits_or_has_failed_is_the_reason_in_any_phase(phase: str) -> None:
    """What waits first, with the last exit code; else what ended badly; a container that ended well is none."""
    well = {"name": "a", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    badly = {"name": "b", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}
    waits = {"name": "c", "state": {"waiting": waiting}, "lastState": badly["state"]}

    def reported(*statuses: dict[str, Any]) -> tuple[str, str]:
        return reason_and_message({"status": {"phase": phase, "containerStatuses": statuses}})

    assert reported(well, badly, waits) == ("CrashLoopBackOff", "back-off 10s restarting, exit code 3")
    assert reported(well, badly) == ("Error", "container b ended with exit code 3")
    assert reported(well) == ("", "")


async def test_an_ended_pod_is_shown_without_gpus_and_with_its_exit_code() -> None:
    """It holds none any more."""
    answer = ContainerAllocateResponse(envs={"X": "y"})
    plugin = SmallPlugin(CORE, device_ids("a", count=100), answer=answer)
    async with open_test_node() as node, node.open_plugin(plugin):
        await node.start_pods(pod("p", container("main", cores=30), restartPolicy="Never"))
        shown = _shown(node, "a")
        assert report(shown)["pods"][0]["containers"][0]["gpus"] == [0]
        node.kill_container("p")
        await node.wait_phase("p", "Failed")
        (ended,) = report(shown)["pods"]
    (main,) = ended["containers"]
    assert (main["gpus"], main["env"]) == ([], {})
    assert (ended["reason"], ended["message"]) == ("Error", "container main ended with exit code 137")


async def test_the_report_has_the_agents_gpus_and_the_kubelets_pods() -> None:
    """vmemory IDs name another GPU: the container is on that of its vcore IDs. What is
    allocated the agent alone counts, and it offers nothing once it has ended."""
    answer = ContainerAllocateResponse(
        envs={"NVIDIA_VISIBLE_DEVICES": "b"},
        mounts=[Mount(host_path="/h", container_path="/c", read_only=True)],
        devices=[DeviceSpec(host_path="/dev/x", container_path="/dev/x", permissions="rwm")],
        annotations={"k": "v"},
    )
    async with open_test_node() as node:
        core = SmallPlugin(CORE, device_ids("b", "a", count=100, numa=None), answer=answer)
        memory = SmallPlugin(MEMORY, device_ids("a", "b", count=4, numa=None))
        async with node.open_plugin(core), node.open_plugin(memory):
            await node.start_pods(pod("p", container("main", cores=30, blocks=3), annotations={"n": "1"}))
            node.api.create_pod(pod("q", container("main", cores=300)))
            await node.kubelet.wait_for(lambda: node.api.pod("default", "q")["status"].get("conditions"))
            shown = _shown(node, "a", "b")
            shown.agent_document["gpus"] = [{"uuid": "a", "cores": 1}]
            document = report(shown)
            process = node.container_of("p")
            assert process is not None
        await node.kubelet.wait_for(lambda: not is_offered(shown))
    assert document["node"]["gpus"] == [{"uuid": "a", "cores": 1}]
    assert document["node"]["is_offered"]
    assert document["node"]["capacity"] == {CORE: 200, MEMORY: 8}
    p, q = document["pods"]
    assert (p["phase"], p["annotations"]) == ("Running", {"n": "1"})
    assert (q["phase"], q["reason"]) == ("Pending", "Unschedulable")
    assert p["containers"] == [{
        "name": "main", "gpus": [1],
        "env": {"NVIDIA_VISIBLE_DEVICES": "b"},
        "mounts": [{"host_path": "/h", "container_path": "/c", "read_only": True}],
        "devices": [{"host_path": "/dev/x", "container_path": "/dev/x", "permissions": "rwm"}], "annotations": {"k": "v"},
        "pid": process.pid, "pids": [process.pid],
    }]  # fmt: skip
    assert pod_line(p) == "pod default/p Running [main: GPU 1]"
    assert "q Pending" in pod_line(q)
    assert f"1 Insufficient {CORE}" in pod_line(q)


async def test_a_node_in_a_used_directory_begins_with_new_gpus(short_dir: Path) -> None:
    """What an earlier node's agent noted of cordons, and what failed and was used there, is not this one's."""
    async with open_test_node(short_dir) as node:
        left = (node.paths.health_state, node.paths.faults, node.paths.usage)
        for path in left:
            path.write_text("{}")
    assert all(path.exists() for path in left)
    async with open_test_node(short_dir):
        assert not any(path.exists() for path in left)


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"name": "A", "value": "a\0b"}, "embedded null byte"),
        ({"name": "A=B", "value": "c"}, "illegal environment variable name"),
        ({"name": "A", "value": "\ud800"}, "surrogates not allowed"),
    ],
)
async def test_a_variable_that_no_process_can_have_keeps_its_container_waiting(env: dict[str, str], why: str) -> None:
    """With the reason in the pod's status; the node goes on, and so do other pods."""
    async with open_test_node() as node:
        node.api.create_pod(pod("bad", {**container("main"), "env": [env]}))
        await node.kubelet.wait_for(lambda: why in reason_and_message(node.api.pod("default", "bad"))[1])
        reason, message = reason_and_message(node.api.pod("default", "bad"))
        assert reason == "CreateContainerError"
        assert "container main of pod default/bad cannot start: no process can have such a" in message
        assert node.kubelet.runtime.containers() == []
        await node.start_pods(pod("good"))


async def _built(*flags: str) -> RunningNode:
    """Of an agent on simulated GPUs that is given these flags."""
    flags = ("--driver=simulated", "--web.port=0", *flags)
    async with open_test_node() as node:
        return await build_node(node, flags, check_driver(node.name, node.paths, flags), lambda _: None)


async def test_a_free_port_that_is_asked_for_by_the_agents_flag_is_printed() -> None:
    """`--web.port=0`: the sandbox chooses it, because the agent would write it only into its own log."""
    built = await _built()
    assert built.settings.web.port > 0
    assert built.addresses["web"].endswith(f":{built.settings.web.port}")


async def test_the_resources_of_mig_instances_are_shown(tmp_path: Path) -> None:
    """Their health too: by NVIDIA's resources, where the node's isolation keeps no share in an instance."""
    faults = tmp_path / "faults.json"
    faults.write_text('{"mig": {"0": ["1g.10gb"]}}')
    built = await _built("--nvidia.enabled", "--nvidia.mig_strategy=mixed", f"--simulated.faults={faults}")
    assert built.names.gpu == ("nvidia.com/gpu", "nvidia.com/mig-1g.10gb")
