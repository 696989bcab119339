"""Reading the kubelet's checkpoint file: the real one, and garbage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpushare_agent.agent.kubelet.records import FILE_NAME, KubeletCheckpoint, read_checkpoint
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import Corrupt, Unavailable

DATA = Path(__file__).parent.parent / "data" / "kubelet"


def test_a_recorded_file_is_read_whole() -> None:
    """Every entry of the real kubelet's file, the IDs of its NUMA nodes joined."""
    entries = read_checkpoint(DATA / "checkpoint-1.36.json")
    raw_entries = json.loads((DATA / "checkpoint-1.36.json").read_text())["Data"]["PodDeviceEntries"]
    assert len(entries) == len(raw_entries) > 0
    for entry, raw in zip(entries, raw_entries, strict=True):
        assert entry.device_ids == {i for group in raw["DeviceIDs"].values() for i in group}
        assert (entry.pod_uid, entry.container) == (raw["PodUID"], raw["ContainerName"])
    without = {entries[0].pod_uid}
    assert read_checkpoint(DATA / "checkpoint-1.36.json", without=without) == [
        e for e in entries if e.pod_uid not in without
    ]


def entry(device_ids: object) -> str:
    raw = {"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": device_ids, "AllocResp": ""}
    return json.dumps({"Data": {"PodDeviceEntries": [raw]}})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"Data": 5}', '{"Data": {"PodDeviceEntries": [{}]}}', '{"Data": {"PodDeviceEntries": [5]}}',
     entry(5), entry(["a"]), entry({"0": 5}), entry({"0": ["\ud800"]}), "[" * 100_000],
)  # fmt: skip
def test_garbage_is_corrupt(tmp_path: Path, text: str) -> None:
    """Never another error: the file is another program's."""
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(Corrupt, match="file"):
        read_checkpoint(path)


def test_no_entries_are_no_error(tmp_path: Path) -> None:
    """A fresh kubelet writes null."""
    path = tmp_path / "file"
    path.write_text('{"Data": {"PodDeviceEntries": null}}')
    assert read_checkpoint(path) == []


def test_an_absent_file_is_unavailable(tmp_path: Path) -> None:
    """As is a directory in its place."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(Unavailable):
            read_checkpoint(path)


async def test_a_pipe_or_a_device_in_its_place_keeps_no_reader(tmp_path: Path) -> None:
    """The next reading finds the file that is there then."""
    path = tmp_path / FILE_NAME
    checkpoint = KubeletCheckpoint(tmp_path, DeviceIds())
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(path)
        with pytest.raises(Unavailable, match="it is no regular file"):
            await checkpoint.read()
        path.unlink()
    path.write_text('{"Data": {"PodDeviceEntries": null}}')
    assert await checkpoint.read() == []
