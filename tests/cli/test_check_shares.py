"""`gpushare-agent check` for MPS, gpushare, device lists, CDI and GPUShare's right."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpushare_agent.agent.commands.check import check_device_lists, check_kept, check_list_sizes, check_node
from gpushare_agent.agent.delivery.elf import read_interface
from gpushare_agent.agent.isolation.gpushare.check import check_gpushare
from gpushare_agent.agent.isolation.mps.check import check_mps
from gpushare_agent.core.model.finding import Level
from gpushare_agent.core.settings.settings import Settings, SettingsError, load_settings
from tests.isolation.support_driver import require_cc
from tests.isolation.support_library import fake_library


def settings_of(*flags: str) -> Settings:
    return load_settings(["--driver=simulated", *flags], {}).settings


OF_AN_ISOLATION = {"mps", "gpushare", "virtual manager", "driver directory", "host processes", "open files"}


async def test_what_is_not_in_use_is_not_probed(tmp_path: Path) -> None:
    """A node without an isolation gets no line about any, nor about the lists of its strategies."""
    findings = await check_node(settings_of("--isolation=none", f"--kubeconfig={tmp_path / 'none'}"))
    assert {finding.what for finding in findings}.isdisjoint(OF_AN_ISOLATION | {"device lists", "cdi"})


@pytest.mark.parametrize("flag", ["--isolation=mps", "--isolations-allowed=mps"])
async def test_an_mps_daemon_that_is_not_there_is_an_error_with_both_cures(flag: str, tmp_path: Path) -> None:
    """Start your own, or ours; also where pods may only choose it."""
    (finding,) = await check_mps(settings_of(flag, f"--mps-pipe={tmp_path / 'pipe'}"))
    assert finding.level is Level.ERROR and str(tmp_path / "pipe") in finding.detail
    assert "gpushare-agent mps" in finding.cure


def with_library(tmp_path: Path) -> tuple[Path, Settings]:
    """The library's place, and the settings of an agent that takes it from there."""
    library = tmp_path / "libgpushare.so"
    flags = ("--isolation=gpushare", f"--libgpushare.library={library}", f"--libgpushare.directory={tmp_path / 'own'}")
    return library, settings_of(*flags, f"--kubeconfig={tmp_path / 'none'}")


async def test_gpushare_needs_its_library(tmp_path: Path) -> None:
    """Named where it is another one's; fine with a library for this machine. Below the error that it is missing there is no
    line that gpushare keeps shares."""
    library, settings = with_library(tmp_path)
    library.write_bytes(b"no library")
    (finding,) = await check_gpushare(settings)
    assert finding.level is Level.ERROR and str(library) in finding.detail
    findings = await check_node(settings)
    assert Level.ERROR in {finding.level for finding in findings if finding.what == "gpushare"}
    assert not [finding for finding in findings if "memory is kept" in finding.detail]
    assert [finding for finding in check_kept(settings) if "memory is kept by gpushare" in finding.detail]
    fake_library(library)
    found = await check_gpushare(settings)
    assert [finding.level for finding in found] == [Level.OK, Level.ERROR]
    assert "not libgpushare's" in found[-1].detail


async def test_a_library_that_is_too_large_is_an_error_and_not_read(tmp_path: Path) -> None:
    """A sparse file of 10 GiB with a library's head."""
    library, settings = with_library(tmp_path)
    fake_library(library)
    os.truncate(library, 10 * 2**30)
    (finding,) = await check_gpushare(settings)
    assert finding.level is Level.ERROR and "bytes" in finding.detail


async def test_the_glibc_that_the_library_needs_is_named(tmp_path: Path) -> None:
    """A library of this machine's compiler: the newest version of a symbol that it uses. A warning where that is too new."""
    (library, settings), source = with_library(tmp_path), tmp_path / "vgpu.c"
    source.write_text(
        'const char *variable = "/etc/vcuda/gpushare.config"; int cuInit, cuGetProcAddress_v2;\n'
        "double log2(double); extern int __libc_start_main();\n"
        "void *dlsym(void *a, const char *b) { return a == b ? (void *)__libc_start_main : (void *)(long)log2(*b); }\n"
    )
    subprocess.run([require_cc(), "-w", "-shared", "-fPIC", "-o", str(library), str(source), "-lm"], check=True)
    found = await check_gpushare(settings)
    needed = read_interface(library).glibc
    assert len(needed) >= 2 and f"glibc {'.'.join(map(str, needed))} or newer" in found[-1].detail
    assert found[-1].level is (Level.WARNING if needed > (2, 28) else Level.OK)


async def test_strategies_that_contradict_each_other_and_gpus_without_a_name_are_reported(tmp_path: Path) -> None:
    """Two programs asked for one GPU; and with CDI every GPU gets its name from the agent."""
    flags = ("--device-list-strategy=envvar,cdi-cri", f"--cdi.spec-directories={tmp_path}", "--simulated.gpus=2")
    findings = await check_device_lists(settings_of(*flags))
    assert [f.level for f in findings] == [Level.WARNING, Level.OK]
    assert "2 GPUs have a name" in findings[-1].detail
    assert not list(tmp_path.iterdir()), "a check changes nothing"


VOLUME = '{"volume": [{"name": "nvidia", "base": "/lib", "components": {"libraries": ["libcuda.so"]}}]}'


@pytest.mark.parametrize(("volumes", "libraries"), [("no JSON", False), (VOLUME, True)])
async def test_what_adds_the_drivers_libraries_is_asked_of_the_volumes(
    tmp_path: Path, volumes: str, libraries: bool
) -> None:
    """Device nodes alone, under the isolation that mounts a volume: without one CUDA programs find no libcuda."""
    path = tmp_path / "volume.conf"
    path.write_text(volumes)
    flags = ("--isolation=vcuda", "--device-list-strategy=device-nodes", "--simulated.device-nodes=true")
    found = await check_device_lists(settings_of(*flags, f"--volume-config={path}"))
    assert [finding.level for finding in found] == ([] if libraries else [Level.WARNING])


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpushare.resource=tencent.com/vcuda-core",),
        ("--gpushare.resource=no name",),
        ("--gpushare.resource=aliyun.com/gpu-count",),
    ],
)
def test_gpushares_names_must_be_names_of_their_own(flags: tuple[str, ...]) -> None:
    """One resource cannot mean two things."""
    with pytest.raises(SettingsError):
        settings_of(*flags)


async def test_lists_that_no_kubelet_takes_are_reported_before_the_agent_ends_by_them() -> None:
    """With the unit, or the block size, that fits."""
    fine, status = await check_list_sizes(settings_of("--gpushare.enabled"))
    assert fine.level is Level.OK and "aliyun.com/gpu-mem" in fine.detail
    assert status.level is Level.OK
    for flags, cure in (
        (("--gpushare.enabled", "--gpushare.unit=MiB"), "gpushare.unit to GiB"),
        (("--resources.memory-block-mib=1",), "memory_block_mib"),
    ):
        found = [one for one in await check_node(settings_of(*flags)) if one.what == "list sizes"]
        assert [(one.level, cure in one.detail) for one in found] == [(Level.ERROR, True)]


async def test_a_block_size_that_makes_large_pod_statuses_is_warned_of() -> None:
    """Long before the kubelet's own limit: every device ID of a container is in its pod's status."""
    flags = ("--simulated.gpus=8", "--simulated.gpu-memory-mib=81920")
    findings = [
        (await check_list_sizes(settings_of(*flags, f"--resources.memory-block-mib={block}")))[1]
        for block in (256, 128, 64)
    ]
    assert [one.level for one in findings] == [Level.OK, Level.OK, Level.WARNING]
    assert "resources.memory_block_mib" in findings[-1].cure
