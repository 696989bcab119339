"""The probes of `gpushare-agent check` for how containers and their processes are found: runtime, cgroups, PIDs."""

from __future__ import annotations

from gpushare_agent.isolation import isolations_in_use
from gpushare_agent.kubelet.registration import KUBELET_SOCKET
from gpushare_agent.model.errors import AgentError, Unavailable
from gpushare_agent.model.finding import Finding, error, ok, warning
from gpushare_agent.runtime import node_probes
from gpushare_agent.runtime.cgroups import Cgroups, CgroupVersion, cgroup_version
from gpushare_agent.runtime.cri import open_runtime
from gpushare_agent.settings.settings import Settings

RUNTIME_TIMEOUT_S = 4.0
"""Less than a probe's, so that the finding names the silent socket."""

_FROM_STATUSES = "containers' IDs come from the pods' statuses in the API server"


async def check_runtime(settings: Settings) -> list[Finding]:
    """Asks the configured CRI socket for its version, or those known that are there."""
    if not any(isolation.follows_processes for isolation in isolations_in_use(settings)):
        return [ok("container runtime", f"not asked: isolation {settings.isolation} does not use it")]
    endpoint, known = settings.runtime.endpoint, node_probes.RUNTIME_SOCKETS
    tried = [endpoint] if endpoint else [str(path) for path in known if path.is_socket()]
    if not tried:
        return [ok("container runtime", f"no known socket is here: {_FROM_STATUSES}")]
    timeout_s = min(settings.runtime.request_timeout_s, RUNTIME_TIMEOUT_S)
    try:
        async with open_runtime(endpoint, timeout_s=timeout_s, known=known) as runtime:
            found = await runtime.version()
    except AgentError as failure:
        cure = "correct --container-runtime-endpoint and mount its socket" if endpoint else "mount the one that runs"
        detail = f"{', '.join(tried)}: {failure}; until one answers, {_FROM_STATUSES}"
        return [warning("container runtime", detail, f"{cure}, or do without: leave both out")]
    return [ok("container runtime", f"{found.name} {found.version} answers at {found.endpoint}")]


async def check_cgroups(settings: Settings) -> list[Finding]:
    """The hierarchies, whether all processes are in them, and the driver if one is set."""
    root = settings.runtime.cgroup_root
    try:
        version = cgroup_version(root)
    except Unavailable as failure:
        cure = "mount the host's /sys/fs/cgroup into the pod, or set --runtime.cgroup-root"
        return [error("cgroups", str(failure), cure)]
    findings = [ok("cgroups", f"{version} at {root}")]
    if version is not CgroupVersion.V2 and not await _sees_processes(settings):
        detail = (
            f"{version} at {root}, which leaves out the processes of other PID namespaces: "
            f"shares of force-deleted pods are freed while their processes may run on"
        )
        cure = "give the agent the host's PID namespace (hostPID: true), or move the node to cgroup v2"
        findings = [warning("cgroups", detail, cure)]
    return findings + await _check_driver_setting(settings)


async def _check_driver_setting(settings: Settings) -> list[Finding]:
    setting = settings.runtime.cgroup_driver
    if not setting:
        return []
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)
    cure = "leave --cgroup-driver out: it is seen from the paths themselves"
    try:
        disagreement = await cgroups.check_driver_in_thread(setting)
    except Unavailable as failure:
        return [warning("cgroup driver", str(failure), cure)]
    if disagreement is not None:
        return [warning("cgroup driver", disagreement, cure)]
    return [ok("cgroup driver", f"{setting} is set, and no pod's cgroup says otherwise")]


async def _sees_processes(settings: Settings) -> bool:
    return await node_probes.sees_processes_of_node(settings.kubelet.device_plugin_path / KUBELET_SOCKET)
