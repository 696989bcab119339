"""`gpushare-agent driver-volume`, run as a user does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.commands.driver_volume import configured_volumes
from gpushare_agent.agent.commands.former_daemonset import start
from gpushare_agent.agent.delivery.volume_directory import installed_driver_version
from gpushare_agent.agent.isolation.vcuda.part import SharedVolumeCheck
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.core.settings.sources import GPU_MANAGER_DAEMONSET
from tests.isolation.support_driver import FakeHost, tree_of
from tests.settings.support_settings import Ended, run_program


@pytest.fixture
def host(short_dir: Path) -> FakeHost:
    host = FakeHost(short_dir)
    host.write_config()
    return host


async def run(host: FakeHost, *more: str) -> Ended:
    return await run_program(*host.arguments(), *more)


async def run_json(host: FakeHost, *more: str, code: int = 0) -> dict[str, Any]:
    ended = await run(host, "-o", "json", *more)
    assert ended.code == code, ended.err
    document: dict[str, Any] = json.loads(ended.out)
    return document


async def test_both_volumes_are_made_and_the_report_says_of_what(host: FakeHost) -> None:
    """The report names every file with its source, and the driver's version can be read back. Before and afterwards, --check
    tells what would be done and does nothing."""
    host.ldconfig()
    document = await run_json(host, "--check")
    assert [report["state"] for report in document["volumes"]] == ["would change", "would change"]
    assert not host.base.exists()
    document = await run_json(host)
    assert document["errors"] == 0
    shared, origin = document["volumes"]
    assert (shared["name"], shared["state"], shared["driver_version"]) == ("nvidia", "made", "535.104.05")
    assert shared["links"]["lib64/libcuda.so.1"] == "libcuda-control.so"
    assert origin["links"]["lib64/libcuda.so.1"] == "libcuda.so.535.104.05"
    assert shared["files"]["lib64/libcuda-control.so"] == str(host.control)
    for report in (shared, origin):
        assert report["warnings"] == []
        assert Path(report["directory"]).resolve() == Path(report["version"])
        for target in (*report["files"], *report["links"]):
            assert (Path(report["directory"]) / target).is_file()
    for volume in configured_volumes(load_settings(host.arguments()[1:], {}).settings):
        assert installed_driver_version(volume) == (535, 104, 5)
    document = await run_json(host, "--check")
    assert [report["state"] for report in document["volumes"]] == ["unchanged", "unchanged"]


async def test_the_text_says_the_same_and_the_second_run_changes_nothing(host: FakeHost) -> None:
    """One line a file; `unchanged` when all is in force."""
    first = await run(host)
    assert first.code == 0, first.err
    assert "volume nvidia: made, driver 535.104.05" in first.out
    assert f"lib64/libcuda.so.535.104.05 <- {host.library('libcuda')}" in first.out
    assert "link       lib64/libcuda.so.1 <- libcuda-control.so" in first.out
    second = await run(host)
    assert second.code == 0, second.err
    assert [line.split(",")[0] for line in second.out.splitlines() if line.startswith("volume")] == [
        "volume nvidia: unchanged",
        "volume origin: unchanged",
    ]


async def test_a_missing_library_is_a_warning_and_the_rest_is_made(host: FakeHost) -> None:
    """Exit code 0; the warning names the library and the places."""
    host.write_config(host.entry("origin", libraries=["libcuda.so", "libnvidia-opencl.so"], binaries=["nvidia-x"]))
    ended = await run(host)
    assert ended.code == 0
    warnings = [line for line in ended.out.splitlines() if line.startswith("  warning")]
    assert len(warnings) == 2
    assert "libnvidia-opencl.so" in warnings[0]
    assert str(host.root / "usr/lib/x86_64-linux-gnu") in warnings[0]
    assert "nvidia-x" in warnings[1]


async def test_a_missing_libcuda_is_an_error_that_says_where_it_looked(host: FakeHost) -> None:
    """Exit code 1, and what was in force stays."""
    host.ldconfig()
    await run_json(host)
    before = (host.base / "origin").readlink()
    host.library("libcuda").unlink()
    document = await run_json(host, code=1)
    assert document["errors"] == 2
    for report in document["volumes"]:
        assert report["state"] == "failed"
        assert str(host.root / "etc/ld.so.cache") in report["error"]
        assert str(host.root / "usr/lib/x86_64-linux-gnu") in report["error"]
    assert (host.base / "origin").readlink() == before


async def test_without_the_control_library_only_the_volume_for_shares_fails(host: FakeHost) -> None:
    """The error names the path; whole GPUs are served."""
    host.control.unlink()
    document = await run_json(host, code=1)
    shared, origin = document["volumes"]
    assert str(host.control) in shared["error"]
    assert not (host.base / "nvidia").exists()
    assert origin["state"] == "made"


async def test_without_gpu_client_shares_have_no_volume_and_are_refused_with_the_cure(host: FakeHost) -> None:
    """Neither is one made without it, nor is one in force good without it."""
    await run_json(host)
    volume = next(v for v in configured_volumes(load_settings(host.arguments()[1:], {}).settings) if v.name == "nvidia")
    assert (volume.directory / "bin/gpu-client").stat().st_mode & 0o111
    await SharedVolumeCheck(volume).check()
    (volume.directory / "bin/gpu-client").unlink()
    with pytest.raises(Unavailable, match=r"bin/gpu-client is missing.*Run `gpushare-agent driver-volume`"):
        await SharedVolumeCheck(volume).check()
    host.client.unlink()
    shared, origin = (await run_json(host, code=1))["volumes"]
    assert "driver_volume.gpu_client" in shared["error"]
    assert (origin["state"], origin["error"]) == ("unchanged", "")


async def with_two_versions(host: FakeHost) -> tuple[list[Path], list[Path]]:
    """The directories of both volumes, of the driver before and of the one now."""
    before = (await run_json(host))["volumes"]
    host.library("libcuda").unlink()
    host.add_library("libcuda", "550.54.14")
    now = (await run_json(host))["volumes"]
    assert all(Path(one["version"]).is_dir() for one in (*before, *now))
    return [Path(one["version"]) for one in before], [Path(one["version"]) for one in now]


@pytest.mark.slow
async def test_prune_removes_the_versions_before(host: FakeHost) -> None:
    """Or leaves them with a warning, where it cannot be known that no container uses them. With --check it writes nothing,
    and what would go has a line of its own."""
    before, now = await with_two_versions(host)
    tree = tree_of(host.base)
    ended = await run(host, "--check", "--prune")
    assert ended.code == 0, ended.err
    name = before[0].name
    assert f"  to remove  {name}\n" in ended.out or f"  in use     {name}\n" in ended.out
    assert tree_of(host.base) == tree
    pruned = await run_json(host, "--prune")
    for old, report in zip(before, pruned["volumes"], strict=True):
        assert (report["removed"], report["kept"]) in (([old.name], []), ([], [old.name]))
        assert old.exists() == bool(report["kept"])
        assert bool(report["kept"]) == any("no old version was removed" in warning for warning in report["warnings"])
    assert all(path.is_dir() for path in now)


@pytest.mark.slow
async def test_prune_works_where_a_volume_cannot_be_made_and_check_tells_what_it_would_do(host: FakeHost) -> None:
    """As on a host, which has no control library: exit code 1 for that volume, and the old version goes all the same."""
    (old, _), (new, _) = await with_two_versions(host)
    host.control.unlink()
    planned = (await run_json(host, "--check", "--prune", code=1))["volumes"][0]
    assert (planned["state"], planned["removed"]) == ("failed", [])
    assert old.is_dir()
    pruned = (await run_json(host, "--prune", code=1))["volumes"][0]
    assert str(host.control) in pruned["error"]
    assert (planned["would_remove"], planned["kept"]) == (pruned["removed"], pruned["kept"])
    found = (pruned["removed"], pruned["kept"])
    assert found in (([old.name], []), ([], [old.name])), "the latter where mounts are hidden"
    assert old.exists() == bool(pruned["kept"])
    assert new.is_dir()


async def test_a_mistake_in_the_volume_config_is_one_line(host: FakeHost) -> None:
    """It names the file and the place; exit code 1."""
    host.write_config({"name": "nvidia", "base": "/x", "components": {"libraries": ["../x"]}})
    ended = await run(host)
    assert (ended.code, ended.out) == (1, "")
    (line,) = ended.err.splitlines()
    assert "volume[0].components.libraries[0]" in line
    missing = host.root / "volume.conf"
    ended = await run(host, f"--volume-config={missing}")
    assert ended.code == 1
    assert f"{missing} cannot be read" in ended.err


def test_gpu_managers_daemonset_collects_the_driver_and_starts_anew_with_it(
    host: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its start script does before gpu-manager; the process that finds the libraries goes on."""
    host.ldconfig()
    loaded = load_settings(host.arguments()[1:], {})
    sources = {**loaded.sources, "driver_volume.root": GPU_MANAGER_DAEMONSET}
    loaded = replace(loaded, sources=sources)
    started: list[str] = []
    start(loaded, {"A": "b"}, lambda _, argv, environ: started.append(environ["LD_LIBRARY_PATH"]))
    (libraries,) = started
    shown = capsys.readouterr().out
    assert (Path(libraries) / "libnvidia-ml.so.1").exists() and "volume origin: made" in shown
    assert "volume nvidia" not in shown, "no isolation in use mounts it"
    start(loaded, {"LD_LIBRARY_PATH": libraries}, lambda *_: started.append("again"))
    assert started == [libraries]


async def test_one_volume_alone_can_be_made(host: FakeHost) -> None:
    """The driver's own files need no control library."""
    host.ldconfig()
    host.control.unlink()
    document = await run_json(host, "--only=origin")
    assert [(one["name"], one["state"]) for one in document["volumes"]] == [("origin", "made")]
    assert not (host.base / "nvidia").exists()
