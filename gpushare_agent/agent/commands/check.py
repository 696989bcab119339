"""`gpushare-agent check`: reports before a deployment what of the node is in place, and the remedy for what is not.

The probes of the node come first (driver, kubelet, files; runtime and cgroups; device lists and sizes), then the table of
them and what runs it, last the report. The probes of an isolation are in its package, those of the API server in
check_api.py. What the node does not use is not probed.

All probes run concurrently, each is bounded, and the report has their findings in a fixed order. They only read: in
particular the PodResources socket is connected to but gets no request, because a List while an Allocate is open makes the
kubelet give the same device twice (docs/explanation/architecture.md).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from gpushare_agent.agent.admission.decisions.former_devices import held_back
from gpushare_agent.agent.admission.decisions.recovery import Records, rebuild
from gpushare_agent.agent.auto_isolation import resolve_isolation
from gpushare_agent.agent.commands.check_api import API_CURE, check_api
from gpushare_agent.agent.commands.former_daemonset import STATELESS
from gpushare_agent.agent.delivery.cdi_specs import cdi_specs
from gpushare_agent.agent.delivery.volume_config import driver_volumes
from gpushare_agent.agent.gpus.part import open_driver
from gpushare_agent.agent.isolation import ISOLATIONS, isolations_in_use, mounts_driver
from gpushare_agent.agent.isolation.check import CheckProbe, build_check_probes
from gpushare_agent.agent.isolation.isolations import device_list_warnings
from gpushare_agent.agent.isolation.resource_names import resource_names
from gpushare_agent.agent.kubelet.device_table import MAX_STATUS_BYTES, check_lists, status_bytes
from gpushare_agent.agent.kubelet.handover import instance_socket_name
from gpushare_agent.agent.kubelet.records import FILE_NAME, gpu_managers_checkpoint, is_former, read_checkpoint
from gpushare_agent.agent.kubelet.registration import KUBELET_SOCKET
from gpushare_agent.agent.runtime import node_probes
from gpushare_agent.agent.runtime.cgroups import Cgroups, CgroupVersion, cgroup_version
from gpushare_agent.agent.runtime.cri import RuntimeClient, runtime_endpoints
from gpushare_agent.core.cli.command_line import Invocation
from gpushare_agent.core.cli.render_text import print_report
from gpushare_agent.core.kit.sockets import MAX_ADDRESS_BYTES
from gpushare_agent.core.model.errors import AgentError, StartupError, Unavailable, file_remedy
from gpushare_agent.core.model.finding import Finding, Level, error, ok, warning
from gpushare_agent.core.model.gpus import HOST_MEMORY_TEXTS, Gpu, GpuInventory, HostMemory
from gpushare_agent.core.model.isolation import DeviceListStrategy
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.settings.settings import Settings

DRIVER_TIMEOUT_S = 15.0
"""Without persistence mode a GPU takes a second or two to wake."""


async def check_driver(settings: Settings) -> list[Finding]:
    """The GPUs, and with NVML the device nodes that containers need."""
    is_simulated = settings.driver == "simulated"
    try:
        inventory = await read_inventory(settings)
    except AgentError as failure:
        remedy = "make `nvidia-smi` work on the host; a node without GPUs can rehearse with --driver simulated"
        if is_simulated:
            remedy = "check simulated.topology, gpus and gpu_memory_mib"
        # As the agent itself: it ends, or goes on and tries again.
        level = Level.ERROR if settings.fail_on_init_error else Level.WARNING
        return [Finding(level=level, what="driver", detail=str(failure), cure=remedy)]
    memory = sum(gpu.memory_mib for gpu in inventory.gpus)
    kind = "simulated GPUs" if is_simulated else f"GPUs, driver {inventory.driver_version}"
    findings = [ok("driver", f"{len(inventory.gpus)} {kind}, {memory} MiB in all")]
    if not inventory.gpus:
        remedy = "the node will offer nothing; is a GPU plugged in?"
        findings = [warning("driver", "it answers, but there is no GPU", remedy)]
    see = "see `nvidia-smi -q` and the kernel log"
    for gpu in inventory.gpus:
        if not gpu.is_healthy:
            detail = f"number {gpu.label} ({gpu.uuid}) is unhealthy: {gpu.unhealthy_reason}"
            cure = _MIG_PAGE if "MIG mode" in gpu.unhealthy_reason else see
            findings.append(warning("gpu", detail, f"{cure}; it is not given to pods until it recovers"))
        elif gpu.minor < 0:
            remedy = "have it given by NVIDIA's runtime or a CDI spec of nvidia-ctk, not by device-nodes alone"
            findings.append(warning("gpu", f"number {gpu.label}: the driver names no device node of it", remedy))
        if gpu.host_memory is not None:
            findings.append(_host_memory_finding(gpu, gpu.host_memory))
    for index, reason in inventory.unreadable:
        findings.append(warning("gpu", f"number {index} cannot be read: {reason}", f"{see}; it is not offered"))
    findings += _mig_findings(settings, inventory)
    names = resource_names(settings, inventory.mig_profiles)
    # Excluded GPUs may differ: they are in no resource.
    offered = [gpu for gpu in inventory.gpus if not gpu.is_selected(settings.excluded_gpus)]
    if names.gpu and (why := names.nvidia.unlike(offered)):
        reported, _, remedy = why.partition(". ")
        findings.append(error("mig", reported, remedy))
    return findings if is_simulated else [*findings, _device_nodes_finding(inventory)]


def _mig_findings(settings: Settings, inventory: GpuInventory) -> Iterator[Finding]:
    """GPUs in MIG mode, with their instances, and those that should be. Why others are not offered is their own finding."""
    profiles: dict[GpuUuid, Counter[str]] = {gpu.uuid: Counter() for gpu in inventory.mig_partitioned}
    for place in (gpu.mig for gpu in inventory.gpus if gpu.mig is not None and gpu.mig.parent in profiles):
        profiles[place.parent][place.profile] += 1
    problems = {layout.parent: layout.problem for layout in inventory.mig_layouts}
    for gpu in inventory.mig_partitioned:
        has = ", ".join(f"{n} of {name}" for name, n in sorted(profiles[gpu.uuid].items())) or "none"
        kind = "on demand; now" if gpu.uuid in problems else "that are there:"
        yield ok("mig", f"number {gpu.label} ({gpu.uuid}) has instances {kind} {has}")
        if problem := problems.get(gpu.uuid):
            yield warning("mig", f"number {gpu.label}: {problem}", _MIG_PAGE)
    named = [one for one in settings.mig.on_demand if one != "all"]
    for gpu in inventory.gpus:
        if gpu.mig is None and gpu.is_selected(named):
            remedy = f"turn it on (`nvidia-smi -i {gpu.bus_id} -mig 1`), or take the GPU out of mig.on_demand"
            yield warning("mig", f"number {gpu.label} is one of mig.on_demand, and MIG mode is not on", remedy)
    known = [*inventory.gpus, *inventory.mig_partitioned]
    for name in named:
        if not any(gpu.is_selected([name]) for gpu in known):
            remedy = (
                "write an index, a UUID or a model, such as *H100*; nothing has to be done where other nodes have it"
            )
            yield warning("mig", f"mig.on_demand names {name}, and this node has no such GPU", remedy)
    if "all" in settings.mig.on_demand and not problems:
        yield warning(
            "mig", "mig.on_demand is all, and no GPU is in MIG mode", "turn it on: `nvidia-smi -i GPU -mig 1`"
        )


def _host_memory_finding(gpu: Gpu, kind: HostMemory) -> Finding:
    """What of a share is not kept; of memory that an operator named also whether the host has it."""
    detail, remedy = HOST_MEMORY_TEXTS[kind]
    has_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
    if kind is HostMemory.UNIFIED and not gpu.memory_mib:
        detail = f"{detail}; it is given whole or in replicas"
        remedy = "to share its memory set resources.unified_memory_mib; and set the pods' memory limits"
    elif kind is HostMemory.UNIFIED and gpu.memory_mib > has_mib:
        detail = f"resources.unified_memory_mib is {gpu.memory_mib}, and the host has {has_mib} MiB; {detail}"
    return warning("gpu memory", f"number {gpu.label}: {detail}", remedy)


async def read_inventory(settings: Settings) -> GpuInventory:
    """One read of the configured driver. Raises AgentError."""
    driver = open_driver(settings)
    try:
        return await driver.read()
    finally:
        await driver.close()


def device_paths(gpus: Sequence[Gpu]) -> list[Path]:
    """The device nodes of NVIDIA's driver. It says none of a GPU that was lost before the start: see Gpu."""
    of_gpus = (Path(f"/dev/nvidia{gpu.minor}") for gpu in gpus if gpu.minor >= 0)
    return [Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"), *of_gpus]


def _device_nodes_finding(inventory: GpuInventory) -> Finding:
    paths = device_paths(inventory.gpus)
    missing: list[str] = []
    for path in paths:
        try:
            node_probes.require_device_node(path)
        except Unavailable as failure:
            missing.append(str(failure))
    remedy = "run `nvidia-modprobe -c 0 -u` on the host; in a pod, set NVIDIA_DRIVER_CAPABILITIES to compute,utility"
    return error("device nodes", "; ".join(missing), remedy) if missing else ok("device nodes", f"{len(paths)} present")


async def check_kubelet(settings: Settings) -> str:
    socket = settings.kubelet.device_plugin_path / KUBELET_SOCKET
    await node_probes.connect_to_socket(socket)
    return f"{socket} answers"


async def check_socket_path(settings: Settings) -> str:
    """The length of our own sockets' paths."""
    longest = str(settings.kubelet.device_plugin_path / instance_socket_name(ResourceKind.VMEMORY.socket))
    length, limit = len(longest.encode()), MAX_ADDRESS_BYTES
    if length > limit:
        raise Unavailable(f"{longest} has {length} bytes, a socket's path may have {limit}")
    return f"{length} of {limit} bytes used"


async def check_pod_resources(settings: Settings) -> list[Finding] | str:
    """Connects and hangs up: asking it for a List here could harm an admission under way."""
    path = settings.kubelet.pod_resources_socket
    if path is None:
        detail = "not set: pods are identified by the API server alone"
        return [warning("pod resources", detail, "mount the kubelet's pod-resources directory, and name its socket")]
    await node_probes.connect_to_socket(path)
    return f"{path} answers (not asked for its list: that could disturb an admission)"


async def check_directory(settings: Settings) -> list[Finding] | str:
    """The directory of the device-plugin sockets; the kubelet makes it."""
    directory = settings.kubelet.device_plugin_path
    found = await asyncio.to_thread(node_probes.require_writable, directory)
    if found.directory != directory:
        remedy = "start the kubelet, mount the directory, or set --device-plugin-path"
        return [error("directory", f"{directory}: not there", remedy)]
    return f"{directory} writable, {found.free_bytes // MIB} MiB free"


async def check_files(settings: Settings) -> list[Finding]:
    """Files that settings name. Where volume.conf is read for the driver directory, that line reports it."""
    named = {"--extra-config": settings.extra_config}
    # Where one does, its own probe reads the file and reports it.
    if not any(isolation.mounts_driver for isolation in isolations_in_use(settings)):
        named["--volume-config"] = settings.volume_config
    findings: list[Finding] = []
    if settings.state_directory is None:
        findings.append(
            warning("state", f"state_directory is empty: {STATELESS}", "mount a directory of the host for it")
        )
    for flag, path in named.items():
        if path is None:
            continue
        try:
            node_probes.require_readable_file(path)
            findings.append(ok("file", f"{path} is readable ({flag})"))
        except Unavailable as failure:
            findings.append(error("file", f"{failure} ({flag})", f"create the file, mount it, or leave {flag} out"))
    return findings


RUNTIME_TIMEOUT_S = 4.0
"""Less than a probe's, so that the finding names the silent socket."""

_MIG_PAGE = "see docs/explanation/mig.md"
_FROM_STATUSES = "containers' IDs come from the pods' statuses in the API server"


async def check_runtime(settings: Settings) -> list[Finding] | str:
    """Asks the configured CRI socket for its version, or those known that are there."""
    if not any(isolation.follows_processes for isolation in isolations_in_use(settings)):
        return f"not asked: isolation {settings.isolation} does not use it"
    endpoint, known = settings.runtime.endpoint, node_probes.RUNTIME_SOCKETS
    # A socket that was configured is tried though it is missing: that is the finding.
    tried = [endpoint] if endpoint else [str(path) for path in known if path.is_socket()]
    if not tried:
        return f"no known socket is here: {_FROM_STATUSES}"
    timeout_s = min(settings.runtime.request_timeout_s, RUNTIME_TIMEOUT_S)
    try:
        with closing(RuntimeClient(runtime_endpoints(endpoint, known), timeout_s=timeout_s)) as runtime:
            found = await runtime.version()
    except AgentError as failure:
        remedy = "correct runtime.endpoint and mount its socket" if endpoint else "mount the one that runs"
        detail = f"{', '.join(tried)}: {failure}; until one answers, {_FROM_STATUSES}"
        return [warning("container runtime", detail, f"{remedy}, or do without: leave both out")]
    return f"{found.name} {found.version} answers at {found.endpoint}"


async def check_cgroups(settings: Settings) -> list[Finding]:
    """The hierarchies, whether all processes are in them, and the driver if one is set."""
    root, driver = settings.runtime.cgroup_root, settings.runtime.cgroup_driver
    version = cgroup_version(root)
    finding = ok("cgroups", f"{version} at {root}")
    kubelet_socket = settings.kubelet.device_plugin_path / KUBELET_SOCKET
    # cgroup.procs of v1 lists a process of another PID namespace not at all, v2 lists it as 0: it is at least counted.
    if version is not CgroupVersion.V2 and not await node_probes.sees_processes_of_node(kubelet_socket):
        detail = (
            f"{version} at {root}, which leaves out the processes of other PID namespaces: "
            f"shares of force-deleted pods are freed while their processes may run on"
        )
        remedy = "give the agent the host's PID namespace (hostPID: true), or move the node to cgroup v2"
        finding = warning("cgroups", detail, remedy)
    if not driver:
        return [finding]
    try:
        # A walk of all cgroups, which may take long on a full node.
        disagreement = await Cgroups(root, settings.runtime.proc_root).check_driver_in_thread(driver)
    except Unavailable as failure:
        disagreement = str(failure)
    agrees = ok("cgroup driver", f"{driver} is set, and no pod's cgroup says otherwise")
    remedy = "leave runtime.cgroup_driver out: it is seen from the paths themselves"
    return [finding, agrees if disagreement is None else warning("cgroup driver", disagreement, remedy)]


def check_kept(settings: Settings, failed: Collection[str] = ()) -> list[Finding]:
    """The limits of a share under each isolation in use but those that `failed`: which are enforced, by whom, which not."""
    # What a broken isolation would enforce is no news to whoever reads its error.
    names = sorted(settings.isolations_in_use - frozenset(failed))
    return [ok("isolation", f"{name}: {ISOLATIONS[name].keeps.text}") for name in names]


async def check_device_lists(settings: Settings) -> list[Finding]:
    """The strategies do not contradict each other, and CDI names every GPU where it provides them."""
    try:
        volumes = driver_volumes(settings, is_mounted=mounts_driver(settings))
    except StartupError:
        volumes = {}  # the isolation's own line has it
    texts = device_list_warnings(settings, volumes)
    findings = [warning("device lists", text, "see docs/reference/device-lists.md") for text in texts]
    if not {DeviceListStrategy.CDI_ANNOTATIONS, DeviceListStrategy.CDI_CRI} & set(settings.device_list_strategy):
        return findings
    remedy = "see docs/reference/device-lists.md; `gpushare-agent cdi list` prints who names which GPU"
    try:
        inventory = await read_inventory(settings)
        state = await asyncio.to_thread(cdi_specs(settings, mounts_driver=mounts_driver(settings)).plan, inventory.gpus)
    except AgentError as failure:
        return [*findings, error("cdi", str(failure), file_remedy(failure, remedy))]
    findings += [warning("cdi", f"passed over: {text}", remedy) for text in state.passed_over]
    named = ok("cdi", f"{len(state.named)} GPUs have a name of kind {state.kind}, or get it from the agent")
    problems = state.troubles or state.unnamed
    return [*findings, *([error("cdi", text, remedy) for text in problems] if problems else [named])]


async def check_list_sizes(settings: Settings) -> list[Finding]:
    """The lists of memory blocks and of GPUShare's units fit the kubelet: else the agent does not start."""
    try:
        found = await read_inventory(settings)
    except AgentError:
        return []  # the driver's own line has it
    names = resource_names(settings)
    check_lists(found, names)
    fits = ok("list sizes", f"the lists of {', '.join(names.names)} fit the kubelet's messages")
    # Kubelets from 1.36 on write each device ID of a container into its pod's status.
    size = status_bytes(found.gpus, names)
    detail = f"that of a pod with all cores and memory of this node has {size} bytes of device IDs"
    if size <= MAX_STATUS_BYTES:
        return [fits, ok("pod status", detail)]
    larger = "set a larger resources.memory_block_mib, or have whole GPUs asked for without memory"
    remedy = f"{larger} (docs/reference/formats.md)"
    return [fits, warning("pod status", f"{detail}, more than {MAX_STATUS_BYTES}", remedy)]


async def check_former_pods(settings: Settings) -> list[Finding]:
    """Containers that gpu-manager or GPUShare's plugin started, by the kubelet's records."""
    path = settings.kubelet.device_plugin_path / FILE_NAME
    try:
        entries = await asyncio.to_thread(read_checkpoint, path, gpu_managers_checkpoint(settings))
        if not any(is_former(entry.device_ids) for entry in entries):
            return []
        inventory = await read_inventory(settings)
    except AgentError:
        return []  # no kubelet has run here, or the driver's own line has it
    records = Records(listed=(), checkpoint=entries, pods=None)
    found = [one for one in rebuild(records, resource_names(settings), inventory, 0.0) if one.started_by]
    held = held_back(found)
    remedy = "unless annotations of the pod tell it, which are not read here, delete the pod and create it again"
    unknown = [warning("former pods", text, remedy) for text in dict.fromkeys(held.values())]
    return unknown or [ok("former pods", f"{len(found)} containers of other programs keep their GPUs until they end")]


API_TIMEOUT_S = 20.0
"""Several questions, after a library that alone takes most of a second to load."""

_FIRST = (
    CheckProbe("driver", check_driver, DRIVER_TIMEOUT_S),
    CheckProbe(
        "kubelet socket",
        check_kubelet,
        cure="start the kubelet, or set --device-plugin-path to its device-plugins directory (mounted into the pod)",
    ),
    CheckProbe("socket path", check_socket_path, cure="mount the kubelet's directory at a shorter path"),
    CheckProbe(
        "pod resources",
        check_pod_resources,
        cure="mount the kubelet's pod-resources directory into the pod, or set --kubelet.pod-resources-socket",
    ),
    CheckProbe("container runtime", check_runtime),
    CheckProbe(
        "cgroups", check_cgroups, cure="mount the host's /sys/fs/cgroup into the pod, or set --runtime.cgroup-root"
    ),
    CheckProbe(
        "directory",
        check_directory,
        cure="run the agent as root with the directory mounted for writing and room on its disk, or set"
        " --device-plugin-path",
    ),
)
_LAST = (
    CheckProbe("former pods", check_former_pods, DRIVER_TIMEOUT_S),
    CheckProbe("device lists", check_device_lists, DRIVER_TIMEOUT_S),
    CheckProbe("list sizes", check_list_sizes, DRIVER_TIMEOUT_S, cure="set the unit or block size that the text names"),
    CheckProbe("file", check_files),
    CheckProbe("api server", check_api, API_TIMEOUT_S, cure=API_CURE),
)
"""Of every node, before and after those of its isolations."""


async def run(call: Invocation) -> int:
    """Prints the report; 1 if anything is an error, else 0."""
    settings = call.settings()
    findings = await check_node(settings)
    print_report(call.options.output, report_document(settings.node_name, findings), as_text(findings))
    return 1 if any(finding.level is Level.ERROR for finding in findings) else 0


async def check_node(settings: Settings) -> list[Finding]:
    """Every finding, in the order of the probes, then what each isolation without an error keeps."""
    node = await resolve_isolation(settings)
    # From here on with the isolation that auto chooses: the probes must be of that one.
    settings = node.settings
    chosen = [ok("isolation", f"auto chooses {settings.isolation}: {node.isolation_reason}")]
    parts = [part for part in ISOLATIONS if part in settings.isolation_parts_in_use]
    own = [(part, probe) for part in parts for probe in build_check_probes(part, open_driver)]
    every = [*(("", probe) for probe in _FIRST), *own, *(("", probe) for probe in _LAST)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            (part, group.create_task(_bounded(probe, settings), name=f"check {probe.name}")) for part, probe in every
        ]
    # Without the node's own probes, which belong to no isolation.
    failed = {part for part, task in tasks if any(one.level is Level.ERROR for one in task.result())} - {""}
    found = dict.fromkeys(finding for _, task in tasks for finding in task.result())  # two isolations may ask the same
    return [*(chosen if node.isolation_reason else ()), *found, *check_kept(settings, failed)]


async def _bounded(probe: CheckProbe, settings: Settings) -> list[Finding]:
    try:
        async with asyncio.timeout(probe.timeout_s):
            found = await probe.run(settings)
    except AgentError as failure:
        return [error(probe.name, str(failure), file_remedy(failure, probe.cure))]
    except TimeoutError:
        # A file system of a lost server blocks without end, in the agent as here.
        remedy = "find out what hangs there; the agent would hang too"
        return [error(probe.name, f"no answer within {probe.timeout_s:g} s", remedy)]
    return [ok(probe.name, found)] if isinstance(found, str) else found


def as_text(findings: Sequence[Finding]) -> str:
    """A line each: level, what, detail, remedy; then a line that counts."""
    width = max((len(finding.what) for finding in findings), default=0)
    lines = [
        f"{finding.level:<7}  {finding.what:<{width}}  {finding.detail}"
        + (f"  -> {finding.cure}" if finding.cure else "")
        for finding in findings
    ]
    errors, warnings = _count(findings, Level.ERROR), _count(findings, Level.WARNING)
    summary = f"This node is {'not ' if errors else ''}ready: errors {errors}, warnings {warnings}."
    # A library's error may have lines of its own; scripts read the report line by line.
    return "\n".join([*(" ".join(line.splitlines()) for line in lines), summary])


def report_document(node_name: str, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "node": node_name,
        "errors": _count(findings, Level.ERROR),
        "warnings": _count(findings, Level.WARNING),
        "findings": [to_builtins(finding) for finding in findings],
    }


def _count(findings: Sequence[Finding], level: Level) -> int:
    return sum(finding.level is level for finding in findings)
