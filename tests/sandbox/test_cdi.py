"""The embedded node's container runtime looks CDI devices up, and refuses a container whose devices no spec has.

A real containerd has CDI from 1.7 on; a machine of Debian 12 has 1.6.20, whose program knows no word of it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.commands.cdi import cdi_specs
from gpushare_agent.agent.gpus.part import open_driver
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.core.wire.v1beta1 import CdiDevice, ContainerAllocateResponse, DeviceSpec
from gpushare_agent.sandbox.runtime.cdi_resolver import requested_names, resolve_cdi
from tests.agent.support_agent import open_agent
from tests.isolation.support_cdi import spec, write_spec
from tests.sandbox.support_containers import host_container
from tests.sandbox.support_sandbox import CORE, FOO, MEMORY, NodeUnderTest, SmallPlugin, open_test_node, pod

NAME = "nvidia.com/gpu=GPU-0"
PRINTS = host_container("main", "sh", args=["-c", "env"])


def asks(resource: str = FOO, count: int = 1) -> dict[str, Any]:
    return pod("p", {**PRINTS, "resources": {"limits": {resource: str(count)}}}, restartPolicy="Never")


def printed(node: NodeUnderTest) -> dict[str, str]:
    """The environment of the container's process, as it printed it."""
    return {name: value for name, _, value in (line.partition("=") for line in node.printed("p").splitlines())}


def plugin(answer: ContainerAllocateResponse) -> SmallPlugin:
    return SmallPlugin(FOO, {"foo-0": ("Healthy", None)}, answer=answer)


@pytest.mark.parametrize(
    "answer",
    [
        ContainerAllocateResponse(cdi_devices=[CdiDevice(name=NAME)]),
        ContainerAllocateResponse(annotations={"cdi.k8s.io/gpushare_x": NAME, "other.io/x": "y=z"}),
    ],
    ids=["cri", "annotation"],
)
async def test_a_container_whose_cdi_device_no_spec_has_waits_until_one_has(answer: ContainerAllocateResponse) -> None:
    """Its status says which name; as soon as the spec is there it starts, with what the spec says."""
    answer.envs = {"NVIDIA_VISIBLE_DEVICES": "GPU-0"}
    answer.devices = [DeviceSpec(container_path="/dev/nvidia7", host_path="/dev/nvidia7", permissions="rw")]
    async with open_test_node() as node, node.open_plugin(plugin(answer)):
        node.api.create_pod(asks())
        await node.kubelet.wait_for(lambda: node.waiting("p").get("reason") == "CreateContainerError")
        assert node.waiting("p")["message"] == f"CDI device injection failed: unresolvable CDI devices {NAME}"
        raw = spec("GPU-0") | {"containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}}
        node.paths.cdi.mkdir()
        (node.paths.cdi / "a.json").write_text(json.dumps(raw))
        await node.wait_phase("p", "Succeeded")
        inside = printed(node)
        assert inside["NVIDIA_VISIBLE_DEVICES"] == "void"
        assert inside["SANDBOX_DEVICE_NODES"] == "/dev/nvidia7,/dev/nvidia0"


@pytest.mark.parametrize("strategy", ["cdi-annotations", "cdi-cri"])
async def test_the_agents_answers_name_what_the_agents_spec_has(strategy: str) -> None:
    """A share gets its GPU's node and the control nodes, seen inside the running container; whole GPUs get theirs."""
    flags = (f"--device-list-strategy={strategy}", "--isolation=none", "--simulated.gpus=2")
    async with open_test_node() as node:
        settings = load_settings(node.arguments(*flags), {}).settings
        gpus = (await open_driver(settings).read()).gpus
        cdi_specs(settings, mounts_driver=False).ensure(gpus)
        async with open_agent(node, *flags):
            limits = {CORE: "200", MEMORY: "1"}
            node.api.create_pod(pod("p", {**PRINTS, "resources": {"limits": limits}}, restartPolicy="Never"))
            await node.wait_phase("p", "Succeeded")
        inside = printed(node)
        assert set(inside["SANDBOX_DEVICE_NODES"].split(",")) == {
            *("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
        }
        assert inside["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_names_resolve_as_the_reference_library_does(tmp_path: Path) -> None:
    """The later directory counts; two files of one directory make the name unknown, and so does a file that is no spec."""
    etc, run = tmp_path / "etc", tmp_path / "run"
    write_spec(etc / "a.json", "GPU-0", "GPU-1")
    resolve = partial(resolve_cdi, [etc, run])
    assert resolve([NAME, NAME]).device_nodes == ("/dev/nvidia0",)
    later = spec("GPU-0")
    later["devices"][0]["containerEdits"] = {"mounts": [{"hostPath": "/a", "containerPath": "/b"}]}
    run.mkdir()
    (run / "b.json").write_text(json.dumps(later))
    assert resolve([NAME]).mounts == (("/a", "/b"),)
    write_spec(run / "c.json", "GPU-0")
    (run / "d.json").write_text("[1")
    with pytest.raises(Rejected, match=NAME):
        resolve(["nvidia.com/gpu=GPU-1", NAME])
    assert resolve([]).env == ()


def test_the_requested_names_are_the_fields_then_the_annotations() -> None:
    """Other annotations name no devices."""
    annotations = [("z", "x"), ("cdi.k8s.io/b_1", "n=2,n=3"), ("cdi.k8s.io/a_1", "n=1")]
    assert requested_names(["n=0"], annotations) == ["n=0", "n=1", "n=2", "n=3"]
