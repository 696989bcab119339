"""Every isolation on the embedded node with the whole agent: what the running process has is what the golden files say.

MPS has tests of its own, with its daemon.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.core.model.names import ISOLATION_ANNOTATION
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse
from tests.agent.support_agent import InnerAgent, open_agent, poll_until
from tests.isolation.support_library import fake_library
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, container, open_test_node, pod

EDITS = Path(__file__).parent.parent / "data" / "edits"
GOLDEN_UID = "5ca1ab1e-0000-4000-8000-00000000cafe"
GOLDEN_UUIDS = ("GPU-0000aaaa-0000-4000-8000-000000000000", "GPU-1111aaaa-0000-4000-8000-000000000001")
GOLDEN_MINOR = 2
"""Of its first GPU."""
OF_THE_SANDBOX = {"PATH", "HOME", "LANG", "PWD", "GPUSHARE_VDEVICE"}
SHARE = {"cores": 30, "blocks": 24}
ELASTIC = {"tencent.com/vcuda-core-limit": "60"}
RUNS = ("sleep", "600")
DEFAULT_LISTS = "envvar+device-nodes"
LISTS = sorted(path.stem for path in (EDITS / "none").iterdir())
"""Strategies of device lists, joined by "+" as the golden files are named."""


def running(name: str = "cuda", *command: str, **limits: int) -> dict[str, Any]:
    """A container that is run as a process of this machine."""
    return {**container(name, **limits), "image": "sandbox/host", "command": list(command or RUNS)}


def cases() -> dict[str, dict[str, Any]]:
    """The golden files' cases as pods."""
    return {
        "elastic share: 30 cores, at most 60, 6144 MiB": pod("elastic", running(**SHARE), annotations=ELASTIC),
        "share: 30 cores, 6144 MiB": pod("share", running(**SHARE)),
        "two whole GPUs": pod("pair", running(cores=200)),
        "whole GPU": pod("whole", running(cores=100)),
    }


class Host:
    """The directories that the settings name, all of them below the node's."""

    def __init__(self, node: NodeUnderTest) -> None:
        self.library = fake_library(node.paths.state / "lib/libgpushare.so")
        self.installed = node.paths.libgpushare
        self.drivers = node.paths.state / "vdriver"
        self.virtual_manager = node.paths.virtual_manager
        config = node.paths.state / "volume.conf"
        volumes = [
            {"name": name, "base": str(self.drivers), "mode": "ro", "components": {"libraries": ["libcuda.so"]}}
            for name in ("nvidia", "origin")
        ]
        config.write_text(json.dumps({"volume": volumes}))
        self.flags = [f"--libgpushare.library={self.library}", f"--volume-config={config}", "--simulated.gpus=4"]

    def golden(
        self,
        node: NodeUnderTest,
        agent: InnerAgent,
        isolation: str,
        case: str,
        name: str,
        strategies: str = DEFAULT_LISTS,
    ) -> Any:
        """The golden file's case with this node's GPUs, pod and directories in the place of its own."""
        own = [gpu for gpu in agent.parts.node.inventory.current.gpus if gpu.uuid in node.gpus_of(name, "cuda")]
        places = {GOLDEN_UID: node.uid_of(name)}
        places |= dict(zip(GOLDEN_UUIDS, (gpu.uuid for gpu in own), strict=False))
        places |= {f"/dev/nvidia{GOLDEN_MINOR + n}": f"/dev/nvidia{gpu.minor}" for n, gpu in enumerate(own)}
        places |= {
            "/etc/gpu-manager/vm": str(self.virtual_manager),
            "/etc/gpu-manager/vdriver/gpushare": str(node.paths.libgpushare),  # before what it begins with
            "/etc/gpu-manager/vdriver": str(self.drivers),
        }
        text = json.dumps(json.loads((EDITS / isolation / f"{strategies}.json").read_text())[case])
        return json.loads(re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], text))


def sorted_lists(edits: Any) -> Any:
    """An answer's lists go out in an order of their own."""
    return {key: sorted(value) if isinstance(value, list) else value for key, value in edits.items()}


def answered(node: NodeUnderTest, name: str) -> Any:
    """What the answers to its Allocates say, as the golden files write it."""
    answers = [ContainerAllocateResponse.parse(call.response) for call in node.calls_of(name) if not call.error]
    return {
        "annotations": {key: value for answer in answers for key, value in answer.annotations.items()},
        "cdi_devices": [device.name for answer in answers for device in answer.cdi_devices],
        "devices": [f"{d.host_path} -> {d.container_path} ({d.permissions})" for one in answers for d in one.devices],
        "env": {key: value for answer in answers for key, value in answer.envs.items()},
        "mounts": [
            f"{m.host_path} -> {m.container_path} ({'ro' if m.read_only else 'rw'})"
            for one in answers
            for m in one.mounts
        ],
    }


async def environment_of(node: NodeUnderTest, name: str) -> dict[str, str]:
    """Of the running command, without what the sandbox gives to every container."""
    found = node.container_of(name, "cuda")
    assert found is not None and found.is_running
    process = Path(f"/proc/{found.pid}")
    await poll_until(lambda: (process / "cmdline").read_bytes().startswith(b"sleep\0"), "the shell is the command")
    entries = (process / "environ").read_bytes().split(b"\0")
    pairs = dict(entry.decode().split("=", 1) for entry in entries if entry)
    return {k: v for k, v in pairs.items() if k not in OF_THE_SANDBOX and not k.startswith("SANDBOX_")}


async def test_a_share_in_a_sandbox_is_refused() -> None:
    """By the name of the RuntimeClass: this API server has none. A whole GPU, and a share in no sandbox, are given."""
    async with open_test_node() as node, open_agent(node, "--isolation=gpushare", *Host(node).flags):
        shares = {"sandboxed": "gvisor", "plain": "nvidia"}
        for name, runtime_class in shares.items():
            node.api.create_pod(pod(name, running(cores=30, blocks=24), runtimeClassName=runtime_class))
        node.api.create_pod(pod("whole", running(cores=100), runtimeClassName="kata-qemu"))
        await node.wait_running("plain", "whole")

        def failed() -> bool:
            return bool(node.api.pod("default", "sandboxed")["status"].get("phase") == "Failed")

        await node.wait_until(failed, "the pod is refused")
        assert "which runs containers in a sandbox" in node.api.pod("default", "sandboxed")["status"]["message"]


@pytest.mark.parametrize(
    ("isolation", "strategies"),
    [*(("gpushare", one) for one in LISTS), ("vcuda", DEFAULT_LISTS), ("none", DEFAULT_LISTS)],
)
async def test_the_running_process_has_what_the_golden_files_say(isolation: str, strategies: str) -> None:
    """Its environment is theirs and no variable more; so are the mounts, nodes and annotations at the runtime."""
    async with open_test_node() as node:
        host = Host(node)
        lists = f"--device-list-strategy={strategies.replace('+', ',')}"
        async with open_agent(node, f"--isolation={isolation}", lists, *host.flags) as agent:
            for manifest in cases().values():
                node.api.create_pod(manifest)
            for case, manifest in cases().items():
                name = manifest["metadata"]["name"]
                await node.wait_running(name)
                golden = host.golden(node, agent, isolation, case, name, strategies)
                assert sorted_lists(answered(node, name)) == sorted_lists(golden), case
                # The spec's own name comes last: docs/reference/device-lists.md names what such a combination leads to.
                last_word = {"NVIDIA_VISIBLE_DEVICES": "void"} if "cdi" in strategies else {}
                assert await environment_of(node, name) == golden["env"] | last_word, case


async def test_a_pod_may_choose_among_the_isolations_that_the_node_allows() -> None:
    """By annotation; without it the node's own counts. The chosen one's files are there, and not its neighbour's mounts."""
    async with open_test_node() as node:
        host = Host(node)
        flags = ["--isolation=vcuda", "--isolations-allowed=gpushare,none", *host.flags]
        async with open_agent(node, *flags):
            for name, chosen in (("usual", ""), ("ours", "gpushare"), ("free", "none")):
                annotations = {ISOLATION_ANNOTATION: chosen} if chosen else {}
                node.api.create_pod(pod(name, running(cores=20, blocks=8), annotations=annotations))
            await node.wait_running("usual", "ours", "free")
            inside = {name: await environment_of(node, name) for name in ("usual", "ours", "free")}
            assert not [key for name in inside for key in inside[name] if key.startswith("CUDA_")]
            mounted = {
                name: {mount.split(" -> ")[1].split()[0] for mount in answered(node, name)["mounts"]}
                for name in ("usual", "ours", "free")
            }
            assert mounted == {
                "usual": {"/etc/vcuda", "/usr/local/nvidia"},
                "ours": {
                    *("/usr/local/gpushare/libgpushare.so", "/etc/ld.so.preload", "/etc/ld-nix.so.preload"),
                    *("/etc/vcuda", "/etc/vcuda/usage"),
                },
                "free": set(),
            }
            for mount in answered(node, "ours")["mounts"]:
                assert Path(mount.split(" -> ")[0]).exists(), mount


@pytest.mark.parametrize("chosen", ["none", "VCUDA", "", "../none"])
async def test_an_isolation_that_the_node_does_not_allow_is_refused_with_an_event(chosen: str) -> None:
    """A tenant's name is not taken for it: the pod fails, with the list of what it may name."""
    async with open_test_node() as node:
        host = Host(node)
        async with open_agent(node, "--isolation=vcuda", "--isolations-allowed=gpushare", *host.flags) as agent:
            node.api.create_pod(pod("wrong", running(cores=20, blocks=8), annotations={ISOLATION_ANNOTATION: chosen}))
            message = await node.wait_settled("wrong")
            assert ISOLATION_ANNOTATION in message and "gpushare, vcuda" in message
            assert node.api.pod("default", "wrong")["status"]["phase"] == "Failed"
            await node.wait_until(lambda: "InvalidRequest" in dict(node.events_of("wrong")), "an Event with the reason")
            assert "gpushare, vcuda" in dict(node.events_of("wrong"))["InvalidRequest"]
            assert agent.held() == {} and not list(node.paths.virtual_manager.iterdir())


async def test_without_its_library_only_shares_of_gpushare_are_refused() -> None:
    """With the path and the cure. Whole GPUs and shares of other isolations go, and once it is there its own shares too."""
    async with open_test_node() as node:
        host = Host(node)
        host.library.write_bytes(b"no library")
        async with open_agent(node, "--isolation=vcuda", "--isolations-allowed=gpushare", *host.flags) as agent:
            chooses = {ISOLATION_ANNOTATION: "gpushare"}
            words = await node.settle_pod(pod("refused", running(cores=30, blocks=8), annotations=chooses))
            assert str(host.library) in words and "--libgpushare.library" in words and "Nothing was allocated" in words
            await node.start_pods(
                pod("whole", running(cores=100), annotations=chooses), pod("other", running(cores=30, blocks=8))
            )
            fake_library(host.library)
            await agent.parts.isolation.watches["gpushare"].poll()
            await node.start_pods(pod("late", running(cores=30, blocks=8), annotations=chooses))
            assert (host.installed / "ld.so.preload").is_file()


async def test_where_every_share_needs_the_library_the_kubelet_sees_no_memory() -> None:
    """A scheduler then sends none; the cores of whole GPUs are there."""
    async with open_test_node() as node:
        host = Host(node)
        host.library.write_bytes(b"no library")
        async with open_agent(node, "--isolation=gpushare", *host.flags, wait=False) as agent:
            await node.wait_until(lambda: node.kubelet.devices.capacity().get(CORE, (0, 0))[1] > 0, "cores")
            await node.wait_until(lambda: node.healthy(MEMORY) == 0, "no memory without the library")
            fake_library(host.library)
            await agent.parts.isolation.watches["gpushare"].poll()
            await node.wait_until(lambda: node.healthy(MEMORY) > 0, "memory once the library is there")


async def test_a_container_that_starts_again_waits_while_the_library_is_away() -> None:
    """It does not start without its limits, and starts once the library is back; the pod's status has the reason."""
    async with open_test_node() as node:
        host = Host(node)
        ends = node.paths.state / "ends"
        until = f"until test -e {shlex.quote(str(ends))}; do sleep 0.02; done"
        async with open_agent(node, "--isolation=gpushare", *host.flags):
            await node.start_pods(pod("waits", running("cuda", "sh", "-c", until, cores=30, blocks=8)))
            host.library.write_bytes(b"no library")
            (host.installed / "libgpushare.so").unlink()
            ends.touch()
            await node.wait_until(
                lambda: [c for c in node.calls_of("waits", "PreStartContainer") if str(host.library) in c.error],
                "a start that is refused with the library's path",
            )
            ends.unlink()
            fake_library(host.library)
            await node.wait_running("waits")


async def test_a_container_of_an_isolation_that_is_not_in_use_any_more_starts_again_with_new_files() -> None:
    """With those of the run before, or after a reboot of another boot, it would begin with what is not its own. Also one
    whose share was given while the agent with the other isolation waited for the handover."""
    async with open_test_node() as node:
        host = Host(node)
        async with (
            open_agent(node, "--isolation=gpushare", *host.flags) as old,
            open_agent(node, "--isolation=none", *host.flags, wait=False) as new,
        ):
            await poll_until(lambda: old.parts.kubelet.handover.waiting, "it asks")
            await node.start_pods(pod("old", running("cuda", "sleep", "1000", cores=30, blocks=8)))
            config = host.virtual_manager / node.uid_of("old") / "cuda" / "gpushare.config"
            before = config.stat().st_ino
            await old.parts.leave()
            old.task.cancel()
            await poll_until(lambda: new.parts.kubelet.has_recovered, "it serves")
            await node.wait_registered()
            node.kill_container("old", "cuda")
            await node.wait_until(lambda: node.restarts("old", "cuda") == 1, "the container started again")
            assert config.stat().st_ino != before
