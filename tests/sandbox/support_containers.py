"""The embedded container runtime for tests: on every kind of cgroups that this machine allows, with real processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.core.kit.supervision import ChangeSignal
from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.sandbox.kubelet.container_config import HOST_IMAGE
from gpushare_agent.sandbox.runtime.cgroup_tree import open_cgroup_tree
from gpushare_agent.sandbox.runtime.containers import Container, ContainerConfig, ContainerRuntime
from tests.support_threads import remove_directory

UID = "0e7a3f2c-1b5d-4c3e-9f10-44aa55bb6c77"
ENV = {"PATH": os.environ["PATH"]}


def _why_not(kind: str) -> str:
    try:
        open_cgroup_tree(Path("/nowhere"), kind).close()
    except StartupError as error:
        return str(error)
    return ""


_REASONS = {kind: _why_not(kind) for kind in ("v2", "v1")}
KINDS = [pytest.param(k, marks=pytest.mark.skipif(bool(r), reason=r)) for k, r in _REASONS.items()]
needs_processes = pytest.mark.skipif(all(_REASONS.values()), reason=f"of a container one process is known: {_REASONS}")


@asynccontextmanager
async def open_containers(kind: str | None = None) -> AsyncIterator[ContainerRuntime]:
    """A container runtime alone, with nothing left of it afterwards."""
    state = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    try:
        runtime = ContainerRuntime(state, ChangeSignal(), kind)
        try:
            yield runtime
        finally:
            runtime.close()
            assert not runtime.cgroup_root.exists()
    finally:
        remove_directory(state)


def config(*command: str, name: str = "main", env: dict[str, str] | None = None, **extra: Any) -> ContainerConfig:
    return ContainerConfig(
        pod_uid=UID,
        pod_namespace="default",
        pod_name="train",
        name=name,
        command=command,
        env=ENV | (env or {}),
        **extra,
    )


def shell(script: str, **extra: Any) -> ContainerConfig:
    return config("sh", "-c", script, **extra)


def host_container(name: str, *command: str, **extra: Any) -> dict[str, Any]:
    """A container of a manifest that is run."""
    return {"name": name, "image": HOST_IMAGE, "command": list(command), **extra}


async def wait_ended(runtime: ContainerRuntime, container: Container) -> int:
    """The exit code."""
    signal = runtime.signal_of(container.pod_uid)
    while container.exit_code is None:
        await signal.wait(signal.count)
    return container.exit_code


def is_alive(pid: int) -> bool:
    """Not even dead and waiting for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
