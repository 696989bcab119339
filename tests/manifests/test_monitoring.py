"""Alert rules and dashboard: accepted by promtool, made of metrics that exist, and alike in both forms."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests.support_manifests import MANIFESTS, documents

MONITORING = MANIFESTS / "monitoring"
ROOT = MANIFESTS.parent
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed"
)
GRAFANA_VARIABLES = {"$__rate_interval": "5m", "$node": ".*", "$namespace": ".*", "$pod": ".*"}


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> list[dict[str, Any]]:
    (found,) = documents("monitoring/alerts.yaml")
    return [rule for group in found["groups"] for rule in group["rules"]]


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
    return {name for text in pages for name in re.findall(r"^\| `([a-z_]+)` \|", text, flags=re.M)}


@needs_promtool
def test_promtool_accepts_the_alert_rules() -> None:
    """Syntax, expressions and templates."""
    promtool("check", "rules", MONITORING / "alerts.yaml")


@needs_promtool
def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else() -> None:
    """alerts.test.yaml plays the series of each case, and every alert has one there."""
    promtool("test", "rules", MONITORING / "alerts.test.yaml")
    played = (MONITORING / "alerts.test.yaml").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in alerts() if rule["alert"] not in played] == []


@needs_promtool
def test_promtool_accepts_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    """Grafana shows a broken one as an empty panel, and nobody notices."""
    rules = []
    for number, expression in enumerate(expressions()):
        for variable, value in GRAFANA_VARIABLES.items():
            expression = expression.replace(variable, value)
        rules.append({"record": f"panel:{number}", "expr": expression})
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")


def test_alerts_and_dashboard_name_only_metrics_that_exist() -> None:
    """docs/reference/metrics.md and extender.md list them all, and another test compares that list with the code."""
    variables = [one.get("definition", "") for one in dashboard()["templating"]["list"]]
    named = {name for rule in alerts() for name in metric_names(rule["expr"])}
    shown = {name for text in (*expressions(), *variables) for name in metric_names(text)}
    assert len(named) >= 8 and len(shown) >= 20
    assert sorted((named | shown) - documented()) == []


def test_every_alert_says_what_to_do_and_is_explained() -> None:
    """Severity, summary, description, and a row in docs/how-to/monitor.md."""
    text = (ROOT / "docs/how-to/monitor.md").read_text(encoding="utf-8")
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}
        assert f"| `{rule['alert']}` |" in text


def test_the_operators_rule_has_the_same_groups() -> None:
    """One source, two forms."""
    (rule,) = documents("components/prometheus-operator/prometheusrule.yaml")
    assert rule["spec"] == documents("monitoring/alerts.yaml")[0]


def test_what_is_generated_is_up_to_date() -> None:
    """`python3 manifests/monitoring/generate.py` would change nothing."""
    spec = importlib.util.spec_from_file_location("generate", MONITORING / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.outputs().items():
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
