"""`gpushare-agent check`: reports before a deployment what of the node is in place, and the cure for what is not.

All probes run beside each other, each is bounded, and the report has their findings in a fixed order. They only read: in
particular the PodResources socket is connected to but gets no request, because a List while an Allocate is open makes the
kubelet give the same device twice (docs/explanation/architecture.md).
"""

from __future__ import annotations

import asyncio
from functools import partial

from gpushare_agent.agent.auto_isolation import resolve_isolation
from gpushare_agent.cli.check import api, containers, local, shares
from gpushare_agent.cli.check.finding import as_text, report_document
from gpushare_agent.cli.command_line import Form
from gpushare_agent.cli.render_text import print_report
from gpushare_agent.gpus.part import open_driver
from gpushare_agent.isolation import ISOLATIONS
from gpushare_agent.isolation.check import CheckProbe, build_check_probes
from gpushare_agent.model.finding import Finding, Level, error, ok
from gpushare_agent.settings.settings import Settings

API_TIMEOUT_S = 20.0
"""Several questions, after a library that alone takes most of a second to load."""

_NODE = (
    CheckProbe(name="driver", run=local.check_driver, timeout_s=local.DRIVER_TIMEOUT_S),
    CheckProbe(name="kubelet", run=local.check_kubelet),
    CheckProbe(name="pod resources", run=local.check_pod_resources),
    CheckProbe(name="container runtime", run=containers.check_runtime),
    CheckProbe(name="cgroups", run=containers.check_cgroups),
    CheckProbe(name="directories", run=local.check_directories),
)
_BESIDE = (
    CheckProbe(name="device lists", run=shares.check_device_lists, timeout_s=local.DRIVER_TIMEOUT_S),
    CheckProbe(name="list sizes", run=shares.check_list_sizes, timeout_s=local.DRIVER_TIMEOUT_S),
    CheckProbe(name="files", run=local.check_files),
    CheckProbe(name="api server", run=api.check_api, timeout_s=API_TIMEOUT_S),
)
"""Of every node, before and after those of its isolations."""


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
    parts = [part for part in ISOLATIONS if part in settings.isolation_parts_in_use]
    own = [(part, probe) for part in parts for probe in build_check_probes(part, open_driver)]
    every = [*(("", probe) for probe in _NODE), *own, *(("", probe) for probe in _BESIDE)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            (part, group.create_task(_bounded(probe, settings), name=f"check {probe.name}")) for part, probe in every
        ]
    failed = {part for part, task in tasks if any(one.level is Level.ERROR for one in task.result())} - {""}
    kept = await _bounded(CheckProbe(name="isolation", run=partial(shares.check_kept, failed=failed)), settings)
    found = dict.fromkeys(finding for _, task in tasks for finding in task.result())  # two isolations may ask the same
    return [*(chosen if node.isolation_reason else ()), *found, *kept]


async def _bounded(probe: CheckProbe, settings: Settings) -> list[Finding]:
    try:
        async with asyncio.timeout(probe.timeout_s):
            return await probe.run(settings)
    except TimeoutError:
        detail, cure = f"no answer within {probe.timeout_s:g} s", "find out what hangs there; the agent would hang too"
        return [error(probe.name, detail, cure)]
