"""Isolation auto on the embedded node: what is on the node decides, at the start, and says so wherever one looks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.agent import auto_isolation
from gpushare_agent.agent.auto_isolation import resolve_isolation
from gpushare_agent.agent.commands.check import check_node
from gpushare_agent.agent.composition import build
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.settings.settings import Settings, SettingsError, load_settings
from tests.agent.support_agent import open_agent
from tests.isolation.support_library import fake_library
from tests.sandbox.support_sandbox import open_test_node
from tests.support_json import written_node

UID = PodUid("11111111-2222-3333-4444-555555555555")


def settings_of(root: Path, *flags: str) -> Settings:
    """A node with nothing on it: no library of use, no daemon, no driver volume, no container."""
    (root / "libgpushare.so").write_bytes(b"without any simulated GPUs would do")
    (root / "cgroup").mkdir(exist_ok=True)
    (root / "cgroup" / "cgroup.controllers").touch()
    places = {
        "libgpushare.library": root / "libgpushare.so",
        "libgpushare.directory": root / "gpushare",
        "mps.pipe-directory": root / "pipe",
        "mps.control": root / "nvidia-cuda-mps-control",
        "virtual-manager.path": root / "vm",
        "runtime.cgroup-root": root / "cgroup",
    }
    fixed = [f"--{name}={path}" for name, path in places.items()]
    return load_settings(["--isolation=auto", "--driver=simulated", *fixed, *flags], {}).settings


async def test_another_setting_is_left_alone(short_dir: Path) -> None:
    """And has no reason of the agent's."""
    settings = settings_of(short_dir, "--isolation=none")
    found = await resolve_isolation(settings)
    assert found.settings is settings and found.isolation_reason == ""


async def test_what_is_on_the_node_decides(short_dir: Path) -> None:
    """With nothing shares will be refused, by the isolation that is chosen all the same; the reason has the missing path.
    Simulated GPUs need no library of the project's own. Only the isolation of the settings changes."""
    settings = settings_of(short_dir)
    found = await resolve_isolation(settings)
    assert found.settings.isolation == "gpushare"
    assert "no isolation can be had" in found.isolation_reason and "libgpushare.so" in found.isolation_reason
    settings.libgpushare.library.unlink()
    found = await resolve_isolation(settings)
    assert found.settings.isolation == "gpushare" and "no isolation can be had" not in found.isolation_reason
    fake_library(settings.libgpushare.library)
    with capture_logs() as lines:
        found = await resolve_isolation(settings)
    assert found.settings == settings.model_copy(update={"isolation": "gpushare"})
    (line,) = [line for line in lines if line["event"] == "isolation_chosen"]
    assert (line["isolation"], line["reason"]) == ("gpushare", found.isolation_reason)
    settings = settings_of(short_dir, "--driver-limits.set-by-agent=true")
    fake_library(settings.libgpushare.library)
    assert (await resolve_isolation(settings)).settings.isolation == "gpushare+driver"


async def test_containers_that_run_keep_their_library(short_dir: Path) -> None:
    """Those whose pod still has a cgroup; what a pod of long ago left does not count."""
    settings = settings_of(short_dir)
    fake_library(settings.libgpushare.library)
    VDeviceFiles(settings.virtual_manager.path).prepare(ContainerKey(UID, "cuda"))
    assert (await resolve_isolation(settings)).settings.isolation == "gpushare"
    (settings.runtime.cgroup_root / "kubepods" / f"pod{UID}").mkdir(parents=True)
    found = await resolve_isolation(settings)
    assert found.settings.isolation == "vcuda" and "containers run" in found.isolation_reason


async def test_a_state_directory_that_hangs_keeps_no_agent_from_its_start(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a reload. Claims may be recorded in it, so the agent goes on to read them."""
    settings = settings_of(short_dir, "--isolation=none", f"--state-directory={short_dir}")
    assert not (await resolve_isolation(settings)).has_claim_records
    ends = threading.Event()
    monkeypatch.setattr(auto_isolation, "has_files", lambda _: ends.wait())
    monkeypatch.setattr(auto_isolation, "RECORDS_TIMEOUT_S", 0.01)
    try:
        assert build(await resolve_isolation(settings)).node.has_claims
    finally:
        ends.set()


async def test_document_and_check_have_the_choice_and_its_reason(short_dir: Path) -> None:
    """The document names the isolation, never auto."""
    library = fake_library(short_dir / "libgpushare.so")
    async with open_test_node() as node:
        flags = ("--isolation=auto", f"--libgpushare.library={library}")
        async with open_agent(node, *flags) as agent:
            document = written_node(agent.parts.observability.snapshots.current())["agent"]
    assert document["isolation"] == "gpushare" and "libgpushare" in document["isolation_reason"]
    assert [one["name"] for one in document["isolations"]] == ["gpushare"]
    settings = settings_of(short_dir)
    fake_library(settings.libgpushare.library)
    findings = await check_node(settings)
    assert any(one.what == "isolation" and one.detail.startswith("auto chooses gpushare: ") for one in findings)


def test_a_pod_may_not_choose_it() -> None:
    """The annotation names what the pod was written for."""
    with pytest.raises(SettingsError, match=r"isolations.allowed"):
        load_settings(["--isolations-allowed=auto"], {})
