"""Limits and processes in the sandbox's report: what is read of a container's files, and how it is shown."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group

from gpushare_agent.cli.render_sandbox import (
    limit_text,
    node_parts,
    pids_text,
    pod_line,
    pods_table,
    print_document,
    reason_lines,
    used_text,
)
from gpushare_agent.isolation.vdevice.format import encode_pids
from gpushare_agent.model.names import GIB
from gpushare_agent.sandbox.report import read_vdevice
from tests.cli.support_cli import at_terminal, foot_of, screen_of
from tests.isolation.support_vdevice import share_config

SHARE = {"cores": 30, "memory_mib": 4096, "core_limit": 0, "is_limited": True, "pids": [4711]}


def shown_container(pids: int = 1, **reported: Any) -> dict[str, Any]:
    """Of a document, as far as the views read it."""
    return {
        "name": "main", "vcore": 30, "vmemory": 16, "gpu_mem": 0, "memory_mib": 4096, "units": {}, "claims": [],
        "gpus": [0], "labels": ["0"], "pids": list(range(4711, 4711 + pids)),
        "vdevice": {**SHARE, **reported}, "used": {"cores": 12.4, "memory_mib": 2048},
    }  # fmt: skip


def shown_pod(*containers: dict[str, Any], phase: str = "Running") -> dict[str, Any]:
    return {
        "namespace": "default", "name": "share", "phase": phase, "is_terminating": False, "reason": "", "message": "",
        "annotations": {}, "containers": list(containers),
    }  # fmt: skip


def printed(renderable: Any, width: int) -> str:
    console = Console(width=width, height=24, file=io.StringIO())
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


# --- the files ---


def write(directory: Path, pids: list[int], *, limit: int = 0) -> None:
    """As the agent does it: by rename."""
    contents = {"pids.config": encode_pids(pids)[0], "vcuda.config": share_config(limit=limit)}
    for name, content in contents.items():
        (directory / ".new").write_bytes(content)
        (directory / ".new").rename(directory / name)


def test_a_containers_files_are_shown_as_it_reads_them(short_dir: Path) -> None:
    """Percent, MiB, and the PIDs that it was told."""
    write(short_dir, [12, 7], limit=60)
    assert read_vdevice(short_dir) == {
        "cores": 20, "memory_mib": 2048, "core_limit": 60, "is_limited": True, "pids": [7, 12],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["vcuda.config", "pids.config"])
@pytest.mark.parametrize("harm", ["missing", "torn", "a directory"])
def test_files_that_are_not_whole_show_nothing(short_dir: Path, name: str, harm: str) -> None:
    """None, whichever of the two it is, and again the limits once it is whole."""
    write(short_dir, [7])
    (short_dir / name).unlink()
    if harm == "torn":
        (short_dir / name).write_bytes(b"xyz")
    elif harm == "a directory":
        (short_dir / name).mkdir()
    assert read_vdevice(short_dir) is None
    if harm == "a directory":
        (short_dir / name).rmdir()
    write(short_dir, [7])
    assert read_vdevice(short_dir) is not None


# --- how it is shown ---


@pytest.mark.parametrize(
    ("reported", "text"),
    [
        ({}, "30 %, 4 GiB"),
        ({"core_limit": 60}, "30–60 %, 4 GiB"),
        ({"core_limit": 30}, "30 %, 4 GiB"),
        ({"is_limited": False, "cores": 100}, "none"),
    ],
    ids=["share", "elastic", "elastic by nothing", "whole"],
)
def test_a_limit_reads_as_it_binds(reported: dict[str, Any], text: str) -> None:
    """A share, one that may rise, and a whole GPU, which is not limited."""
    assert limit_text(shown_container(**reported)) == text


def test_a_container_that_is_reported_nothing_has_no_limit_to_show() -> None:
    """A dash in a table, and so where its use is not known; in a line for a pipe nothing at all."""
    untold = {**shown_container(), "vdevice": None, "used": None}
    assert used_text(untold) == "-"
    assert limit_text(untold) == "-"
    assert "limit" not in pod_line(shown_pod(untold))


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (2, "2: 4711, 4712"), (9, "9: 4711, 4712, 4713, …")])
def test_processes_are_counted_and_the_first_ones_named(count: int, text: str) -> None:
    """Where there is little room, the count alone."""
    assert pids_text(shown_container(count), is_short=False) == text
    assert pids_text(shown_container(count), is_short=True) == str(count)


@pytest.mark.parametrize(
    ("width", "cells"),
    [
        (
            160,
            ["default/share/main", "Running", "0", "30", "12", "2/4", "30 %, 4 GiB", "2: 4711, 4712"],
        ),
        (110, ["default/share/main", "Running", "0", "30", "12", "2/4", "30 %, 4 GiB", "2"]),
        (80, ["default/share/main", "Running", "0", "30", "12", "2/4", "2"]),
    ],
)
def test_the_table_of_pods_names_limits_and_processes(width: int, cells: list[str]) -> None:
    """One line for the container; with less room fewer PIDs, then not the limit that it reads, but always cores and use."""
    text = printed(pods_table({"nodes": [{}], "pods": [shown_pod(shown_container(2))]}, width), width)
    row = next(line for line in text.splitlines() if "default/share" in line)
    assert re.split(r" {2,}", row.strip()) == cells


GPU = {
    "index": 0, "name": "T", "cores": {"allocated": 30, "capacity": 100}, "usage": {"sm_ratio": 0.124},
    "memory": {"allocated_bytes": 4 * GIB, "capacity_bytes": 24 * GIB}, "is_healthy": True, "health": "Healthy",
    "health_reason": "", "cordoned": None,
}  # fmt: skip


def lines_of(*gpus: dict[str, Any], width: int = 120) -> list[str]:
    return printed(Group(*node_parts({"name": "a", "gpus": list(gpus)}, width)), width).splitlines()


@pytest.mark.parametrize("width", [60, 120])
def test_the_gpus_stand_as_in_top(width: int) -> None:
    """Allocated beside used, by NVIDIA's name of a MIG instance; below both together."""
    title, header, first, second = lines_of(GPU, GPU | {"mig": {"label": "0:1"}}, width=width)
    assert title.startswith("a: 2 GPUs  allocated 60/200 GPU cores (30 %), ")
    assert ("ALLOC GiB" in header) is (width == 120) and "GPU CORES" in header
    assert [line.split()[:2] for line in (first, second)] == [["0", "T"], ["0:1", "T"]]
    assert "30/100" in first and " 12 " in first


@pytest.mark.parametrize(
    ("reported", "texts"),
    [
        ({"is_healthy": False, "cordoned": "cordoned"}, ["Cordoned"]),
        ({"is_healthy": False, "health_reason": "Xid 79"}, ["Unhealthy", "Xid 79"]),
        (
            {"is_healthy": False, "health_reason": "Xid 79", "cordoned": "loud"},
            ["Cordoned, Unhealthy", "Cordoned: loud", "Unhealthy: Xid 79"],
        ),
        ({"health": "Unknown"}, ["Unknown"]),
    ],
)
def test_a_gpu_out_of_service_says_why_as_in_every_view(reported: dict[str, Any], texts: list[str]) -> None:
    """Unknown while the kubelet knows of none."""
    _, _, line, *reasons = lines_of(GPU | reported)
    assert re.search(rf"  {texts[0]}  ", line) and [one.strip() for one in reasons] == texts[1:]


def test_without_an_answer_of_the_agent_no_gpu_is_shown() -> None:
    """None would be free, and none allocated."""
    assert lines_of() == ["a: its agent has not answered yet"]


def test_the_use_of_several_gpus_is_a_part_of_them_together() -> None:
    """180 % of two GPUs are 90 %."""
    both = {**shown_container(), "gpus": [0, 1], "labels": ["0", "0:1"], "used": {"cores": 180.0, "memory_mib": 2048}}
    row = printed(pods_table({"nodes": [{}], "pods": [shown_pod(both)]}, 80), 80).splitlines()[1]
    assert re.split(r" {2,}", row.strip())[4] == "90"


def test_status_says_where_each_nodes_agent_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Not what is switched off; and not the report of --once, for then nobody is there to be asked."""
    addresses = {"web": "http://localhost:1", "control_socket": "/s/agent-control.sock"}
    document = {"nodes": [{"name": "a", "gpus": [GPU], "addresses": addresses}], "pods": []}
    print_document(document, "table", has_addresses=True)
    assert "web http://localhost:1  control socket /s/agent-control.sock\n" in capsys.readouterr().out
    print_document(document, "table")
    assert "http" not in capsys.readouterr().out


def test_why_a_pod_waits_stands_below_the_table() -> None:
    """With the whole width, and only for pods that have a reason."""
    waits = {**shown_pod(shown_container(), phase="Pending"), "reason": "Unschedulable", "message": "no [room]"}
    lines = reason_lines({"pods": [shown_pod(shown_container()), waits]})
    assert [str(line) for line in lines] == ["default/share: Unschedulable: no [room]"]


def test_in_a_pipe_each_row_and_each_reason_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """However long the reason, and however much memory the pod asks for by mistake."""
    container = {**shown_container(), "name": "c" * 63, "memory_mib": 4 * GIB * 256, "used": None}
    reason = f"0/1 nodes are available: {'1 too full, ' * 80}.\nSecond line"
    waits = {**shown_pod(container, phase="Pending"), "name": "p" * 253, "message": reason}
    print_document({"nodes": [{"name": "a", "gpus": [GPU], "addresses": {}}], "pods": [waits]}, "table")
    *_, row, why = capsys.readouterr().out.splitlines()
    assert re.split(r" {2,}", row)[:2] == [f"default/{'p' * 253}/{'c' * 63}", "Pending"]
    assert " 1073741824 " in row
    assert why == f"default/{'p' * 253}: {' '.join(reason.split())}"


def test_a_line_for_a_pipe_tells_the_limit_of_a_pod_that_runs() -> None:
    """And no PIDs, for each change of a line is a new line."""
    line = pod_line(shown_pod(shown_container(2)))
    assert line == "pod default/share Running [main: 30 GPU cores, 4 GiB on GPU 0, limit 30 %, 4 GiB]"
    assert "limit" not in pod_line(shown_pod(shown_container(), phase="Pending"))


async def test_the_live_view_fits_a_small_terminal_and_follows_its_size(short_dir: Path) -> None:
    """At 80×24 all eight GPUs with cores and use, the keys, and what can be done next, which can be typed as it stands."""
    argv = ("sandbox", "--state-dir", str(short_dir / "s"), "--port", "0", "--samples", "none")
    async with at_terminal(*argv, columns=80, rows=24) as terminal:
        await terminal.wait_shown(lambda text: "Healthy" in text and "kubectl" in foot_of(text))
        lines = screen_of(terminal.shown)
        assert (len(lines), max(map(len, lines)) <= 80) == (24, True)
        assert all(name in lines[1] for name in ("GPU / CONTAINER", "GPU CORES", "SM %", "MEMORY GiB"))
        assert [line.split()[0] for line in lines[2:10]] == [str(index) for index in range(8)]
        assert "? all commands" in lines[-3] and lines[-2].startswith("next: http://localhost:")
        assert lines[-1] == f"export KUBECONFIG={short_dir}/s/kubeconfig; kubectl get pods"
        terminal.resize(columns=60, rows=10)
        await terminal.wait_shown(lambda text: "more lines" in foot_of(text))
        assert len(screen_of(terminal.shown)) == 10
        terminal.press("?")
        await terminal.wait_shown(lambda text: "other terminal:" in "".join(screen_of(text)))
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.wait_end() == 0
