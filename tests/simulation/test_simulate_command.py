"""`gpushare-agent simulate` from its command line to what it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.cli import render_text
from gpushare_agent.cli.main import main
from gpushare_agent.simulation.plot import figure_of
from gpushare_agent.simulation.schedulers import Policy
from tests.cli.support_cli import at_terminal
from tests.simulation.support_simulation import arrival, cluster_of, replay, workload_of

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "data" / "traces"
SMALL = ["simulate", "--nodes", "4", "--generate", "150", "--quiet"]
ALL = ["--policy", "binpack,spread,agent-only"]


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*SMALL, "-o", "json", *words], {}) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_document_has_every_policy_and_its_samples(capsys: pytest.CaptureFixture[str]) -> None:
    """All pods of the workload ran under the extender, and the numbers of a policy agree with one another."""
    document = simulated(capsys, *ALL)
    assert [one["policy"] for one in document["policies"]] == ["binpack", "spread", "agent-only"]
    assert document["workload"]["pods"] == sum(document["workload"]["sizes"].values()) == 150
    for one in document["policies"]:
        assert one["pods"]["ran"] == one["waits"]["all"]["ran"]
        assert one["pods"]["ran"] + one["pods"]["given_up"] + one["no_node"].get("never", 0) == 150
        assert len({len(values) for values in one["samples"].values()}) == 1
        assert max(one["samples"]["cores"]) <= one["utilisation"]["highest_cores"] <= 1


def test_another_seed_gives_another_result(capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed gives the same, whatever was replayed before."""
    first = simulated(capsys, "--seed", "5")
    assert simulated(capsys, "--seed", "5") == first
    assert simulated(capsys, "--seed", "6")["policies"] != first["policies"]


def test_the_result_does_not_depend_on_the_process() -> None:
    """Two processes with different hash seeds print the same bytes."""
    outputs = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "gpushare_agent", *SMALL, *ALL, "-o", "json"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert done.stderr == b""
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_yaml_is_the_same_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Only written otherwise."""
    document = simulated(capsys)
    assert main([*SMALL, "-o", "yaml"], {}) == 0
    assert yaml.safe_load(capsys.readouterr().out) == document


def test_the_table_tells_each_policy_and_why_pods_did_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    """At three times the load somebody has to wait."""
    assert main([*SMALL, *ALL, "--load", "3"], {}) == 0
    out = capsys.readouterr().out
    for heading in ("POLICY", "CORES", "UNUSABLE", "GIVEN UP", "WAITS OF", "P95", "REASON"):
        assert heading in out
    assert "no node had enough in sum" in out
    assert "4 nodes with" in out


def test_a_trace_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    """What it leaves out is told."""
    words = ["--nodes", str(TRACES / "openb_node_list.csv"), "--pods", str(TRACES / "openb_pod_list.csv"), "--quiet"]
    assert main(["simulate", *words], {}) == 0
    out = capsys.readouterr().out
    assert "4 nodes with 20 GPUs (openb_node_list.csv), 4 pods" in out
    assert "1 left out: asks for nothing of a GPU" in out


def test_progress_goes_to_standard_error_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output is one JSON document, however often progress is told."""
    monkeypatch.setattr(render_text, "LINE_PERIOD_S", 0.0)
    assert main(["simulate", "--nodes", "2", "--generate", "20", "-o", "json"], {}) == 0
    done = capsys.readouterr()
    json.loads(done.out)
    assert "binpack: 0 of 20 pods have arrived" in done.err


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--policy", "best"], "name some of fgd, binpack, spread, agent-only"),
        (["--generate", "0"], "not a whole number from 1 to"),
        (["--load", "nan"], "not between 0.01 and 100"),
        (["--nodes", "0"], "not a whole number from 1 to 100000"),
        (["--nodes", "absent.csv"], "absent.csv cannot be read"),
        (["--pods", "a.csv", "--generate", "5"], "not allowed with"),
        (["--score-percent", "101"], "not a whole number from 1 to 100"),
    ],
)
def test_a_mistake_is_reported_in_a_line(words: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And not in a traceback."""
    assert main(["simulate", "--quiet", *words], {}) in (1, 2)
    err = capsys.readouterr().err
    assert reported in err
    assert "Traceback" not in err


def test_the_chart_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of readable size, and the same for the same result."""
    pytest.importorskip("matplotlib", reason="the chart needs the extra gpushare-agent[plot]")
    charts = []
    for name in ("a.png", "b.png"):
        assert main([*SMALL, "--plot", str(tmp_path / name)], {}) == 0
        charts.append((tmp_path / name).read_bytes())
    assert charts[0].startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(charts[0][at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1320, 880)
    assert charts[0] == charts[1]
    capsys.readouterr()


def test_a_chart_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the start, before minutes of work."""
    pytest.importorskip("matplotlib", reason="the chart needs the extra gpushare-agent[plot]")
    assert main([*SMALL, "--plot", str(tmp_path / "absent" / "a.png")], {}) == 2
    assert main([*SMALL, "--plot", str(tmp_path)], {}) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert done.err.count("no file can be written there") == 2


def test_the_charts_time_ends_with_the_tables() -> None:
    """The longest policy's ALL OVER."""
    pytest.importorskip("matplotlib", reason="the chart needs the extra gpushare-agent[plot]")
    workloads = [workload_of(arrival(0.0, 30, seconds)) for seconds in (30.0, 7200.0)]
    results = [replay(cluster_of(1), workload, Policy.BINPACK) for workload in workloads]
    figure = figure_of(results, title="t", arrivals_s=1.0)
    assert [axes.get_xlim() for axes in figure.axes[:3]] == [(0.0, results[1].took_s / 3600)] * 3


def test_waits_have_a_mean_over_all_that_ran(capsys: pytest.CaptureFixture[str]) -> None:
    """How many waited says little: those that are refused do not wait."""
    assert main([*SMALL], {}) == 0
    header = capsys.readouterr().out.splitlines()[2]
    assert "MEAN WAIT" in header
    assert "WAITED" not in header


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    """In a process where it cannot be imported; at once, before any pod is replayed."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "gpushare_agent", *SMALL, "--plot", str(tmp_path / "a.png")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "pip install 'gpushare-agent[plot]'" in done.stderr


async def test_progress_is_a_bar_at_a_terminal() -> None:
    """One for each policy; it goes with the end, and the tables stay."""
    async with at_terminal("simulate", "--nodes", "2", "--generate", "100") as terminal:
        assert await terminal.wait_end() == 0
        await terminal.wait_shown(lambda text: "LONGEST" in text)
    bars = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.shown)
    assert re.search("binpack ━+ +[0-9]+/100 ", bars)  # how far it is drawn depends on the machine
