"""The sandbox's report for people: tables for a terminal, lines for a pipe. Pure, from sandbox/report.py."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpushare_agent.cli.command_line import Form
from gpushare_agent.cli.render_text import (
    CORES_COLUMN,
    MEMORY_COLUMN,
    PHASE_STYLES,
    PIPE_WIDTH,
    counted,
    gib,
    grid,
    of_cores,
    percent,
    plain,
    print_as,
)
from gpushare_agent.cli.render_top import Choice, gpu_lines, together, top_table
from gpushare_agent.model.names import CORES_PER_GPU, MIB
from gpushare_agent.sandbox.manifests import EXPECTATION_ANNOTATION
from gpushare_agent.sandbox.report import UNKNOWN, ContainerRow, NodeRow, PodRow, SandboxDocument

NARROW = 100
"""Below this width the limit that a container reads would take the place of what changes."""
_PIDS_WIDTH = 130
_PIDS_SHOWN = 3


def gpu_text(container: ContainerRow) -> str:
    return ",".join(container["labels"]) or "-"


def cores_text(container: ContainerRow) -> str:
    """What a container may use, in hundredths of a GPU: `30`, elastic `30–60`, `whole`; units of NVIDIA's names."""
    if container["units"]:
        return ", ".join(f"{count} {name.rpartition('/')[2]}" for name, count in sorted(container["units"].items()))
    # A claim's cores are in no limit of the container.
    cores = container["vcore"] or sum(one["cores"] for one in container["claims"])
    reported = container["vdevice"]
    # vcuda.config of whole GPUs has numbers too, which limit nothing.
    ceiling = reported["core_limit"] if reported is not None and reported["is_limited"] else 0
    return of_cores(cores, ceiling)


def limit_text(container: ContainerRow) -> str:
    """The limit as the container reads it: `30 %, 4 GiB`, elastic `30–60 %, 4 GiB`; on whole GPUs `none`."""
    reported = container["vdevice"]
    if reported is None:
        return "-"
    if not reported["is_limited"]:
        return "none"
    return f"{of_cores(reported['cores'], reported['core_limit'])} %, {gib(reported['memory_mib'] * MIB)} GiB"


def memory_text(container: ContainerRow) -> str:
    """Used and limit in GiB: `0.5/4`; the limit alone where the use is not known."""
    reported = container["vdevice"]
    # Units and claims have no memory in the request: what the container reads says it.
    limit_mib = container["memory_mib"] or (reported["memory_mib"] if reported is not None else 0)
    limit, used = gib(limit_mib * MIB) if limit_mib else "-", container["used"]
    return limit if used is None else f"{gib(used['memory_mib'] * MIB)}/{limit}"


def used_text(container: ContainerRow) -> str:
    """The use of all its GPUs together, in percent."""
    used = container["used"]
    # Of all its GPUs: two that are half busy are 50 %.
    return percent(None if used is None else used["cores"] / CORES_PER_GPU / max(1, len(container["gpus"])))


def pids_text(container: ContainerRow, *, is_short: bool) -> str:
    """How many processes, and the first of them on a wide terminal."""
    pids = container["pids"]
    if is_short or not pids:
        return str(len(pids))
    more = ", …" if len(pids) > _PIDS_SHOWN else ""
    # PIDs change with each process: the first few tell that processes are there.
    return f"{len(pids)}: {', '.join(map(str, pids[:_PIDS_SHOWN]))}{more}"


def has_several_nodes(document: SandboxDocument) -> bool:
    """Then it matters where a pod is."""
    return len(document["nodes"]) > 1


def status_of(pod: PodRow) -> Text:
    word = "Terminating" if pod["is_terminating"] else pod["phase"]
    return Text(word, style=PHASE_STYLES.get(word, ""))


def node_parts(node: NodeRow, width: int) -> list[RenderableType]:
    """The node, what is allocated of all its GPUs, and each of them as `top` shows it."""
    gpus = node["gpus"]
    # The agent needs a second to start; its GPUs come from its own document.
    if not gpus:
        return [Text(f"{plain(node['name'])}: its agent has not answered yet", style="yellow")]
    text = "  ".join([f"{plain(node['name'])}: {counted(len(gpus), 'GPU')}", *together(gpus)])
    lines = [line for gpu in gpus for line in gpu_lines(gpu, width, "" if gpu["health"] != UNKNOWN else UNKNOWN)]
    # A pipe has no use for bars.
    choice = Choice(has_bars=width != PIPE_WIDTH)
    return [Text(text, style="bold", no_wrap=True, overflow="ellipsis"), top_table(lines, width, choice)]


def address_lines(node: NodeRow) -> list[Text]:
    """The addresses of the node's agent, below its GPUs."""
    words = {"web": "web", "control_socket": "control socket"}
    found = [f"{words[key]} {where}" for key in words if (where := node["addresses"].get(key))]
    return [Text("  ".join(found), no_wrap=True, overflow="fold")] if found else []


def pods_table(document: SandboxDocument, width: int) -> Table:
    """A line for each container. On a narrow terminal without the limit that it reads, and PIDs are counted, not named."""
    places = ("NODE",) if has_several_nodes(document) else ()
    limits = () if width < NARROW else ("LIMIT",)
    columns = ("POD/CONTAINER", "PHASE", *places, "GPU", CORES_COLUMN, "USED %", MEMORY_COLUMN, *limits, "PIDS")
    rows = [
        (
            f"{pod['namespace']}/{pod['name']}/{container['name']}",
            status_of(pod),
            *([pod["node"] or "-"] if places else ()),
            gpu_text(container),
            cores_text(container),
            used_text(container),
            memory_text(container),
            *([limit_text(container)] if limits else ()),
            pids_text(container, is_short=width < _PIDS_WIDTH),
        )
        for pod in document["pods"]
        for container in pod["containers"]
    ]
    return grid(columns, rows, right=(CORES_COLUMN, "USED %", MEMORY_COLUMN))


def reason_lines(document: SandboxDocument) -> list[Text]:
    """The pods' reasons, for below the table, where they have the whole width."""
    pods = [(f"{pod['namespace']}/{pod['name']}", reason_text(pod)) for pod in document["pods"]]
    return [Text(f"{name}: {plain(reason)}", style="yellow") for name, reason in pods if reason]


def reason_text(pod: PodRow) -> str:
    """Why the pod is in its phase, and that its manifest expects that."""
    text = ": ".join(filter(None, (pod["reason"], pod["message"])))
    expected = pod["annotations"].get(EXPECTATION_ANNOTATION)
    # A sample that cannot fit shows a refusal: who tries the sandbox should not take it for a fault.
    return f"{text} (as intended: {expected})" if expected and text else text


def report_tables(document: SandboxDocument, width: int, *, has_addresses: bool = False) -> Group:
    """`has_addresses`: the addresses of its agent stand below the GPUs of each node."""
    parts: list[RenderableType] = []
    for node in document["nodes"]:
        parts += node_parts(node, width)
        parts += address_lines(node) if has_addresses else ()
        parts.append(Text(""))
    return Group(*parts, pods_table(document, width), *reason_lines(document))


def print_document(document: SandboxDocument, form: Form, *, has_addresses: bool = False) -> None:
    """The report in that form."""
    print_as(form, document, lambda width: [report_tables(document, width, has_addresses=has_addresses)])


def pod_line(pod: PodRow, *, has_node: bool = False) -> str:
    """One pod in one line, for a log or a pipe, with its node where there are several. Without use: it always changes."""
    containers = "; ".join(
        f"{one['name']}: {_share(one)} on GPU {gpu_text(one)}{_limit(pod, one)}" for one in pod["containers"]
    )
    reason = reason_text(pod)
    place = f" on {pod['node']}" if has_node and pod["node"] else ""
    return (
        f"pod {pod['namespace']}/{pod['name']} {status_of(pod)}{place} [{containers}]{f' - {reason}' if reason else ''}"
    )


def _share(container: ContainerRow) -> str:
    """`30 GPU cores, 4 GiB`."""
    cores = cores_text(container)
    parts = [cores if container["units"] else f"{cores} GPU cores"] if cores != "0" else []
    parts += [f"{gib(container['memory_mib'] * MIB)} GiB"] if container["memory_mib"] else []
    return ", ".join(parts) or "no GPU"


def _limit(pod: PodRow, container: ContainerRow) -> str:
    """Only of a pod that runs: the limit is written just before the start and would make a line of its own."""
    is_known = pod["phase"] == "Running" and container["vdevice"] is not None
    return f", limit {limit_text(container)}" if is_known else ""
