"""Settings per node on the embedded node: a label picks a file of a mounted ConfigMap, and the kubelet's streams go on."""

from __future__ import annotations

from pathlib import Path

from gpushare_agent.core.settings.node_configuration import LABELS
from tests.agent.support_agent import open_child, poll_until
from tests.sandbox.support_sandbox import BLOCKS, CORE, MEMORY, NodeUnderTest, container, open_test_node, pod

OURS = LABELS[0]
REFUSED = "NodeConfigurationRefused"


def _mount(directory: Path, **files: str) -> None:
    """As the kubelet writes a ConfigMap: links into a directory that is changed in one step."""
    directory.mkdir(exist_ok=True)
    number = len(list(directory.glob("..v*")))
    version = directory / f"..v{number}"
    version.mkdir()
    for name, text in files.items():
        (version / name).write_text(text)
    link = directory / "..data_tmp"
    link.symlink_to(version.name)
    link.rename(directory / "..data")
    for name in files:
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")


async def _label(node: NodeUnderTest, value: str) -> None:
    await node.wait_until(lambda: node.api.store.find("nodes", ("", node.name)), "the kubelet registers the Node")
    raw = node.api.node(node.name)
    node.api.apply_node({**raw, "metadata": {**raw["metadata"], "labels": {OURS: value}}})


async def _wait_blocks(node: NodeUnderTest, count: int) -> None:
    await node.wait_until(lambda: node.kubelet.devices.capacity().get(MEMORY, (0, 0))[1] == count, f"{count} blocks")


def _registered(node: NodeUnderTest) -> list[str]:
    return sorted(line["resource"] for line in node.log_lines("device_plugin_registered"))


async def test_the_nodes_label_and_the_files_change_the_settings_without_a_new_registration() -> None:
    """A configuration that is not there, or that has a mistake, keeps the last one, with an Event that says why."""
    async with open_test_node() as node:
        directory = node.paths.state / "configurations"
        _mount(directory, small="resources: {memory_block_mib: 512}", large="resources: {memory_block_mib: 1024}")
        await _label(node, "small")
        flags = ["--simulated.gpus=2", f"--node-configuration.directory={directory}"]
        async with open_child(node, *flags):
            await _wait_blocks(node, BLOCKS)
            await _label(node, "none-such")
            await poll_until(lambda: node.log_lines("settings_not_reloaded"), "the name is refused")
            await node.wait_until(lambda: node.messages(REFUSED), "the Event")
            assert "none-such" in node.messages(REFUSED)[0]
            await _label(node, "large")
            await _wait_blocks(node, BLOCKS // 2)
            _mount(directory, small="", large="resources: {memory_block_mib: many}")
            await poll_until(lambda: len(node.log_lines("settings_not_reloaded")) == 2, "the file is refused")
            await node.start_pods(pod("after", container(cores=50, blocks=BLOCKS // 8)))
            assert _registered(node) == [CORE, MEMORY]


async def test_an_agent_that_starts_with_a_bad_configuration_has_the_settings_of_all_nodes() -> None:
    """It serves, and the Event says so; a mistake of a value that only the start finds is no other."""
    async with open_test_node() as node:
        directory = node.paths.state / "configurations"
        for number, text in enumerate(("share_mode: perhaps", "resources: {memory_block_mib: 1}")):
            _mount(directory, only=text)
            flags = ["--simulated.gpus=2", "--simulated.gpu-memory-mib=81920"]
            async with open_child(node, *flags, f"--node-configuration.directory={directory}"):
                await _wait_blocks(node, 2 * 81920 // 256)
                await node.wait_until(lambda: len(node.messages(REFUSED)) > number, "the Event")  # noqa: B023 - in this turn
                assert node.healthy(MEMORY) == 2 * 81920 // 256, "the settings of all nodes stay"


async def test_what_becomes_of_nvidias_configuration_is_logged_as_it_comes_into_force() -> None:
    """Each key once, by the configuration's name: what it becomes here, or why it has no effect."""
    async with open_test_node() as node:
        directory = node.paths.state / "configurations"
        theirs = "version: v1\nflags: {migStrategy: mixed, gdrcopyEnabled: true}\n"
        _mount(directory, own="resources: {memory_block_mib: 512}", plugin=theirs)
        await _label(node, "own")
        async with open_child(node, "--simulated.gpus=2", f"--node-configuration.directory={directory}"):
            await _wait_blocks(node, BLOCKS)
            assert node.log_lines("foreign_setting_read") == []
            await _label(node, "plugin")
            await _wait_blocks(node, 2 * BLOCKS)
        lines = [*node.log_lines("foreign_setting_read"), *node.log_lines("foreign_setting_without_effect")]
    found = {line["key"]: (line["source"], line.get("becomes"), "reason" in line) for line in lines}
    assert len(lines) == len(found) == 3 and "version" in found
    assert found["flags.migStrategy"] == ("configuration plugin", "nvidia.mig_strategy=mixed", False)
    assert found["flags.gdrcopyEnabled"] == ("configuration plugin", None, True)
