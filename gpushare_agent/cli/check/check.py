"""`gpushare-agent check`: reports before a deployment what of the node is in place, and the cure for what is not.

All probes run beside each other, each is bounded, and the report has their findings in a fixed order. They only read: in
particular the PodResources socket is connected to but gets no request, because a List while an Allocate is open makes the
kubelet give the same device twice (docs/explanation/architecture.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from gpushare_agent.agent.auto_isolation import resolve_isolation
from gpushare_agent.cli.check import api, containers, isolation, local, shares
from gpushare_agent.cli.check.finding import Finding, Level, as_text, error, ok, report_document
from gpushare_agent.cli.command_line import Form
from gpushare_agent.cli.render_text import print_report
from gpushare_agent.settings.settings import Settings

PROBE_TIMEOUT_S = 5.0
MPS_TIMEOUT_S = 130.0
"""Over the longest time limit of one command that can be set."""
API_TIMEOUT_S = 20.0
"""Several questions, after a library that alone takes most of a second to load."""

Probe = Callable[[Settings], Awaitable[list[Finding]]]

_VCUDA, _MPS, _HAMI_CORE = "vcuda", "mps", "hami-core"
_PROBES: tuple[tuple[str, Probe, float, str | None], ...] = (
    ("driver", local.check_driver, local.DRIVER_TIMEOUT_S, None),
    ("kubelet", local.check_kubelet, PROBE_TIMEOUT_S, None),
    ("pod resources", local.check_pod_resources, PROBE_TIMEOUT_S, None),
    ("container runtime", containers.check_runtime, PROBE_TIMEOUT_S, None),
    ("cgroups", containers.check_cgroups, PROBE_TIMEOUT_S, None),
    ("host processes", containers.check_processes, PROBE_TIMEOUT_S, _VCUDA),
    ("directories", local.check_directories, PROBE_TIMEOUT_S, None),
    ("virtual manager", isolation.check_virtual_manager, PROBE_TIMEOUT_S, _VCUDA),
    ("driver directory", isolation.check_driver_directory, isolation.PLAN_TIMEOUT_S, _VCUDA),
    ("mps", shares.check_mps, MPS_TIMEOUT_S, _MPS),
    ("hami-core", shares.check_hami_core, PROBE_TIMEOUT_S, _HAMI_CORE),
    ("driver limits", shares.check_driver_limits, local.DRIVER_TIMEOUT_S, "driver"),
    ("device lists", shares.check_device_lists, local.DRIVER_TIMEOUT_S, None),
    ("list sizes", shares.check_list_sizes, local.DRIVER_TIMEOUT_S, None),
    ("open files", local.check_open_files, PROBE_TIMEOUT_S, _VCUDA),
    ("files", local.check_files, PROBE_TIMEOUT_S, None),
    ("api server", api.check_api, API_TIMEOUT_S, None),
)
"""Name, probe, time limit, and the isolation that alone needs it (None: every node does)."""


async def run(settings: Settings, *, form: Form) -> int:
    """Prints the report; 1 if anything is an error, else 0."""
    findings = await check_node(settings)
    print_report(form, report_document(settings.node_name, findings), as_text(findings))
    return 1 if any(finding.level is Level.ERROR for finding in findings) else 0


async def check_node(settings: Settings) -> list[Finding]:
    """Every finding, in the order of the probes, then what each isolation without an error keeps."""
    node = await resolve_isolation(settings)
    settings = node.settings
    chosen = [ok("isolation", f"auto chooses {settings.isolation}: {node.isolation_reason}")]
    async with asyncio.TaskGroup() as group:
        tasks = [
            (group.create_task(_bounded(name, probe, settings, timeout_s), name=f"check {name}"), needed_by)
            for name, probe, timeout_s, needed_by in _PROBES
            if needed_by is None or needed_by in settings.isolation_parts_in_use
        ]
    failed = {part for task, part in tasks if part and any(one.level is Level.ERROR for one in task.result())}
    kept = await _bounded("isolation", partial(shares.check_kept, failed=failed), settings, PROBE_TIMEOUT_S)
    found = (finding for task, _ in tasks for finding in task.result())
    return [*(chosen if node.isolation_reason else ()), *found, *kept]


async def _bounded(name: str, probe: Probe, settings: Settings, timeout_s: float) -> list[Finding]:
    try:
        async with asyncio.timeout(timeout_s):
            return await probe(settings)
    except TimeoutError:
        return [error(name, f"no answer within {timeout_s:g} s", "find out what hangs there; the agent would hang too")]
