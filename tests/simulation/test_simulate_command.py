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

from bench.generator import write_files
from bench.plot import draw
from gpushare_agent.commands import main
from gpushare_agent.core.cli import render_text
from tests.cli.support_cli import at_terminal

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "data" / "traces"
ALL = ["--policy", "binpack,spread,agent-only"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line for four nodes and 150 pods."""
    return ["simulate", *made(tmp_path_factory.mktemp("made"), nodes=4, pods=150), "--load", "1", "--quiet"]


def made(directory: Path, *, nodes: int, pods: int) -> list[str]:
    write_files(directory, nodes=nodes, pods=pods, seed=1)
    return ["--nodes", str(directory / "nodes.csv"), "--pods", str(directory / "pods.csv")]


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "-o", "json"], {}) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_document_has_every_policy_and_its_samples(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers of a policy agree with one another, and YAML says the same."""
    document = simulated(capsys, *small, *ALL)
    assert [one["policy"] for one in document["policies"]] == ["binpack", "spread", "agent-only"]
    assert document["workload"]["pods"] == sum(document["workload"]["sizes"].values()) == 150
    for one in document["policies"]:
        assert one["pods"]["ran"] == one["waits"]["all"]["ran"]
        assert one["pods"]["ran"] + one["pods"]["given_up"] + one["no_node"].get("never", 0) == 150
        assert len({len(values) for values in one["samples"].values()}) == 1
        assert max(one["samples"]["cores"]) <= one["utilisation"]["highest_cores"] <= 1
    assert main([*small, *ALL, "-o", "yaml"], {}) == 0
    assert yaml.safe_load(capsys.readouterr().out) == document


def test_another_seed_gives_another_result(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed gives the same, whatever was replayed before; it decides which of equal nodes is taken."""
    words = [*small, "--policy", "agent-only", "--seed"]
    first = simulated(capsys, *words, "5")
    assert simulated(capsys, *words, "5") == first
    assert simulated(capsys, *words, "6")["policies"] != first["policies"]


def test_the_result_does_not_depend_on_the_process(small: list[str]) -> None:
    """Two processes with different hash seeds print the same bytes."""
    outputs = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "gpushare_agent", *small, *ALL, "-o", "json"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert done.stderr == b""
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_the_table_tells_each_policy_and_why_pods_did_not_start(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """At three times the load somebody has to wait."""
    assert main([*small, *ALL, "--load", "3"], {}) == 0
    out = capsys.readouterr().out
    for heading in ("POLICY", "CORES", "UNUSABLE", "GIVEN UP", "WAITS OF", "P95", "REASON"):
        assert heading in out
    header = out.splitlines()[2]
    # How many waited says little of a policy: those that are refused do not wait.
    assert "MEAN WAIT" in header and "WAITED" not in header
    assert "no node had enough in sum" in out
    assert "4 nodes with" in out


def test_a_trace_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    """It says what it leaves out."""
    words = ["--nodes", str(TRACES / "openb_node_list.csv"), "--pods", str(TRACES / "openb_pod_list.csv"), "--quiet"]
    assert main(["simulate", *words], {}) == 0
    out = capsys.readouterr().out
    assert "4 nodes with 20 GPUs (openb_node_list.csv), 4 pods" in out
    assert "1 left out: asks for nothing of a GPU" in out


def test_progress_goes_to_standard_error_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output is one JSON document, however often progress is shown."""
    monkeypatch.setattr(render_text, "LINE_PERIOD_S", 0.0)
    assert main(["simulate", *made(tmp_path, nodes=2, pods=20), "-o", "json"], {}) == 0
    done = capsys.readouterr()
    json.loads(done.out)
    assert "binpack: 0 of 20 pods have arrived" in done.err


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--policy", "best"], "name some of fgd, binpack, spread, agent-only"),
        (["--load", "nan"], "not between 0.01 and 100"),
        (["--nodes", "absent.csv"], "absent.csv cannot be read"),
        (["--pods", "absent.csv"], "absent.csv cannot be read"),
        (["--score-percent", "101"], "not a whole number from 1 to 100"),
    ],
)
def test_a_mistake_is_reported_in_a_line(
    small: list[str], words: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not in a traceback."""
    assert main([*small, *words], {}) == 2
    err = capsys.readouterr().err
    assert reported in err
    assert "Traceback" not in err


def test_the_result_makes_a_chart(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for the same result."""
    pytest.importorskip("matplotlib", reason="the chart needs the dependency group bench")
    result, charts = simulated(capsys, *small, *ALL), [tmp_path / "a.png", tmp_path / "b.png"]
    for path in charts:
        draw(result, path)
    first, second = (path.read_bytes() for path in charts)
    assert first == second and first.startswith(b"\x89PNG")


async def test_progress_is_a_bar_at_a_terminal(tmp_path: Path) -> None:
    """One for each policy; it goes with the end, and the tables stay."""
    async with at_terminal("simulate", *made(tmp_path, nodes=2, pods=100)) as terminal:
        assert await terminal.wait_end() == 0
        await terminal.wait_shown(lambda text: "LONGEST" in text)
    bars = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.shown)
    assert re.search("binpack ━+ +[0-9]+/100 ", bars)  # how far it is drawn depends on the machine
