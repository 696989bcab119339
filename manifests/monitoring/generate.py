#!/usr/bin/env python3
"""Writes dashboard.json, and the operator's PrometheusRules from alerts.yaml and cost.yaml.

Run it after a change of this file or of these: `python3 manifests/monitoring/generate.py`. It needs Python alone.
A test compares its output with the files. The dashboard is Grafana's JSON model, schema 39 (Grafana 10.4 and later).
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RULE = HERE.parent / "components/prometheus-operator/prometheusrule.yaml"
COST_RULE = HERE / "cost-prometheusrule.yaml"
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GPU = 'node=~"$node"'
SHARE = 'node=~"$node", namespace=~"$namespace", pod=~"$pod"'
BY_SHARE = "namespace, pod, container"
SECONDS = "gpushare_container_gpu_seconds_total"

Panel = dict[str, Any]


def query(expr: str, legend: str = "", *, is_table: bool = False) -> dict[str, Any]:
    one = {"expr": expr, "legendFormat": legend, "datasource": DATA_SOURCE}
    return one | ({"format": "table", "instant": True} if is_table else {"range": True})


def panel(kind: str, title: str, about: str, unit: str, *queries: dict[str, Any], **options: Any) -> Panel:
    """`unit` is Grafana's word: percentunit, bytes, s, celsius, watt, short."""
    targets = [one | {"refId": chr(ord("A") + number)} for number, one in enumerate(queries)]
    defaults = {"unit": unit, "min": 0} | options.pop("defaults", {})
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": DATA_SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": options.pop("overrides", [])},
        "targets": targets,
        **options,
    }


def lines(title: str, about: str, unit: str, *queries: dict[str, Any], **defaults: Any) -> Panel:
    """Curves, the limits (whose legend ends in `limit`) dashed."""
    dashed = {
        "matcher": {"id": "byRegexp", "options": "/ limit$/"},
        "properties": [{"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}}],
    }
    legend = {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]}
    return panel(
        "timeseries",
        title,
        about,
        unit,
        *queries,
        defaults=defaults,
        overrides=[dashed],
        options={"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
    )


def thresholds(**steps: float) -> dict[str, Any]:
    """By colour, from which value on; below the first it is green."""
    above = [{"color": color, "value": value} for color, value in steps.items()]
    return {"mode": "absolute", "steps": [{"color": "green", "value": None}, *above]}


def limit(value: float) -> dict[str, Any]:
    """A line in a chart, where alerts.yaml begins to count."""
    return {"thresholds": thresholds(red=value), "custom": {"thresholdsStyle": {"mode": "line"}}}


def stat(title: str, about: str, unit: str, expr: str, **steps: float) -> Panel:
    return panel("stat", title, about, unit, query(expr), defaults={"thresholds": thresholds(**steps)})


def table(title: str, about: str, columns: list[tuple[str, str, str]], *shaped: dict[str, Any]) -> Panel:
    """Columns with their query and unit; `shaped` are Grafana's transformations of the rows."""
    names = {f"Value #{chr(ord('A') + number)}": name for number, (name, _, _) in enumerate(columns)}
    return panel(
        "table",
        title,
        about,
        "short",
        *(query(expr, is_table=True) for _, expr, _ in columns),
        overrides=[
            {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
            for name, _, unit in columns
        ],
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
            *shaped,
        ],
    )


def gpus_table() -> Panel:
    def largest(name: str) -> str:
        return f"max by (node, gpu, uuid) (gpushare_gpu_{name}{{{GPU}}})"

    return table(
        "GPUs",
        "Every GPU now. Others' memory is that of processes which belong to no container with a share.",
        [
            ("Healthy", largest("healthy"), "bool_yes_no"),
            ("Cordoned", largest("cordoned"), "bool_yes_no"),
            ("Cores allocated", largest("cores_allocated_ratio"), "percentunit"),
            ("SM use", largest("sm_utilization_ratio"), "percentunit"),
            ("Memory", largest("memory_capacity_bytes"), "bytes"),
            ("Memory allocated", largest("memory_allocated_bytes"), "bytes"),
            ("Memory used", largest("memory_used_bytes"), "bytes"),
            ("Temperature", largest("temperature_celsius"), "celsius"),
            ("Others' memory", largest("stranger_memory_used_bytes"), "bytes"),
        ],
        {"id": "sortBy", "options": {"sort": [{"field": "node"}]}},
    )


def top_containers() -> Panel:
    def total(name: str) -> str:
        return f"sum by (node, {BY_SHARE}) (gpushare_container_{name}{{{SHARE}}})"

    return table(
        "Containers, the busiest first",
        "Over all GPUs of a container, in GPUs: 200 % are two whole GPUs.",
        [
            ("SM use", total("sm_utilization_ratio"), "percentunit"),
            ("Cores", total("allocated_cores_ratio"), "percentunit"),
            ("Memory used", total("memory_used_bytes"), "bytes"),
            ("Memory limit", total("memory_limit_bytes"), "bytes"),
        ],
        {"id": "sortBy", "options": {"sort": [{"field": "SM use", "desc": True}]}},
        {"id": "limit", "options": {"limitField": 50}},
    )


def waste() -> Panel:
    def gpus(kind: str) -> str:
        return f'sum by (namespace) (rate({SECONDS}{{{SHARE}, kind="{kind}"}}[$__rate_interval]))'

    return lines(
        "Allocated and not used",
        "Whole GPUs that a namespace has and keeps idle, on average of some minutes.",
        "short",
        query(f"clamp_min({gpus('allocated')} - {gpus('used')}, 0)", "{{namespace}}"),
    )


def costs_table() -> Panel:
    def hours(kind: str) -> str:
        return f'sum by (namespace) (increase({SECONDS}{{{SHARE}, kind="{kind}"}}[$__range])) / 3600'

    named = "on (node, uuid) group_left (name) topk by (node, uuid) (1, gpushare_gpu_info)"
    paid = f'increase({SECONDS}{{{SHARE}, kind="allocated"}}[$__range]) * {named}'
    price = "on (name) group_left () gpushare_gpu_hourly_price"
    return table(
        "GPU hours by namespace",
        "In the chosen time, of whole GPUs. Cost needs the prices of cost.yaml, and counts nodes that are still there.",
        [
            ("Allocated", hours("allocated"), "h"),
            ("Used", hours("used"), "h"),
            ("Not used", f"1 - {hours('used')} / ({hours('allocated')})", "percentunit"),
            ("Cost", f"sum by (namespace) ({paid} * {price}) / 3600", "short"),
        ],
        {"id": "sortBy", "options": {"sort": [{"field": "Allocated", "desc": True}]}},
    )


def now() -> list[Panel]:
    reserved = f"sum(gpushare_gpu_cores_allocated_ratio{{{GPU}}}) / sum(gpushare_gpu_cores_capacity_ratio{{{GPU}}})"
    memory = f"sum(gpushare_gpu_memory_allocated_bytes{{{GPU}}}) / sum(gpushare_gpu_memory_capacity_bytes{{{GPU}}})"
    return [
        stat("GPUs", "GPUs that the chosen nodes offer.", "short", f"count(gpushare_gpu_healthy{{{GPU}}})"),
        stat(
            "Unhealthy GPUs",
            "GPUs that are offered to no new pod, those that an operator cordoned included.",
            "short",
            f"count(gpushare_gpu_healthy{{{GPU}}}) - sum(gpushare_gpu_healthy{{{GPU}}})",
            red=1,
        ),
        stat("Compute allocated", "Of all GPUs.", "percentunit", reserved, orange=0.9),
        stat("Memory allocated", "Of all GPUs.", "percentunit", memory, orange=0.9),
        stat(
            "Compute used",
            "Mean SM use of all GPUs.",
            "percentunit",
            f"avg(gpushare_gpu_sm_utilization_ratio{{{GPU}}})",
        ),
        stat(
            "Refusals in an hour",
            "Allocate calls that were refused.",
            "short",
            'sum(increase(gpushare_admissions_total{node=~"$node", outcome="refused"}[1h]))',
            red=1,
        ),
    ]


def of_gpus() -> list[Panel]:
    def each(title: str, about: str, unit: str, name: str, **defaults: Any) -> Panel:
        return lines(title, about, unit, query(f"gpushare_gpu_{name}{{{GPU}}}", "{{node}} {{gpu}}"), **defaults)

    return [
        each("SM use per GPU", "Time in which a GPU computed.", "percentunit", "sm_utilization_ratio", max=1),
        each("Memory used per GPU", "By whomever.", "bytes", "memory_used_bytes"),
        each("Temperature", "As the GPU reports it.", "celsius", "temperature_celsius"),
        each("Power", "What a GPU draws.", "watt", "power_watts"),
    ]


def of_containers() -> list[Panel]:
    def each(name: str, legend: str = "") -> dict[str, Any]:
        return query(
            f"sum by ({BY_SHARE}) (gpushare_container_{name}{{{SHARE}}})",
            f"{{{{namespace}}}}/{{{{pod}}}}/{{{{container}}}}{legend}",
        )

    return [
        lines(
            "SM use per container",
            "Against its cores, the dashed line; elastic shares may rise above what they were given.",
            "percentunit",
            each("sm_utilization_ratio"),
            each("cores_limit_ratio", " limit"),
        ),
        lines(
            "Memory used per container",
            "Against its limit, the dashed line.",
            "bytes",
            each("memory_used_bytes"),
            each("memory_limit_bytes", " limit"),
        ),
    ]


def of_agents() -> list[Panel]:
    def rate(series: str, more: str = "") -> str:
        return f"rate({series}{{{GPU}{more}}}[$__rate_interval])"

    def per_minute(by: str, series: str, more: str = "") -> dict[str, Any]:
        legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
        return query(f"sum by ({by}) ({rate(series, more)}) * 60", legend)

    latency = f"sum by (le) ({rate('gpushare_rpc_duration_seconds_bucket')})"
    corrections = f"increase(gpushare_reconcile_corrections_total{{{GPU}}}[$__rate_interval])"
    return [
        lines(
            "Refusals by reason",
            "Allocate calls refused per minute. `gpushare-agent explain POD` explains one.",
            "short",
            per_minute("reason", "gpushare_admissions_total", ', outcome="refused"'),
        ),
        lines(
            "Admission latency",
            "Of the kubelet's calls; the whole node's admissions wait for them.",
            "s",
            query(f"histogram_quantile(0.5, {latency})", "half"),
            query(f"histogram_quantile(0.99, {latency})", "99 %"),
            **limit(2),
        ),
        lines(
            "Sampling cost",
            "Time that sampling takes of each second.",
            "percentunit",
            query(rate("gpushare_sampling_duration_seconds_sum"), "{{instance}}"),
        ),
        lines(
            "Corrections of the ledger",
            "Should stay 0.",
            "short",
            query(f"sum by (kind) ({corrections})", "{{kind}}"),
            **limit(1),
        ),
        lines(
            "Since the API server was heard",
            "A quiet node hears it about once a minute.",
            "s",
            query(f"gpushare_pod_event_age_seconds{{{GPU}}}", "{{instance}}"),
            **limit(600),
        ),
        lines(
            "Events and errors of the driver",
            "Per minute: Xid errors by number, errors by the driver's word.",
            "short",
            per_minute("kind, xid", "gpushare_gpu_events_total"),
            per_minute("error", "gpushare_driver_errors_total"),
        ),
    ]


Size = tuple[int, int]
"""Width of 24, and height."""


def rows() -> list[tuple[str, Size, list[Panel]]]:
    """Title, or none where the row above goes on, then panels of one size."""
    return [
        ("Now", (4, 4), now()),
        ("", (24, 9), [gpus_table()]),
        ("GPUs", (12, 8), of_gpus()),
        ("Containers", (24, 10), [top_containers()]),
        ("", (12, 9), of_containers()),
        ("Costs", (12, 9), [costs_table(), waste()]),
        ("The agents", (8, 8), of_agents()),
    ]


def laid_out() -> list[Panel]:
    """Panels with their places, row after row, and numbers."""
    placed: list[Panel] = []
    y = 0
    for title, (width, height), panels in rows():
        if title:
            placed.append(
                {"type": "row", "title": title, "collapsed": False, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
            )
            y += 1
        for number, one in enumerate(panels):
            line, column = divmod(number, 24 // width)
            place = {"x": column * width, "y": y + line * height, "w": width, "h": height}
            placed.append(one | {"gridPos": place})
        y += -(-len(panels) * width // 24) * height
    return [one | {"id": number} for number, one in enumerate(placed, start=1)]


def variable(name: str, label: str, expr: str) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATA_SOURCE,
        "query": {"query": expr, "refId": name},
        "definition": expr,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    allocated = "gpushare_container_allocated_cores_ratio"
    return {
        "title": "GPU shares",
        "uid": "gpushare-agent",
        "tags": ["gpu", "gpushare-agent"],
        "description": "GPUs, the containers that share them, and the agents that place them.",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
                variable("node", "Node", "label_values(gpushare_gpu_info, node)"),
                variable("namespace", "Namespace", f'label_values({allocated}{{node=~"$node"}}, namespace)'),
                variable("pod", "Pod", f'label_values({allocated}{{node=~"$node", namespace=~"$namespace"}}, pod)'),
            ]
        },
        "panels": laid_out(),
    }


def prometheus_rule(source: str, name: str) -> str:
    groups = (HERE / source).read_text(encoding="utf-8")
    head = f"""\
        # Made from manifests/monitoring/{source} by manifests/monitoring/generate.py: change that file.
        apiVersion: monitoring.coreos.com/v1
        kind: PrometheusRule
        metadata:
          name: {name}
          namespace: gpushare-system
          labels: {{app.kubernetes.io/name: gpushare-agent}}
        spec:
        """
    return textwrap.dedent(head) + textwrap.indent(groups[groups.index("groups:") :], "  ")


def outputs() -> dict[Path, str]:
    """Each file and its text."""
    text = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    return {
        HERE / "dashboard.json": text,
        RULE: prometheus_rule("alerts.yaml", "gpushare-agent"),
        COST_RULE: prometheus_rule("cost.yaml", "gpushare-agent-cost"),
    }


if __name__ == "__main__":
    for path, text in outputs().items():
        path.write_text(text, encoding="utf-8")
