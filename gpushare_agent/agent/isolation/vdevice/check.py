"""The probes of `gpushare-agent check` for the vDevice directories: where they lie, the containers' processes, and the files
that connections to their sockets need.
"""

from __future__ import annotations

import asyncio
import sys

from gpushare_agent.agent.isolation.check import CheckProbe
from gpushare_agent.agent.kubelet.records import FILE_NAME, LEFT_REMEDY, describe_left, read_checkpoint, vdevices
from gpushare_agent.agent.kubelet.registration import KUBELET_SOCKET
from gpushare_agent.agent.runtime import node_probes
from gpushare_agent.core.kit.bounded_grpc import ServerLimits
from gpushare_agent.core.kit.process import read_open_files_limit
from gpushare_agent.core.model.errors import AgentError, Unavailable, file_remedy
from gpushare_agent.core.model.finding import Finding, error, ok, warning
from gpushare_agent.core.model.names import MIB
from gpushare_agent.core.settings.settings import Settings

_CONTAINERS = 100
"""A full node; with 64 connections each they need more descriptors than the usual limits allow."""
_CONNECTIONS = ServerLimits().max_connections
NEEDED_OPEN_FILES = _CONTAINERS * (_CONNECTIONS + 1)


async def check_virtual_manager(settings: Settings) -> list[Finding]:
    """The tree with a directory for each container, mounted there at /etc/vcuda."""
    path = settings.virtual_manager.path
    try:
        found = await asyncio.to_thread(node_probes.require_writable, path)
    except Unavailable as failure:
        remedy = (
            "run the agent as root with the host's directory mounted for writing, in the pod under the same path as on the"
            " host, or set virtual_manager.path"
        )
        return [error("virtual manager", f"{failure}: no share can be given", file_remedy(failure, remedy))]
    where = "writable" if found.directory == path else f"will be made in {found.directory}, which is writable"
    return [ok("virtual manager", f"{path} {where}, {found.free_bytes // MIB} MiB free")]


async def check_left(settings: Settings) -> list[Finding]:
    """Containers whose directory is not in that tree, by the kubelet's record."""
    path = settings.kubelet.device_plugin_path / FILE_NAME
    try:
        entries = await asyncio.to_thread(read_checkpoint, path)
    except AgentError:
        return []  # no kubelet has run here
    left = describe_left(vdevices(entries), settings.virtual_manager.path)
    return [warning("virtual manager", f"{left}, unless they have ended", LEFT_REMEDY)] if left else []


async def check_processes(settings: Settings) -> list[Finding]:
    """Whether the containers' processes have PIDs here, and the /proc that shows whose they are."""
    proc_root = settings.runtime.proc_root
    if not await node_probes.sees_processes_of_node(settings.kubelet.device_plugin_path / KUBELET_SOCKET):
        detail = (
            "this process has a PID namespace of its own, in which containers' processes have no PIDs: who registers on a"
            " vDevice socket cannot be checked (the socket alone counts), and pids.config stays empty, by which the"
            " library in a container distinguishes its own use of a GPU from that of others"
        )
        remedy = "give the agent's pod hostPID: true; isolation none does without"
        return [warning("host processes", detail, remedy)]
    try:
        node_probes.require_proc(proc_root)
    except Unavailable as failure:
        detail = f"{failure}: who registers on a vDevice socket cannot be checked"
        return [warning("host processes", detail, "leave --runtime.proc-root at /proc, with hostPID: true")]
    return [ok("host processes", f"visible, and {proc_root} shows them")]


async def check_open_files(settings: Settings) -> list[Finding]:
    """The hard limit; the agent raises the soft one itself."""
    _, hard = read_open_files_limit()
    if hard >= NEEDED_OPEN_FILES:
        given = "unlimited" if hard == sys.maxsize else str(hard)
        return [ok("open files", f"{given} allowed, {NEEDED_OPEN_FILES} needed at most by {_CONTAINERS} containers")]
    detail = (
        f"the hard limit is {hard}, but {_CONTAINERS} containers with all {_CONNECTIONS} connections to their vDevice"
        f" sockets need {NEEDED_OPEN_FILES}: in a burst, programs of a pod could be refused"
    )
    remedy = (
        f"start the agent with a limit of {NEEDED_OPEN_FILES} or more (LimitNOFILE= of its unit, or of the runtime's)"
    )
    return [warning("open files", detail, remedy)]


def vdevice_probes() -> tuple[CheckProbe, ...]:
    return (
        CheckProbe(name="host processes", run=check_processes),
        CheckProbe(name="virtual manager", run=check_virtual_manager),
        CheckProbe(name="virtual manager", run=check_left),
        CheckProbe(name="open files", run=check_open_files),
    )
