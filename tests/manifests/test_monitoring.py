"""Alert rules and dashboard: accepted by promtool, made of metrics that exist, and alike in both forms."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE
from tests.docs.generated import full_metrics
from tests.manifests.support_manifests import MANIFESTS, documents

MONITORING = MANIFESTS / "monitoring"
ROOT = MANIFESTS.parent
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed"
)
GRAFANA_VARIABLES = {"$__rate_interval": "5m", "$__range": "1d", "$node": ".*", "$namespace": ".*", "$pod": ".*"}


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def rules(*files: str) -> list[dict[str, Any]]:
    return [rule for file in files for group in documents(f"monitoring/{file}")[0]["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return rules("alerts.yaml")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return found


def expressions() -> list[str]:
    """What the dashboard's panels ask Prometheus."""
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def metric_names(text: str) -> set[str]:
    """The metrics of ours that a text names, a histogram's parts by the histogram's name."""
    found = re.findall(r"\b(?:gpushare|container_gpu|container_request)_[a-z_]+", text)
    return {re.sub(r"(_duration_seconds)_(bucket|sum|count)$", r"\1", name) for name in found}


def documented() -> set[str]:
    pages = ((ROOT / f"docs/reference/{page}.md").read_text(encoding="utf-8") for page in ("metrics", "extender"))
    return {name for text in pages for name in re.findall(r"^- \*\*`([a-z_]+)`\*\*", text, flags=re.M)}


@needs_promtool
def test_promtool_accepts_the_alert_rules() -> None:
    """Syntax, expressions and templates."""
    for file in ("alerts", "cost", "opencost"):
        promtool("check", "rules", MONITORING / f"{file}.yaml")


@needs_promtool
def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else() -> None:
    """alerts.test.yaml plays the series of each case, and every alert has one there."""
    promtool("test", "rules", MONITORING / "alerts.test.yaml")
    played = (MONITORING / "alerts.test.yaml").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in alerts() if rule["alert"] not in played] == []


@needs_promtool
def test_costs_are_what_the_counters_say() -> None:
    """cost.test.yaml plays counters of two namespaces, and every recorded series has a value there."""
    promtool("test", "rules", MONITORING / "cost.test.yaml")
    played = (MONITORING / "cost.test.yaml").read_text(encoding="utf-8")
    recorded = {rule["record"] for rule in rules("cost.yaml", "opencost.yaml")} - {"gpushare_gpu_hourly_price"}
    assert [name for name in sorted(recorded) if name not in played] == []


COMPLAINTS_ABOUT_GPU_MANAGERS_NAMES = {
    # Its users' dashboards ask for this name, which it gave to a gauge.
    'container_gpu_memory_total non-counter metrics should not have "_total" suffix'
}


def complaints(text: str) -> tuple[int, set[str]]:
    """promtool's exit code and lines about a scrape, without those that are known."""
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    said = {line for line in (done.stdout + done.stderr).splitlines() if line.strip()}
    # dcgm-exporter's label is modelName.
    theirs = {line for line in said if line.startswith("DCGM_") and "camelCase" in line}
    return done.returncode, said - COMPLAINTS_ABOUT_GPU_MANAGERS_NAMES - theirs


@needs_promtool
def test_promtool_has_nothing_to_say_about_any_series_that_there_can_be() -> None:
    """Those too that the embedded node never shows: NVLink, ECC, Xid errors, MPS. What is wrong is found."""
    assert complaints(full_metrics())[1] == set()
    wrong = "# HELP x_total X.\n# TYPE x_total gauge\nx_total 1\n"
    assert complaints(wrong) == (3, {'x_total non-counter metrics should not have "_total" suffix'})


def autoscaling() -> dict[str, dict[str, Any]]:
    names = ("deployment", "hpa", "prometheus-adapter", "scaledobject")
    return {name: documents(f"samples/autoscaling/{name}.yaml")[0] for name in names}


def test_the_autoscalers_name_the_deployment_and_the_metric() -> None:
    """An HPA of a metric that the adapter does not serve waits for ever. What the queries answer: test_prometheus.py."""
    files = autoscaling()
    name = files["deployment"]["metadata"]["name"]
    (main,) = files["deployment"]["spec"]["template"]["spec"]["containers"]
    assert main["resources"]["limits"] == {VCORE_RESOURCE: 30, VMEMORY_RESOURCE: 16}
    assert files["hpa"]["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    assert files["scaledobject"]["spec"]["scaleTargetRef"] == {"name": name}
    (metric,) = files["hpa"]["spec"]["metrics"]
    (trigger,) = files["scaledobject"]["spec"]["triggers"]
    assert trigger["metadata"]["query"].count(f'{{namespace="default", pod=~"{name}-.+"}}') == 2
    (rule,) = files["prometheus-adapter"]["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert metric_names(rule["seriesQuery"] + rule["metricsQuery"] + trigger["metadata"]["query"]) <= documented()
    # Of a sum KEDA would take the mean over the pods, and every value of the metadata is a text.
    assert trigger["metricType"] == "Value" and all(isinstance(one, str) for one in trigger["metadata"].values())
    target = metric["pods"]["target"]["averageValue"]
    assert float(trigger["metadata"]["threshold"]) * 1000 == float(target.removesuffix("m"))


def test_alerts_and_dashboard_name_only_metrics_that_exist() -> None:
    """docs/reference/metrics.md and extender.md list them all, and another test compares that list with the code."""
    variables = [one.get("definition", "") for one in dashboard()["templating"]["list"]]
    named = {name for rule in alerts() for name in metric_names(rule["expr"])}
    shown = {name for text in (*expressions(), *variables) for name in metric_names(text)}
    assert len(named) >= 8 and len(shown) >= 20
    recorded = {"gpushare_gpu_hourly_price"}
    assert sorted((named | shown) - documented() - recorded) == []
    counted = {name for rule in rules("cost.yaml", "opencost.yaml") for name in metric_names(rule["expr"])}
    own = {name for rule in rules("cost.yaml") for name in metric_names(rule["record"])}
    assert sorted(counted - own - documented()) == []


def test_every_alert_says_what_to_do_and_is_explained() -> None:
    """Severity, summary, description, and a link in docs/how-to/monitor.md."""
    text = (ROOT / "docs/how-to/monitor.md").read_text(encoding="utf-8")
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}
        assert f"[`{rule['alert']}`](" in text


def test_the_operators_rule_has_the_same_groups() -> None:
    """One source, two forms."""
    forms = {
        "components/prometheus-operator/prometheusrule.yaml": "alerts.yaml",
        "monitoring/cost-prometheusrule.yaml": "cost.yaml",
    }
    for form, source in forms.items():
        (rule,) = documents(form)
        assert rule["spec"] == documents(f"monitoring/{source}")[0]


def test_what_is_generated_is_up_to_date() -> None:
    """`python3 manifests/monitoring/generate.py` would change nothing."""
    for path, text in runpy.run_path(str(MONITORING / "generate.py"))["outputs"]().items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_the_dashboards_panels_have_places_of_their_own_and_known_variables() -> None:
    """None lies over another or past the edge, and each asks the chosen data source."""
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    known = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert {"node", "namespace", "pod"} <= known
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"] and panel["datasource"]["uid"] == "${datasource}"
        used = {name for target in panel.get("targets", ()) for name in re.findall(r"\$([a-z]+)\b", target["expr"])}
        assert used <= known


def test_every_query_follows_the_chosen_nodes() -> None:
    """Whoever chooses one node sees nothing of the others."""
    assert [expression for expression in expressions() if 'node=~"$node"' not in expression] == []


def test_the_alerts_limits_are_lines_in_the_charts() -> None:
    """The values from which alerts.yaml counts; and what should be 0 or not near its end changes colour."""
    found = {
        panel["title"]: [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]]
        for panel in dashboard()["panels"]
        if "thresholds" in panel.get("fieldConfig", {}).get("defaults", {})
    }
    rules = {rule["alert"]: rule["expr"] for rule in alerts()}
    assert rules["GpushareAdmissionsSlow"].endswith(f"> {found['Admission latency'][0]:g}")
    assert rules["GpushareInformerStale"].endswith(f"> {found['Since the API server was heard'][0]:g}")
    assert found["Corrections of the ledger"] == found["Unhealthy GPUs"] == found["Refusals in an hour"] == [1]
    assert found["Memory allocated"] == found["Compute allocated"] == [0.9]
