"""Where an agent writes, serves and registers: at the paths of its settings, and nowhere else on the machine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from bench.node import agent_arguments
from gpushare_agent.core.model.names import RESIZE_ANNOTATION
from gpushare_agent.core.settings.settings import load_settings
from tests.agent.support_agent import open_agent, open_child, poll_until, record_claim
from tests.agent.support_touched import touched
from tests.dra.support_claims import uid_of
from tests.isolation.support_library import fake_library
from tests.sandbox.support_sandbox import SHORT_TIMES, NodeUnderTest, container, open_test_node, pod
from tests.settings.support_settings import run_program

TIMES = replace(SHORT_TIMES, registry_poll_s=0.01, slice_wipe_s=0.0)
ONLY_READ = {
    "driver_volume.root": "the host's driver",
    "driver_volume.control_library": "the host's",
    "driver_volume.gpu_client": "of the image",
    "libgpushare.library": "copied to where containers mount it from",
    "mps.control": "a program of the command mps",
    "mps.shm_directory": "mounted into containers; made by the command mps",
    "runtime.cgroup_root": "the kernel's",
    "runtime.proc_root": "the kernel's",
}
"""Settings by which the agent writes nothing, and why."""

HARMLESS = {
    Path("/dev/null"): {"open"},
    Path("/sbin/ldconfig"): {"subprocess.Popen"},  # `ldconfig -p` of ctypes.util.find_library: it lists
}


def is_dra_registered(node: NodeUnderTest) -> Callable[[], bool]:
    return lambda: "NotifyRegistrationStatus" in [name for name, _ in node.calls.dra_calls]


@pytest.mark.parametrize(
    "flags",
    [
        ("--isolation=vcuda", "--resize.mode=free-capacity"),
        ("--isolation=gpushare", "--dra.gpus=3", "--device-list-strategy=cdi-cri"),
    ],
)
async def test_an_agent_touches_nothing_outside_the_paths_of_its_settings(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """With an earlier agent's claims, for which it registers the driver, over shares, a resize, a cordon and its end."""
    file, library = tmp_path / "touched", fake_library(tmp_path / "libgpushare.so")
    program = ("-m", "tests.agent.support_touched", str(file))
    async with open_test_node(times=TIMES) as node:
        record_claim(node)
        async with open_child(node, *flags, f"--libgpushare.library={library}", program=program) as child:
            await poll_until(is_dra_registered(node), "the DRA driver is registered")
            resize = {RESIZE_ANNOTATION: "main:cores=20"}
            await node.start_pods(pod("p", container(cores=10, blocks=4), annotations=resize))
            if "vcuda" in flags[0]:  # before the cordon: on a GPU out of service no share grows
                await poll_until(node.paths.resize_state.exists, "the resize is on the disk")
            cordoned = await run_program("cordon", "1", f"--control.socket={node.paths.agent_control_socket}")
            assert cordoned.code == 0, cordoned.err
            await poll_until(node.paths.health_state.exists, "the cordon is on the disk")
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        found = touched(file)
        state = node.paths.state.resolve()
        outside = {path: events for path, events in found.items() if not path.is_relative_to(state)}
        assert outside.items() <= HARMLESS.items()
        at = node.paths
        made = (at.plugin_registry, at.dra_plugin, at.device_plugin_path, at.pod_resources_socket.parent)
        for place in (*made, at.agent_control_socket, at.display_socket):
            assert any(path.is_relative_to(place.resolve()) for path in found), place
        assert any(path.name.startswith("health.json") for path in found)
        registry = at.plugin_registry.resolve()
        assert any(path.parent == registry and "socket.bind" in events for path, events in found.items())


def _paths(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Path]]:
    for name in type(model).model_fields:
        value: Any = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _paths(value, f"{prefix}{name}.")
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Path):
                yield f"{prefix}{name}", one


def test_every_path_of_the_benchmarks_agent_is_its_own(tmp_path: Path) -> None:
    """It runs on nodes too, next to the agent that has its files and sockets at the usual places."""
    settings = load_settings(agent_arguments(tmp_path, {}), {}).settings
    assert {name for name, path in _paths(settings) if not path.is_relative_to(tmp_path)} <= ONLY_READ.keys()


async def test_every_path_of_the_sandboxs_agent_is_its_own() -> None:
    async with open_test_node() as node:
        settings = load_settings(node.agent_arguments(), {}).settings
        state = node.paths.state
        assert {name for name, path in _paths(settings) if not path.is_relative_to(state)} <= ONLY_READ.keys()


async def test_an_agent_with_a_kubelet_of_its_own_takes_no_other_agents_claims(tmp_path: Path) -> None:
    """It would be the last to register its driver, and the kubelet would prepare and end the claims there."""
    async with open_test_node(times=TIMES) as node:
        record_claim(node)
        async with open_agent(node):
            await poll_until(is_dra_registered(node), "the DRA driver is registered")
            files = sorted(node.paths.plugin_registry.iterdir())
            (tmp_path / "device-plugins").mkdir()
            (tmp_path / "plugins_registry").mkdir()
            for other in ((), (f"--kubelet.root-dir={tmp_path}",)):
                second = await run_program(
                    "run", *node.agent_arguments(), f"--kubelet.device-plugin-path={tmp_path / 'device-plugins'}",
                    f"--control.socket={tmp_path / 'control'}", f"--display.socket={tmp_path / 'display'}", "--web.port=0",
                    *other,
                )  # fmt: skip
                setting = "state_directory" if other else "kubelet.root_dir"
                assert (
                    second.code and f"(setting {setting})" in second.err and "Stop it, or give this one" in second.err
                )
                assert sorted(node.paths.plugin_registry.iterdir()) == files
                assert not list((tmp_path / "device-plugins").iterdir())


async def test_an_incoming_agent_at_the_same_paths_takes_over_the_claims() -> None:
    """As during an upgrade: the driver is registered all the time, and one agent has the claims in its ledger."""
    async with open_test_node(times=TIMES) as node:
        record_claim(node)
        async with open_child(node) as old:
            await poll_until(is_dra_registered(node), "the DRA driver is registered")
            async with open_child(node, wait=False):
                await poll_until(lambda: len(node.log_lines("claims_restored")) == 2, "the newcomer has the claims")
                await node.wait_registered()
                old.send_signal(signal.SIGTERM)
                assert await old.wait() == 0
                assert [line["claims"] for line in node.log_lines("claims_restored")] == [1, 1]
                await poll_until(
                    lambda: len(list(node.paths.plugin_registry.glob("*-reg.sock"))) == 1, "one driver is registered"
                )
                assert (node.paths.claim_records / f"{uid_of(1)}.json").exists()
