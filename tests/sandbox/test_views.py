"""The sandbox's report: each node as `top` shows it, and the pods."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group

from gpushare_agent.core.model.names import GIB
from gpushare_agent.sandbox.render import node_parts, pod_line, pods_parts, print_document
from tests.cli.support_cli import at_terminal, foot_of, screen_of


def shown_pod(*gpus: int, phase: str = "Running") -> dict[str, Any]:
    """Of a document, as far as the views read it."""
    return {
        "namespace": "default", "name": "share", "phase": phase, "is_terminating": False, "reason": "", "message": "",
        "annotations": {}, "containers": [{"name": "main", "gpus": list(gpus)}],
    }  # fmt: skip


def printed(renderable: Any, width: int) -> str:
    console = Console(width=width, height=24, file=io.StringIO())
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


GPU = {
    "index": 0, "name": "T", "cores": {"allocated": 30, "capacity": 100}, "usage": {"sm_ratio": 0.124},
    "memory": {"allocated_bytes": 4 * GIB, "capacity_bytes": 24 * GIB}, "is_healthy": True,
    "health_reason": "", "cordoned": None, "uuid": "u", "unattributed": [],
}  # fmt: skip
AGENT = {
    "is_ready": True, "not_ready": [], "isolation": "none", "driver": "simulated", "driver_version": "",
    "sampled_at": None,
}  # fmt: skip


def shown_node(*gpus: dict[str, Any], **changes: Any) -> dict[str, Any]:
    about = {"name": "a", "addresses": {}, "is_offered": True}
    found = {"gpus": list(gpus), "mig_gpus": [], "containers": []}
    return {**about, "node": "a", "at": 0, "agent": AGENT, **found, **changes}


def lines_of(*gpus: dict[str, Any], width: int = 120) -> list[str]:
    return printed(Group(*node_parts(shown_node(*gpus), width)), width).splitlines()


@pytest.mark.parametrize("width", [60, 120])
def test_the_gpus_stand_as_in_top(width: int) -> None:
    """Allocated next to used, by NVIDIA's name of a MIG instance, which is no GPU more; above both together."""
    title, both, header, first, second = lines_of(GPU, GPU | {"mig": {"label": "0:1"}}, width=width)
    assert title.startswith("node a  ready  1 GPU, 1 MIG instance")
    assert both.startswith("allocated 60/200 GPU cores (30 %), ")
    assert ("ALLOC GiB" in header) is (width == 120) and "GPU CORES" in header
    assert [line.split()[:2] for line in (first, second)] == [["0", "T"], ["0:1", "T"]]
    assert "30/100" in first and " 12 " in first


def test_without_an_answer_of_the_agent_no_gpu_is_shown() -> None:
    """None would be free, and none allocated. One that has answered, and has ended since, offers nothing."""
    silent = {"name": "a", "addresses": {}, "is_offered": False, "gpus": [], "containers": []}
    assert printed(Group(*node_parts(silent, 80)), 80).splitlines() == ["a: its agent has not answered yet"]
    *_, last = printed(Group(*node_parts(shown_node(GPU, is_offered=False), 80)), 80).splitlines()
    assert last == "its agent offers no GPU to the kubelet at the moment"


def test_status_says_where_each_nodes_agent_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Not what is switched off; and not the report of --once, for then nobody is there to be asked."""
    addresses = {"web": "http://localhost:1", "control_socket": "/s/agent-control.sock"}
    document = {"nodes": [shown_node(GPU, addresses=addresses)], "pods": []}
    print_document(document, "table", has_addresses=True)
    assert "web http://localhost:1  control socket /s/agent-control.sock\n" in capsys.readouterr().out
    print_document(document, "table")
    assert "http" not in capsys.readouterr().out


def test_why_a_pod_waits_stands_below_the_table() -> None:
    """With the whole width, and only for pods that have a reason."""
    waits = {**shown_pod(phase="Pending"), "reason": "Unschedulable", "message": "no [room]"}
    lines = printed(Group(*pods_parts({"nodes": [{}], "pods": [shown_pod(0), waits]})), 60).splitlines()
    expected = [["POD", "PHASE"], ["default/share", "Running"], ["default/share", "Pending"]]
    assert [line.split() for line in lines[:3]] == expected
    assert lines[3:] == ["default/share: Unschedulable: no [room]"]
    # A line for a pipe tells no use, because each change of a line is a new line.
    assert pod_line(shown_pod(0, 1)) == "pod default/share Running [main: GPU 0,1]"
    assert pod_line(shown_pod(phase="Pending")) == "pod default/share Pending [main: GPU -]"


def test_in_a_pipe_each_row_and_each_reason_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """However long the reason."""
    reason = f"0/1 nodes are available: {'1 too full, ' * 80}.\nSecond line"
    waits = {**shown_pod(phase="Pending"), "name": "p" * 253, "message": reason}
    print_document({"nodes": [shown_node(GPU)], "pods": [waits]}, "table")
    *_, row, why = capsys.readouterr().out.splitlines()
    assert re.split(r" {2,}", row) == [f"default/{'p' * 253}", "Pending"]
    assert why == f"default/{'p' * 253}: {' '.join(reason.split())}"


async def test_the_live_view_fits_a_small_terminal_and_follows_its_size(short_dir: Path) -> None:
    """At 80×24 all eight GPUs with cores and use, the keys, and what can be done next, which can be typed as it stands."""
    argv = ("sandbox", "--state-dir", str(short_dir / "s"), "--port", "0", "--samples", "none")
    async with at_terminal(*argv, columns=80, rows=24) as terminal:
        await terminal.wait_shown(
            lambda text: "node sandbox  ready" in "".join(screen_of(text)) and "kubectl" in foot_of(text)
        )
        lines = screen_of(terminal.shown)
        assert (len(lines), max(map(len, lines)) <= 80) == (24, True)
        assert all(name in lines[2] for name in ("GPU / CONTAINER", "GPU CORES", "SM %", "MEMORY GiB"))
        assert [line.split()[0] for line in lines[3:11]] == [str(index) for index in range(8)]
        assert "? all commands" in lines[-3] and lines[-2].startswith("next: http://localhost:")
        assert lines[-1] == f"export KUBECONFIG={short_dir}/s/kubeconfig; kubectl get pods"
        terminal.resize(columns=60, rows=10)
        await terminal.wait_shown(lambda text: "more lines" in foot_of(text))
        assert len(screen_of(terminal.shown)) == 10
        terminal.press("?")
        await terminal.wait_shown(lambda text: "other terminal:" in "".join(screen_of(text)))
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.wait_end() == 0
