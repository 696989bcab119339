"""The pages that code makes, whole or between two lines: `nox -s pages -- --write` writes them, a test compares.

A line `<!--generated:NAME-->` begins what BLOCKS[NAME] makes, `<!--end-->` ends it: a word each of what is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, takewhile
from pathlib import Path
from statistics import mean
from typing import Any, cast, get_type_hints

import yaml
from annotated_types import Ge, Le
from msgspec import convert
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from bench import generator
from bench.inflation import CpuPods, InflationPolicy
from bench.packing import SEEDS as PACKING_SEEDS
from bench.packing import TRACES
from bench.real_packing import CPU_NODES, NODES, WAYS, Filled
from bench.results import Row, from_json, shown
from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.observability.attribution import AllocatedContainers, join_usage
from gpushare_agent.agent.observability.consumption import Consumption
from gpushare_agent.agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.agent.observability.metrics.dcgm import dcgm_series
from gpushare_agent.agent.observability.metrics.node import node_series
from gpushare_agent.agent.observability.metrics.text import NodePage
from gpushare_agent.commands import COMMAND_LINE
from gpushare_agent.core.cli.command_line import Command
from gpushare_agent.core.formats.mig_profiles import profile_names
from gpushare_agent.core.model.gpu_health import XID_NAMES
from gpushare_agent.core.model.gpus import Link, LinkKind
from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.resources import NvidiaNames
from gpushare_agent.core.model.usage import GpuSample
from gpushare_agent.core.placement.place import LINK_COSTS, NVLINK_COST, link_cost
from gpushare_agent.core.settings.reference import Key, all_keys, text_of
from gpushare_agent.core.settings.sections import HealthSettings
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.extender.app import build, show_state
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.simulation.workload import memory_of
from tests.docs import gpu_page
from tests.docs.isolations_page import not_kept
from tests.docs.policies_page import policies
from tests.docs.regulator_page import regulator_cells
from tests.docs.settings_page import settings_lists
from tests.docs.surface_page import surface_lists
from tests.e2e.nvidia_dra_suites import BATS, EXAMPLES, GO_SPECS
from tests.observability.support_usage import (
    UUIDS,
    allocation,
    counting_node,
    driver_sample,
    facts,
    id_of,
    key_of,
    on_demand_node,
    owner,
    process,
    snapshot,
)
from tests.support_core import mig_instance

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "tests/data/isolation/measured.md"
"""As `nox -s isolation -- --error-budget --table FILE` wrote it on the machine that the page names."""
_PARTS = from_json((ROOT / "bench/measured/whole.json").read_text(encoding="utf-8"))
"""What one run of `nox -s bench` measured, with `--json`."""
_OBJECT = {"type": ["object", "null"], "additionalProperties": False}
_LIST, _TEXT = ("array", "string", "integer"), ("string",)
_JSON_TYPES = {
    "true|false": ("boolean",),
    "N": ("integer",),
    "NUMBER": ("number",),
    "SECONDS": ("number", "string"),
    "K=V[,K=V…]": ("object", "string"),
}
_FURTHER_WORDS = {"driver": ("nvidia",)}
"""Former words, which a file may still have and no choice lists."""
_BLOCK = re.compile(r"(<!--generated:(\w+)-->\n).*?(<!--end-->\n)", re.S)


_CONTAINER_LABELS = frozenset(("namespace", "pod", "container", "node", "gpu", "uuid"))
DCGM_LABELS = frozenset(
    ("UUID", "gpu", "device", "modelName", "Hostname", "pci_bus_id", "namespace", "pod", "container")
)


def full_metrics() -> str:
    """Every event has happened once and the driver reports everything, so that every series is there."""
    metrics = AgentMetrics()
    metrics.know_resources(["r"])
    metrics.know_gpus([UUIDS[0]], 0)
    metrics.gpu_event("xid", 79, is_ignored=False, uuid=UUIDS[0])
    metrics.driver_error("timeout")
    metrics.show_pod_event_age(lambda: 1.0)
    metrics.show_isolations(lambda: {"gpushare": True})
    metrics.show_isolation_probe("gpushare", lambda: False)
    metrics.show_node_configuration(lambda: False)
    metrics.mig_called("create", "done", 1.0)
    metrics.show_mig_instances(lambda: {"idle": 1.0})
    reported: dict[str, Any] = {
        name: 1 for name, hint in get_type_hints(GpuSample).items() if "|" in str(hint) and name != "processes"
    }
    one = replace(process(10), encoder_ratio=0.0, decoder_ratio=0.0)
    sample = GpuSample(**{**reported, "uuid": UUIDS[0], "throttle_reasons": (), "processes": (one,)})
    allocated = allocation(key_of(1))
    holders = AllocatedContainers(gpus={allocated.key: allocated.gpus}, by_id={id_of(1): allocated.key})
    usage = join_usage(driver_sample(sample), {10: owner(1)}, holders, sampled_at=1.0)
    shown = snapshot(replace(facts(allocated), not_limited="no library"), usage=usage)
    first, second = shown.inventory.gpus
    second = replace(second, mig=mig_instance(1, 0, 0).mig, has_joined=True)
    divided = on_demand_node().inventory
    with_instance = replace(
        shown.inventory, gpus=(first, second), mig_partitioned=divided.mig_partitioned, mig_layouts=divided.mig_layouts
    )
    shown = replace(shown, inventory=with_instance)
    cache = AllocationCache()
    cache.put(allocated)
    counted = Consumption(counting_node(cache, shown.inventory))
    counted.changed(allocated.key)
    counted.add(usage)
    metrics.show_node(NodePage(lambda _: [*node_series(shown), *counted.series(), *dcgm_series(shown)], max_age_s=1.0))
    return metrics.exposition("")[1].decode()


def families(text: str = "") -> list[Metric]:
    """Of the agent, or of `text`, but for the process's. Raises AssertionError: one has no series, so no labels."""
    parsed = text_string_to_metric_families(text or full_metrics())
    found = [one for one in parsed if not one.name.startswith("process_")]
    assert [one.name for one in found if not one.samples] == []
    return found


def _metrics(prefix: str, common: frozenset[str] = frozenset(), *, has_them: bool = True) -> str:
    """The families of this group that have the `common` labels, which the text above the list names, or have them not."""
    return _metrics_list([one for one in _of_group(prefix) if (common <= _labels(one)) == has_them], common)


def _of_group(prefix: str) -> list[Metric]:
    return [one for one in families() if _group(one.name) == prefix]


def _extender_metrics() -> str:
    """Nothing of the cluster is asked for them."""
    metrics = ExtenderMetrics()
    show_state(build(Settings(), cast(Any, None)), metrics)
    shown = families(metrics.exposition("")[1].decode())
    return _metrics_list([one for one in shown if one.name.startswith("gpushare_extender_")])


def _metrics_list(chosen: Sequence[Metric], common: frozenset[str] = frozenset()) -> str:
    lines = []
    for family in chosen:
        name = family.name + ("_total" if family.type == "counter" else "")
        # The type is known by the name: metrics.md says how.
        assert (family.type == "histogram") == name.endswith("_duration_seconds"), name
        own = ", ".join(sorted(_labels(family) - common))
        lines.append(f"- **`{name}`**{own and f' ({own})'}: {family.documentation.rstrip('.')}")
    return "\n".join(lines) + "\n"


def _labels(family: Metric) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - {"le"}


def _dcgm_names() -> str:
    """What each means the exporter's users know."""
    chosen = _of_group("DCGM_")
    assert [one.name for one in chosen if not _labels(one) >= DCGM_LABELS] == []
    return ", ".join(f"`{one.name}`" for one in chosen)


def _group(name: str) -> str:
    counts = ("gpushare_gpu_events", "gpushare_gpu_health_changes")
    beginnings = (*counts, "gpushare_container_", "gpushare_gpu_", "gpushare_", "container_", "DCGM_")
    found = next(one for one in beginnings if name.startswith(one))
    return "gpushare_" if found in counts else found


def _commands() -> str:
    """Each command with its options, those that several have first; flags of settings are settings.md's."""
    rows = {command: list(_rows(_parser(command))) for command in COMMAND_LINE.commands}
    shared = [row for row, count in Counter(chain(*rows.values())).items() if count > 2]
    lines = ["Options of several commands:", "", *_listed(shared)]
    earlier: list[Command] = []
    for command, own in rows.items():
        lines += [f"### {command.name}", "", command.about, ""]
        others = [row for row in own if row not in shared]
        # A pair such as cordon and uncordon: the one that has fewer stands behind the other.
        longer = next((one for one in earlier if others and set(others) < set(rows[one])), None)
        names = ", ".join(re.findall("^- (`.+?`)", "\n".join(others), re.M))
        lines += [f"Options as for [{longer.name}](#{longer.name}): {names}.", ""] if longer else _listed(others)
        earlier.append(command)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _parser(command: Command) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=command.name, add_help=False)
    command.add_arguments(parser)
    return parser


def _listed(rows: Sequence[str]) -> list[str]:
    return [*rows, ""] if rows else []


def _rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One for each option, positional argument and subcommand, with the options that its command does not have too."""
    of_command = {name for action in parser._actions for name in action.option_strings}
    for action in _actions(parser):
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, text in texts.items():  # a former name of a command has none
                own = [one for one in _actions(action.choices[name]) if of_command.isdisjoint(one.option_strings)]
                yield _row(" ".join([name, *map(_usage, own)]), text)
        else:
            names, value = ", ".join(action.option_strings), _value(action)
            text = (action.help or "") % {"default": action.default, "prog": parser.prog}
            yield _row(f"{names} {value}".strip(), text.replace(f"sandbox-{os.getuid()}", "sandbox-UID"))


def _row(option: str, text: str) -> str:
    return f"- `{option}`: {text}"


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [one for one in parser._actions if one.help != argparse.SUPPRESS and one.dest != "help"]


def _usage(action: argparse.Action) -> str:
    shown = f"{action.option_strings[0]} {_value(action)}".strip() if action.option_strings else _value(action)
    return shown if action.required else f"[{shown}]"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return str(name)


def _schema_with_settings(text: str) -> str:
    """The chart's schema: its last definition is every setting, a line for each section."""
    before, begin, _ = text.partition('    "agentSettings": ')
    sections: dict[str, dict[str, Any]] = {"": {}}
    for key in all_keys():
        if key.name != "config":  # which names the file itself
            section, _, name = key.name.rpartition(".")
            sections.setdefault(section, {})[name] = _setting_schema(key)
    properties = sections.pop("") | {name: _OBJECT | {"properties": below} for name, below in sections.items()}
    lines = ",\n".join(f"        {json.dumps(name)}: {json.dumps(below)}" for name, below in properties.items())
    opened = json.dumps(_OBJECT | {"type": "object"}).removesuffix("}")
    return f'{before}{begin}{opened}, "properties": {{\n{lines}\n    }}}}\n  }}\n}}\n'


def _setting_schema(key: Key) -> dict[str, Any]:
    """What a file may have there, null for the default. Of texts and lists the agent checks more."""
    kind = key.kind
    if kind.allowed.startswith("one of"):
        return {
            "enum": [*dict.fromkeys([*kind.choices, *_FURTHER_WORDS.get(key.name, ()), text_of(key.default)]), None]
        }
    found: dict[str, Any] = {
        "type": [*_JSON_TYPES.get(kind.placeholder, _LIST if "[," in kind.placeholder else _TEXT), "null"]
    }
    for limit in key.field.metadata:
        found |= (
            {"minimum": limit.ge} if isinstance(limit, Ge) else {"maximum": limit.le} if isinstance(limit, Le) else {}
        )
    return found


CHART_TABLE = runpy.run_path(str(ROOT / "charts/values_table.py"))


_FOUND_BY = {
    "linked": "", "dlsym": "", "cuGetProcAddress, CUDA 11.8": "CUDA 11.8", "cuGetProcAddress_v2, CUDA 11.8": "CUDA 11.8",
    "cuGetProcAddress_v2, CUDA 12.8": "CUDA 12", "cuGetProcAddress_v2, CUDA 13.0": "CUDA 13",
    "dlsym of RTLD_NEXT": "dlsym of RTLD_NEXT", "dlopen with RTLD_DEEPBIND": "", "Python's ctypes": "",
}  # fmt: skip
_MEMORY_KINDS = {
    "cuMemAllocPitch": "", "cuMemAllocManaged": "managed memory", "cuMemAllocAsync": "cuMemAllocAsync",
    "cuMemAllocAsync in a stream of another GPU": "cuMemAllocAsync on another GPU", "a pool of the program's": "pools",
    "array of 2 dimensions": "arrays", "array of 3 dimensions": "arrays", "mipmapped array": "arrays",
    "cuMemCreate": "cuMemCreate", "memory of a graph's node": "graphs", "a child of one with 3 blocks": "child processes",
}  # fmt: skip
_LAUNCH_KINDS = {
    "kernels a second": "", "by cuLaunchKernelEx": "cuLaunchKernelEx", "cooperative": "cooperative", "of a graph": "graphs",
}  # fmt: skip
"""Rows of the measured table, and what the page calls each where a library fails; libgpushare's column is right."""


def _libraries() -> str:
    """Four libraries, this project's first, by what someone who chooses compares."""
    head, _, *rows = _measured("vgpu-manager")
    libraries = sorted(head[1:], key=lambda name: name != "gpushare")
    cells = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}

    def row(text: str, kinds: dict[str, str]) -> list[str]:
        return [text, *(_failed(one, kinds, cells) for one in libraries)]

    two = gpu_page.gpu_two_shares()
    errors = {
        kind: {one[0].partition(": ")[2]: one[1:] for one in _measured("132 SMs")[2:] if one[0].startswith(f"{kind}: ")}
        for kind in ("short", "wave")
    }
    numbers = {
        "two shares, 300 and 600 kernels a second": "shares of 30 and 60 on a GPU",
        (more := "µs more for a cuMemAlloc with its cuMemFree, and for a launch"): more,
    }
    return _joined(
        [
            ["", *libraries],
            row("programs that it does not limit or start", _FOUND_BY),
            row("memory that it does not limit, or refuses too early", _MEMORY_KINDS),
            row("launches that it does not delay", _LAUNCH_KINDS),
            *([text, *(cells[name][one] for one in libraries)] for text, name in numbers.items()),
            *(
                [f"error of compute, {kind} kernels, points", *(_span_of_errors(of[one]) for one in libraries)]
                for kind, of in errors.items()
            ),
            [f"30 and 60 on one {gpu_page.gpu_name()}, percent", *(two.get(one, "") for one in libraries)],
        ]
    )


def _failed(library: str, kinds: dict[str, str], cells: dict[str, dict[str, str]]) -> str:
    """Those of the kinds of which its cell is not what it must be: libgpushare's, within a tenth."""
    wrong = [
        short or name for name, short in kinds.items() if not _is_near(cells[name][library], cells[name]["gpushare"])
    ]
    return ", ".join(dict.fromkeys(wrong)) or "none"


def _is_near(cell: str, right: str) -> bool:
    return cell == right or (cell.isdecimal() and abs(int(cell) - int(right)) <= int(right) / 10)


def _span_of_errors(cells: Sequence[str]) -> str:
    """Of the means measured on each number of SMs, and in brackets the largest error."""
    means, most = zip(*((float(one) for one in re.findall(r"[\d.]+", cell)[:2]) for cell in cells), strict=True)
    return f"{min(means)} to {max(means)} ({max(most)})"


def _costs() -> str:
    """Of the agent's benchmark and of a real GPU."""
    rows = {one.name.strip(): one for one in _PARTS["agent"].rows}

    def took(name: str) -> str:
        one = rows[name]
        return f"{shown(one.median, one.unit)} (p99 {shown(one.p99, one.unit)})"

    calls = ", ".join(f"{call} {us}" for call, us in gpu_page.gpu_added().items())
    return (
        f"- At its pod's start the kubelet's four calls take {took('whole pod: both resources, four calls')}, "
        f"of which preparing the container takes {took('PreStartContainer of a share')}.\n"
        f"- On one {gpu_page.gpu_name()} calls of its programs take longer by, in µs: {calls}."
    )


def _measured(column: str) -> list[list[str]]:
    """The cells of the one table with that column."""
    tables = MEASURED.read_text(encoding="utf-8").strip().split("\n\n")
    [lines] = [table.splitlines() for table in tables if column in table.splitlines()[0]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


_OF_COMPONENT = ("Adds", "It needs", "Needs", "Nodes with", "Not tried", "Not with", "The price", "Who has")
"""How sentences of its head begin that a reader needs before the choice, beside the first."""


def _components() -> str:
    """Each component as the head of its file has it, in the order in which kustomize needs them: the chart's."""
    choices = (ROOT / "charts/gpushare-agent/templates/_choices.tpl").read_text(encoding="utf-8")
    order = re.findall(r'"([a-z0-9-]+)"', choices)
    paths = sorted((ROOT / "manifests/components").glob("*/kustomization.yaml"))
    # The chart has no value for nvidia-config, whose file is a value of its own: it stands last.
    paths.sort(key=lambda path: order.index(path.parent.name) if path.parent.name in order else len(order))
    rows = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        head = " ".join(" ".join(takewhile(lambda line: line.startswith("#"), lines)).replace("#", "").split())
        first, *others = re.split(r"(?<=\.) (?=[A-Z])", head)
        chosen = [first, *(one for one in others if one.startswith(_OF_COMPONENT))]
        rows.append(f"- **`{path.parent.name}`**: {_linked(' '.join(chosen), 'reference')}")
    return "\n".join(rows)


def mig_classes() -> str:
    """A DeviceClass for each profile, in the order of their sizes."""
    made = "# Made by `nox -s pages -- --write` of gpushare_agent/core/formats/mig_profiles.py.\n"
    return made + "---\n".join(map(_mig_class, profile_names()))


def _mig_class(profile: str) -> str:
    resource = NvidiaNames(sharing=Sharing.SHARES).mig_resource(profile)
    return f"""\
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {{name: {resource.rpartition("/")[2]}.gpushare-agent}}
spec:
  extendedResourceName: {resource}
  selectors:
    - cel:
        expression: >-
          device.driver == 'gpushare-agent' && device.attributes['gpushare-agent'].type == 'mig'
          && device.attributes['gpushare-agent'].profile == '{profile}'
"""


def _linked(text: str, folder: str) -> str:
    """The pages that it names as links of a page in that folder of docs/."""

    def link(found: re.Match[str]) -> str:
        return f"[{found[2]}]({'' if found[1] == folder else f'../{found[1]}/'}{found[2]})"

    return re.sub(r"docs/([\w-]+)/([\w-]+\.md)", link, text)


def _xids() -> str:
    """Every Xid that has a name, with what the default lists do."""
    health = HealthSettings()
    done = dict.fromkeys(XID_NAMES, "probes") | dict.fromkeys(health.reset_xids, "reset")
    # A number in both lists is ignored.
    done |= dict.fromkeys(health.ignored_xids, "ignored")
    of = {does: [str(number) for number, its in sorted(done.items()) if its == does] for does in _XIDS}
    return "\n".join(f"- {_XIDS[does]}: {', '.join(of[does])}" for does in of)


_XIDS = {"ignored": "Ignored", "probes": "Unhealthy until it has passed the probes", "reset": "Unhealthy until a reset"}


def _navigation() -> list[Any]:
    """Of the site: mkdocs.yml has each page once, under a title or alone."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    found = yaml.safe_load("nav:" + nav)["nav"]
    assert isinstance(found, list)
    return found


def _guides() -> str:
    """The how-to guides as the site groups and names them."""
    [parts] = [part["How-to guides"] for part in _navigation() if "How-to guides" in part]
    lines = []
    for group in (part for part in parts if isinstance(next(iter(part.values())), list)):
        [(title, pages)] = group.items()
        links = (f"[{name}]({page.removeprefix('how-to/')})" for one in pages for name, page in one.items())
        lines.append(f"- **{title}**: {'; '.join(links)}")
    return "\n".join(lines)


def _alerts() -> str:
    """By severity, each as a link to the page that it names. It says itself what it means."""
    found: dict[str, list[str]] = {"critical": [], "warning": [], "info": []}
    for group in yaml.safe_load((ROOT / "manifests/monitoring/alerts.yaml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            texts = rule["annotations"]
            page, _, anchor = texts["runbook"].partition("#")
            target = _linked(page, "how-to").partition("](")[2].replace(")", f"#{anchor})" if anchor else ")")
            found[rule["labels"]["severity"]].append(f"[`{rule['alert']}`]({target}")
    return "\n".join(f"- **{severity}**: {', '.join(links)}" for severity, links in found.items())


def _link_costs() -> str:
    nvlinks = (1, 2, 4, 12, 18)
    examples = ", ".join(f"NV{n} {link_cost(Link(kind=LinkKind.NVLINK, nvlinks=n)):,}" for n in nvlinks)
    others = ", ".join(f"{kind.name} {cost:,}" for kind, cost in LINK_COSTS.items() if kind is not LinkKind.SELF)
    return f"A pair costs {NVLINK_COST:,} / number of NVLinks ({examples}); {others}."


def _workload() -> str:
    """The distributions of bench/generator.py."""
    medians = {size: one.median_s / 60 for size, one in generator.DURATIONS.items()}
    sigmas = ", ".join(f"{one.sigma:.1f}" for one in generator.DURATIONS.values())
    words = {0: "a share", 1: "one GPU", 2: "two", 4: "four", 8: "eight"}
    swings = f"the rate swings by {generator.SWING:.0%} {generator.SWINGS} times".replace("%", " %")
    rows = {
        "nodes": (f"{part} % {gpus} × {model} ({memory_of(model):,} MiB)" for model, gpus, part in generator.MACHINES),
        "size": (f"{part} % {words[gpus]}" for gpus, part in generator.WHOLE_GPUS),
        "shares: cores / GiB": (f"{part} % {cores} / {mib // 1024}" for cores, mib, part in generator.SHARES),
        "run time": (
            f"log-normal, {generator.MIN_DURATION_S:.0f} s to {generator.MAX_DURATION_S / 3600:.0f} hours",
            f"median {' / '.join(f'{minutes:.0f}' for minutes in medians.values())} min (share / one GPU / several)",
            f"sigma {sigmas}",
        ),
        "arrivals": (f"Poisson, {swings}", "`--load` 1 asks for all cores on average"),
    }
    return "\n".join(f"- **{name}**: {', '.join(parts)}" for name, parts in rows.items())


def _nvidia_dra_suites() -> str:
    """How much of what test_nvidia_dra.py runs passes; nvidia_dra_suites.py has what does not, and why."""
    specs, tests = sum(count for _, count in GO_SPECS.values()), sum(file.tests for file in BATS.values())
    passed = f"{tests - sum(len(file.differs) for file in BATS.values())} of {tests} BATS tests"
    return (
        f"All {specs} specs of the Go suite pass, {passed} and all {len(EXAMPLES)} examples; those of MIG too, "
        "with `mig-on-demand`. The others want an MPS daemon for each claim, other attributes or metrics, and device nodes, "
        "which simulated GPUs lack."
    )


def _packing() -> str:
    """The rows that `python -m bench.packing TRACES --json bench/measured/packing.json` wrote: percent of all, in brackets
    the published figure."""
    rows = json.loads((ROOT / "bench/measured/packing.json").read_text(encoding="utf-8"))
    rows = [row for row in rows if row["cpu_pods"] == CpuPods.GPU_AWARE and row["policy"] in _SHOWN]
    rows.sort(key=lambda row: list(InflationPolicy).index(row["policy"]))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        published = f" ({row['published']:.1f})" if row["published"] is not None else ""
        fewer = f", {row['seeds']} seeds" if row["seeds"] < PACKING_SEEDS else ""
        cells.setdefault(f"`{row['policy']}`", {})[row["trace"]] = f"{row['mean']:.1f}{published}{fewer}"
    traces = [trace for trace in TRACES if any(row["trace"] == trace for row in rows)]
    return _joined(
        [["policy", *traces], *([name, *(of.get(trace, "") for trace in traces)] for name, of in cells.items())]
    )


_SHOWN = (InflationPolicy.FGD, InflationPolicy.BINPACK, InflationPolicy.BEST_FIT, InflationPolicy.RANDOM)
"""Ours, and the authors' best and worst other one."""


def _packing_scheduler() -> str:
    """The rows that `python -m bench.packing --scheduler DIR TRACES --json bench/measured/packing_scheduler.json` wrote."""
    runs = convert(
        json.loads((ROOT / "bench/measured/packing_scheduler.json").read_text(encoding="utf-8")), list[Filled]
    )
    cells: dict[str, list[str]] = {}
    for way in WAYS:
        of_way = [run for run in runs if run.way == way]
        kept = (
            ", NoSchedule"
            if way.is_reserved
            else f", `facts.taint_above` {way.taint_above:g}"
            if way.taint_above < 1
            else ""
        )
        allocated = [run.allocated for run in of_way]
        cell = f"{mean(allocated):.1f}"
        waiting = "" if any(run.cpu_pods for run in of_way) else ", pods without GPUs wait"
        policy = f"`{way.policy}`" if way.policy else "kube-scheduler alone, whole GPUs"
        cells.setdefault(f"{policy}{kept}", []).append(f"{cell}{waiting}")
    table = [["policy", f"{NODES} nodes", f"and {CPU_NODES} without GPUs"]]
    return _joined([*table, *([name, *parts] for name, parts in cells.items())])


def _benchmark(name: str) -> str:
    """The rows of one part of the benchmark's run that an operator compares, and all that missed their target."""
    table = [["what", "median", "p99", "missed target"]]
    for one in _PARTS[name].rows:
        is_missed = one.verdict.startswith("missed")
        if is_missed or _COMPARED.match(one.name.strip()):
            targets = dict.fromkeys(_number_of(one, target) for target in (one.target_median, one.target_p99))
            missed = one.failed or ", ".join(filter(None, targets)) if is_missed else ""
            p99 = _number_of(one, one.p99) if one.runs > 1 and one.unit not in ("MiB", "%") else ""
            what = re.sub(r"^  (· )?", "· ", re.sub("^(  )?5,000 nodes, |extender: ", "", one.name))
            table.append([_with_unit(what, one), _number_of(one, one.median), p99, missed])
    return _joined(table)


_COMPARED = re.compile(
    "process start to the vDevice|SIGTERM|processor time, idle, NVML|one round over|100 pods at once|poll of the page, CPU"
    "|extender: |5,000 nodes(: a pod|, default.*(filter|resident memory)$)"
)


def _compared(name: str, here: str, there: str, only: str = "") -> str:
    """Rows of one part whose names differ by `here` and `there` alone, those of the pattern: what one run measured twice."""
    rows = {one.name.strip(): one for one in _PARTS[name].rows}
    table = [["what", here, there]]
    for what, one in rows.items():
        other = rows.get(what.replace(here, there)) if here in what and re.search(only, what) else None
        if other is not None and other.median > 0:
            text = (
                what.replace("5,000 nodes, ", "")
                .replace(f", {here}", "")
                .replace(f": {here}", "")
                .replace(f"{here}: ", "")
            )
            table.append([_with_unit(text, one), *(_number_of(side, side.median) for side in (one, other))])
    return _joined(table)


def _with_unit(what: str, one: Row) -> str:
    """Once for the row."""
    return what if one.unit in ("", "/s") else f"{what}, {one.unit}"


def _number_of(one: Row, value: float | None) -> str:
    return shown(value, one.unit).removesuffix(one.unit).strip()


_ENDURANCE = {
    "on": "on", "minutes": "minutes", "kills": "agent killed", "upgrades": "rolled out", "kubelet_restarts": "kubelet",
    "gpus_lost": "GPUs lost", "pods": "pods", "checks": "checks of limits", "wrong": "wrong",
    "first_mib": "MiB at first", "last_mib": "at last",
}  # fmt: skip
"""The columns of bench/measured/endurance.json, and what each is called."""
_KILLS_WANTED = 10_000


def _endurance() -> str:
    """The runs of tests/e2e/test_endurance.py, oldest first, and how many kills they count together."""
    runs = json.loads((ROOT / "bench/measured/endurance.json").read_text(encoding="utf-8"))
    rows = [[_number(run[column]) for column in _ENDURANCE] for run in runs]
    killed = sum(run["kills"] for run in runs)
    goal = f"{killed:,} of the {_KILLS_WANTED:,} kills of the agent that all runs are to reach with nothing wrong"
    total = f"`nox -s e2e -- --endurance MINUTES`, {goal}:"
    return f"{total}\n\n{_joined([list(_ENDURANCE.values()), *rows])}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.1f}".removesuffix(".0")


def _gpu_measured() -> str:
    """What isolation gpushare kept; in brackets mps, where that was measured."""
    text, ((unit, *_), *rows) = gpu_page.gpu_measured()
    items = (f"- **{name}**: {own}" + (f" (mps: {mps})" if mps else "") for name, own, mps in rows)
    return "\n".join([f"{text.rstrip(':')}. In {unit}:", "", *items])


def _numbers() -> str:
    text, (_, *rows) = gpu_page.gpu_numbers()
    return "\n".join([text, "", *(f"- **{share}**: {measured}" for share, measured in rows)])


def _with_text(text: str, rows: Sequence[Sequence[str]]) -> str:
    return f"{text}\n\n{_joined(rows)}"


def _joined(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


BLOCKS: dict[str, Callable[[], str]] = {
    "not_kept": not_kept,
    "libraries": _libraries,
    "components": _components,
    "costs": _costs,
    "gpu_measured": _gpu_measured,
    "regulator_cells": regulator_cells,
    "gpu_regulator": lambda: (
        gpu_page.gpu_regulator()[0] if gpu_page.is_former() else _with_text(*gpu_page.gpu_regulator())
    ),
    "numbers": _numbers,
    "xids": _xids,
    "guides": _guides,
    "alerts": _alerts,
    "policies": policies,
    "link_costs": _link_costs,
    "measured_on": lambda: f"Measured on {_PARTS['agent'].machine.partition(', load')[0]}.",
    "measured_growth": lambda: _compared("growth", "1,500 shares", "100 shares", "pod's life|nothing|resident"),
    "measured_agent": lambda: _benchmark("agent"),
    "measured_extender": lambda: _benchmark("extender"),
    "workload": _workload,
    "packing": _packing,
    "packing_scheduler": _packing_scheduler,
    "measured_beside": lambda: _compared("beside", "gpushare-agent", "nvidia-device-plugin", "^(?!.*none taken)"),
    "endurance": _endurance,
    "measured_plain": lambda: _compared("scheduler", "extender", "plain", "pods a second|all programs"),
    "measured_scheduler": lambda: _benchmark("scheduler"),
    "containers": lambda: _metrics("gpushare_container_", _CONTAINER_LABELS, has_them=False),
    "containers_on_gpus": lambda: _metrics("gpushare_container_", _CONTAINER_LABELS),
    "gpus": lambda: _metrics("gpushare_gpu_", frozenset(("uuid", "gpu", "node"))),
    "agent": lambda: _metrics("gpushare_"),
    "extender": _extender_metrics,
    "dcgm": _dcgm_names,
    "kept": lambda: _metrics("container_", frozenset(("pod_name", "namespace", "node", "container_name"))),
    "surface": surface_lists,
    "settings": settings_lists,
    "commands": _commands,
    "nvidia_dra_suites": _nvidia_dra_suites,
}


def _filled(text: str) -> str:
    return _BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]]().rstrip()}\n\n{block[3]}", text)


PAGES: dict[str, Callable[[str], str]] = {
    **{
        str(path.relative_to(ROOT)): _filled
        for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
        if _BLOCK.search(path.read_text(encoding="utf-8"))
    },
    "manifests/components/dra-mig-profiles/classes.yaml": lambda _: mig_classes(),
    "charts/gpushare-agent/README.md": CHART_TABLE["readme_with_table"],
    "charts/gpushare-agent/values.schema.json": _schema_with_settings,
}
"""What each page is, made of its present text."""


def outdated(*, write: bool = False) -> list[str]:
    """The pages that are not what the code makes; with `write` they are afterwards."""
    found: list[str] = []
    for name, made in PAGES.items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        if (after := made(before)) != before:
            found.append(name)
            if write:
                path.write_text(after, encoding="utf-8")
    return found


if __name__ == "__main__":
    changed = outdated(write="--write" in sys.argv)
    sys.stdout.writelines(f"{name}\n" for name in changed)
    sys.exit(bool(changed) and "--write" not in sys.argv)
