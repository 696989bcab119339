"""Files that cannot be opened or read for a while, at the start of an agent and at a reload."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.agent import program
from gpushare_agent.agent.node_configuration import NodeConfiguration
from gpushare_agent.core.kit import supervision
from gpushare_agent.core.kube import configuration
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.settings.settings import load_settings
from tests.agent.support_agent import open_agent, open_child, poll_until, record_claim
from tests.cluster.support_kube import running
from tests.sandbox.support_sandbox import container, open_test_node, pod
from tests.support_process import refused_opening


async def test_a_reload_without_a_free_descriptor_goes_on_once_there_is_one() -> None:
    """Its generations fail until then, and the kubelet's calls wait."""
    async with open_test_node() as node, open_child(node) as child:
        await node.start_pods(pod("before", container(cores=30, blocks=10)))
        before = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (0, before[1]))
        child.send_signal(signal.SIGHUP)
        await poll_until(
            lambda: len(node.log_lines("settings_not_applied")) == 2, "the former settings have failed, too"
        )
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, before)
        await node.start_pods(pod("after", container(cores=30, blocks=10)))
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0
        assert len(node.log_lines("settings_not_applied")) == 2


async def test_claims_whose_files_cannot_be_read_are_restored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent does not end: pods without claims run meanwhile."""
    monkeypatch.setattr(program, "RETRY_S", 0.01)
    monkeypatch.setattr(program, "CLAIMS_WAIT_S", 0.01)
    async with open_test_node() as node:
        record_claim(node)
        with ExitStack() as refused, capture_logs() as logs:
            refused.enter_context(refused_opening(monkeypatch, lambda path: path.name == "mig.json"))
            async with open_agent(node):
                await node.start_pods(pod("p", container(cores=30, blocks=10)))
                refused.close()
                await poll_until(lambda: "claims_restored" in {one["event"] for one in logs}, "the claims")
        assert [one["event"] for one in logs].count("claims_not_restored") == 1


async def test_the_kubernetes_library_is_loaded_once_there_is_a_free_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent does not end, and serves as soon as it can."""
    imported, errors = configuration.import_module, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def load(name: str) -> object:
        if errors:
            raise errors.pop()
        return imported(name)

    monkeypatch.setattr(supervision, "POOL_RETRY_S", 0.01)
    async with open_test_node() as node:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(configuration, "import_module", load)
            async with open_agent(node):
                await node.start_pods(pod("p", container(cores=30, blocks=10)))
    [line] = [one for one in logs if one["event"] == "kubernetes_not_ready"]
    assert "open files are used up" in line["error"]


async def test_a_nodes_configuration_that_no_thread_can_read_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload is asked for, which says why it cannot be read, and keeps the settings."""
    settings = load_settings([f"--node-configuration.directory={tmp_path}"], {}).settings
    own = NodeConfiguration(lambda _: settings)

    async def refuse(*_: object) -> None:
        raise Unavailable("no thread could be started")

    monkeypatch.setattr(asyncio, "to_thread", refuse)
    async with running(partial(own.watch_directory, tmp_path)):
        await own.wait_new(settings)
