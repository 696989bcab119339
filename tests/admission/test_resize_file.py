"""The file that remembers resized shares; how it is kept: tests/kit/test_state_file.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.admission.resizing import MAX_SHARES, ResizeFile
from gpushare_agent.core.model.allocations import ContainerKey, ResizedShare, ShareSize
from gpushare_agent.core.model.names import GpuUuid, PodUid
from gpushare_agent.core.model.resources import ResourceKind

SHARE = ResizedShare(
    key=ContainerKey(PodUid("11111111-2222-3333-4444-555555555555"), "main"),
    gpu=GpuUuid("GPU-1"),
    kind=ResourceKind.VMEMORY,
    allocated=ShareSize(cores=30, memory=8),
    target=ShareSize(cores=20, memory=24),
    charged=ShareSize(cores=30, memory=24),
    instance="a" * 64,
)
RAW = {
    "pod_uid": "11111111-2222-3333-4444-555555555555",
    "container": "main",
    "gpu": "GPU-1",
    "resource": "vmemory",
    "allocated": "30,8",
    "target": "20,24",
    "booked": "30,24",
    "instance": "a" * 64,
}


async def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    """In the format of all agents: of two versions on a node either reads what the other wrote."""
    path = tmp_path / "resize.json"
    await ResizeFile(path).save([SHARE])
    assert await ResizeFile(path).load() == (SHARE,)
    assert json.loads(path.read_text()).items() >= {"version": 1, "shares": [RAW]}.items()


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"version": 2, "shares": []}),
        json.dumps({"version": 1}),
        json.dumps({"version": 1, "shares": [RAW, RAW]}),
        json.dumps({"version": 1, "shares": [[]]}),
        json.dumps({"version": 1, "shares": [RAW | {"container": f"c{n}"} for n in range(MAX_SHARES + 1)]}),
        *(
            json.dumps({"version": 1, "shares": [RAW | {name: value}]})
            for name, value in (
                ("pod_uid", "../../etc"),
                ("container", ""),
                ("gpu", "x" * 129),
                ("resource", "vcore"),
                ("allocated", "100,24"),
                ("allocated", "30,10000000"),
                ("target", "31,24"),
                ("target", "20,0"),
                ("target", "-1,5"),
                ("target", [20, 24]),
                ("booked", "20"),
                ("allocated", None),
                ("instance", "a"),
                ("instance", None),
            )
        ),
    ],
)
async def test_what_is_not_the_format_is_not_believed(tmp_path: Path, content: str) -> None:
    """Nothing counts as resized then."""
    (tmp_path / "resize.json").write_text(content)
    with capture_logs() as logs:
        assert await ResizeFile(tmp_path / "resize.json").load() == ()
    assert [line["event"] for line in logs] == ["resize_state_corrupt"]


async def test_the_most_shares_fit_the_bound(tmp_path: Path) -> None:
    """With the longest names that Kubernetes and a runtime give."""
    path, gpu = tmp_path / "resize.json", GpuUuid("GPU-6e1c1b5e-aaaa-bbbb-cccc-ddddddddddddd")
    keys = [ContainerKey(SHARE.key.pod_uid, f"{n:063}") for n in range(MAX_SHARES)]
    await ResizeFile(path).save(replace(SHARE, key=key, gpu=gpu) for key in keys)
    assert len(await ResizeFile(path).load()) == MAX_SHARES
