"""The sandbox's report for people: tables for a terminal, lines for a pipe. Pure, from sandbox/report/document.py."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpushare_agent.cli.command_line import Form
from gpushare_agent.cli.render_text import print_as
from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.sandbox.manifests import EXPECTATION_ANNOTATION

_PHASE_STYLES = {
    "Running": "green",
    "Succeeded": "cyan",
    "Pending": "yellow",
    "Failed": "red",
    "Terminating": "magenta",
}
ALLOCATED = ("cores allocated", "memory allocated MiB")
"""Columns of card_use."""
NARROW = 100
"""Below this width a GPU's name, a request or a PID would take the place of what changes."""
_ROOM_FOR_PIDS = 130
_PIDS_SHOWN = 3


def gpu_text(container: dict[str, Any]) -> str:
    return ",".join(map(str, container["cards"])) or "-"


def limit_text(container: dict[str, Any]) -> str:
    """The limit as the container reads it: `30 %, 4096 MiB`, elastic `30–60 %, 4096 MiB`; on whole GPUs `none`."""
    reported = container["vdevice"]
    if reported is None:
        return "-"
    if not reported["is_limited"]:
        return "none"
    ceiling = f"–{reported['core_limit']}" if reported["core_limit"] > reported["cores"] else ""
    return f"{reported['cores']}{ceiling} %, {reported['memory_mib']} MiB"


def short_limit_text(container: dict[str, Any]) -> str:
    """`30%/4096M`, with no blank in it."""
    return limit_text(container).replace(" %, ", "%/").replace(" MiB", "M")


def used_text(user: dict[str, Any]) -> str:
    """Of a container or a GPU, in percent of a GPU: `12 %, 2048 MiB`."""
    used = user["used"]
    return "-" if used is None else f"{used['cores']:.0f} %, {used['memory_mib']} MiB"


def pids_text(container: dict[str, Any], *, is_short: bool) -> str:
    """How many processes, and the first of them on a wide terminal."""
    pids = container["pids"]
    if is_short or not pids:
        return str(len(pids))
    more = ", …" if len(pids) > _PIDS_SHOWN else ""
    return f"{len(pids)}: {', '.join(map(str, pids[:_PIDS_SHOWN]))}{more}"


def health_text(gpu: dict[str, Any]) -> Text:
    """With the driver's reason for a GPU that is not well."""
    text = ": ".join(filter(None, (gpu["health"], gpu["health_reason"])))
    return Text(text, style="" if gpu["health"] == "Healthy" else "red")


def gpu_use(gpu: dict[str, Any]) -> tuple[str, str]:
    """Cores and memory, each allocated and whole."""
    return (
        f"{gpu['cores_allocated']} / {CORES_PER_GPU}",
        f"{gpu['memory_mib_allocated']} / {gpu['memory_mib']}",
    )


def has_several_nodes(document: dict[str, Any]) -> bool:
    """Then it matters where a pod is."""
    return len(document["nodes"]) > 1


def node_text(pod: dict[str, Any]) -> str:
    return pod["node"] or "-"


def status_of(pod: dict[str, Any]) -> Text:
    word = "Terminating" if pod["is_terminating"] else pod["phase"]
    return Text(word, style=_PHASE_STYLES.get(word, ""))


def gpus_table(node: dict[str, Any], *, is_narrow: bool) -> Table:
    table = Table(title=f"GPUs of {node['name']}", title_justify="left")
    wide = () if is_narrow else ("name",)
    for column in ("GPU", *wide, "NUMA", *ALLOCATED, *(("used",) if wide else ()), "health"):
        table.add_column(column, justify="left" if column in ("name", "health") else "right")
    for gpu in node["cards"]:
        numa = "-" if gpu["numa"] is None else str(gpu["numa"])
        name, used = ((), ()) if is_narrow else ((gpu["name"],), (used_text(gpu),))
        table.add_row(str(gpu["index"]), *name, numa, *gpu_use(gpu), *used, health_text(gpu))
    return table


def address_lines(node: dict[str, Any]) -> list[Text]:
    """Where the node's agent is asked, below its GPUs."""
    words = {"web": "web", "debug": "debug", "control_socket": "control socket"}
    found = [f"{words[key]} {where}" for key in words if (where := node["addresses"].get(key))]
    return [Text("  ".join(found), no_wrap=True, overflow="fold")] if found else []


def pods_table(document: dict[str, Any], width: int) -> Table:
    """A line for each container. On a narrow terminal requests and PIDs are left out first."""
    is_narrow = width < NARROW
    asked, used = ((), ()) if is_narrow else (("cores", "blocks"), ("used",))
    places = ("node",) if has_several_nodes(document) else ()
    table = Table(title="Pods", title_justify="left")
    for column in ("pod", "phase", *places, "container", *asked, "GPUs", "limit", *used, "PIDs"):
        table.add_column(column, justify="right" if column in asked else "left")
    for pod in document["pods"]:
        for position, container in enumerate(pod["containers"]):
            name, phase = (f"{pod['namespace']}/{pod['name']}", status_of(pod)) if position == 0 else ("", "")
            requests = () if is_narrow else (cores_asked(container), memory_asked(container))
            limit = short_limit_text(container) if is_narrow else limit_text(container)
            pids = pids_text(container, is_short=width < _ROOM_FOR_PIDS)
            use = () if is_narrow else (used_text(container),)
            place = (node_text(pod) if position == 0 else "",) if places else ()
            table.add_row(name, phase, *place, container["name"], *requests, gpu_text(container), limit, *use, pids)
    return table


def reason_lines(document: dict[str, Any]) -> list[Text]:
    """Below the table, where they have the whole width."""
    pods = [(f"{pod['namespace']}/{pod['name']}", reason_text(pod)) for pod in document["pods"]]
    return [Text(f"{name}: {reason}") for name, reason in pods if reason]


def reason_text(pod: dict[str, Any]) -> str:
    """Why the pod is in its phase, and that its manifest expects that."""
    text = ": ".join(filter(None, (pod["reason"], pod["message"])))
    expected = pod["annotations"].get(EXPECTATION_ANNOTATION)
    return f"{text} (as intended: {expected})" if expected and text else text


def report_tables(document: dict[str, Any], width: int, *, has_addresses: bool = False) -> Group:
    """`has_addresses`: below the GPUs of each node stands where its agent is asked."""
    parts: list[RenderableType] = []
    for node in document["nodes"]:
        parts.append(gpus_table(node, is_narrow=width < NARROW))
        parts += address_lines(node) if has_addresses else ()
    return Group(*parts, pods_table(document, width), *reason_lines(document))


def print_document(document: dict[str, Any], form: Form, *, has_addresses: bool = False) -> None:
    print_as(form, document, lambda width: [report_tables(document, width, has_addresses=has_addresses)])


def cores_asked(container: dict[str, Any]) -> str:
    if container["units"]:
        return units_asked(container)
    return str(container["vcore"] or sum(one["cores"] for one in container["claims"]))


def memory_asked(container: dict[str, Any]) -> str:
    """Blocks, units of GPUShare's resource, or the MiB of claims."""
    if container["units"]:
        return "-"
    if container["claims"]:
        return f"{sum(one['memory_mib'] for one in container['claims'])} MiB"
    return f"{container['gpu_mem']} gpu-mem" if container["gpu_mem"] else str(container["vmemory"])


def units_asked(container: dict[str, Any]) -> str:
    """Whole GPUs or replicas by NVIDIA's names."""
    return ", ".join(f"{count} {name.rpartition('/')[2]}" for name, count in sorted(container["units"].items()))


def _asked(container: dict[str, Any]) -> str:
    if container["units"]:
        return units_asked(container)
    if container["gpu_mem"]:
        return memory_asked(container)
    if container["claims"]:
        return f"{cores_asked(container)} cores, {memory_asked(container)}"
    return f"{container['vcore']} cores, {container['vmemory']} blocks"


def pod_line(pod: dict[str, Any], *, has_node: bool = False) -> str:
    """One pod in one line, for a log or a pipe, with its node where there are several."""
    containers = "; ".join(
        f"{c['name']}: {_asked(c)} on GPU {gpu_text(c)}{_reported(pod, c)}" for c in pod["containers"]
    )
    reason = reason_text(pod)
    place = f" on {pod['node']}" if has_node and pod["node"] else ""
    return (
        f"pod {pod['namespace']}/{pod['name']} {status_of(pod)}{place} [{containers}]{f' - {reason}' if reason else ''}"
    )


def _reported(pod: dict[str, Any], container: dict[str, Any]) -> str:
    """Only of a pod that runs: the limit is written just before the start and would make a line of its own."""
    is_known = pod["phase"] == "Running" and container["vdevice"] is not None
    return f", limit {limit_text(container)}" if is_known else ""
