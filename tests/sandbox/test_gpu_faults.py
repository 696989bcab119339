"""GPUs that fail: what `fail-gpu` and `heal-gpu` do."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.agent.gpus.simulated.driver import SimulatedDriver
from gpushare_agent.core.formats.simulated_gpus import parse_faults
from gpushare_agent.core.model.errors import Rejected, Unavailable
from gpushare_agent.core.model.gpu_health import HealthPolicy
from gpushare_agent.sandbox import command as app
from gpushare_agent.sandbox.gpu_faults import GpuFaults
from tests.sandbox.support_sandbox import container, pod
from tests.sandbox.support_sandbox_cli import document_of, live, read_until, sandbox

QUICK = ("--health.check-period-s=0.2", "--health.recovery-period-s=0.2", "--health.recovery-probes=1")


def driver_of(faults: Path) -> SimulatedDriver:
    return SimulatedDriver(
        gpus=3, gpu_memory_mib=(24576,), topology_text=None, gpu_name="T", seed="n", faults_file=faults
    )


# --- the file ---


def failing(path: Path) -> set[int | None]:
    """The GPUs of which it says that something is wrong."""
    found = parse_faults(path.read_bytes())
    return {*found.lost, *(event.gpu for event in found.events)}


async def test_a_lost_gpu_is_lost_to_the_driver_until_it_is_healed(tmp_path: Path) -> None:
    """With the given reason, or NVML's words."""
    faults, driver = GpuFaults(tmp_path / "faults.json", 3), driver_of(tmp_path / "faults.json")
    faults.lose(1)
    faults.lose(2, "a cable")
    assert [gpu.unhealthy_reason for gpu in (await driver.read()).gpus] == ["", "GPU is lost", "a cable"]
    assert failing(tmp_path / "faults.json") == {1, 2}
    assert faults.heal(1) == f"GPU 1 is no longer lost (GPU is lost){TAKEN_BACK}"
    assert [gpu.is_healthy for gpu in (await driver.read()).gpus] == [True, True, False]
    assert faults.heal(1) == "nothing is wrong with GPU 1"


async def test_an_xid_is_reported_each_time_and_healing_shows_a_reset(tmp_path: Path) -> None:
    """IDs grow also when a healed GPU's entries have gone, so the driver takes none for an old one."""
    faults, driver = GpuFaults(tmp_path / "faults.json", 3), driver_of(tmp_path / "faults.json")
    await driver.read()
    for _ in range(2):
        faults.report_xid(1, 79)
        faults.report_xid(1, 48)
        faults.report_xid(1, 79)
        assert failing(tmp_path / "faults.json") == {1}
        assert [event.xid for event in await driver.events()] == [79, 48, 79]
        assert faults.heal(1) == f"GPU 1 was reset after Xid 79, Xid 48{TAKEN_BACK}"
        assert failing(tmp_path / "faults.json") == set()
        assert [[gpu.is_healthy for gpu in (await driver.read()).gpus] for _ in range(2)] == [
            [True, False, True], [True, True, True],
        ]  # fmt: skip
        assert await driver.events() == []


async def test_what_a_person_has_written_stays(tmp_path: Path) -> None:
    """His IDs count, too; only what belongs to the healed GPU goes."""
    path = tmp_path / "faults.json"
    faults = GpuFaults(path, 3)
    path.write_text('{"lost": {"0": "mine"}, "xids": [{"id": 40, "gpu": 0, "xid": 48}]}')
    faults.report_xid(1, 79)
    faults.lose(1)
    assert failing(path) == {0, 1}
    assert faults.heal(1) == f"GPU 1 is no longer lost (GPU is lost) and was reset after Xid 79{TAKEN_BACK}"
    assert json.loads(path.read_text()) == {
        "lost": {"0": "mine"}, "xids": [{"id": 40, "gpu": 0, "xid": 48}], "resets": [{"id": 42, "gpu": 1}],
    }  # fmt: skip


def test_the_file_keeps_no_more_than_a_thousand_events(tmp_path: Path) -> None:
    """The newest ones."""
    path = tmp_path / "faults.json"
    path.write_text(json.dumps({"xids": [{"id": number + 1, "gpu": 0, "xid": 31} for number in range(1000)]}))
    GpuFaults(path, 3).report_xid(1, 79)
    xids = json.loads(path.read_text())["xids"]
    assert (len(xids), xids[0]["id"], xids[-1]) == (1000, 2, {"id": 1001, "gpu": 1, "xid": 79})


def test_a_file_that_cannot_be_used_is_left_alone(tmp_path: Path) -> None:
    """It says how to go on: where it cannot be read, without the setting, and where the directory has gone."""
    path = tmp_path / "faults.json"
    path.write_text("{")
    with pytest.raises(Rejected, match=r"cannot be read.*Correct it, or remove it"):
        GpuFaults(path, 3).lose(0)
    assert path.read_text() == "{"
    with pytest.raises(Rejected, match=r"empty --simulated\.faults"):
        GpuFaults(None, 3).lose(0)
    with pytest.raises(Unavailable, match="cannot be written"):
        GpuFaults(tmp_path / "absent" / "faults.json", 3).lose(0)


TAKEN_BACK = "; the agent takes it back once it has passed its probes"
POLICY = HealthPolicy(ignored_xids=frozenset({31}), reset_xids=frozenset({79}))


@pytest.mark.parametrize(
    ("xids", "is_offered", "healed"),
    [
        ((31,), True, "is not ill (Xid 31: ignored (health.ignored_xids)); nothing was done to it"),
        ((31,), False, "is not ill (Xid 31: ignored (health.ignored_xids)); nothing was done to it"),
        ((94,), True, "is not ill (Xid 94: the agent has taken the GPU back by itself); nothing was done to it"),
        ((94,), False, f"was reset after Xid 94{TAKEN_BACK}"),
        ((79,), True, f"was reset after Xid 79{TAKEN_BACK}"),
        ((31, 79), False, f"was reset after Xid 79{TAKEN_BACK}"),
    ],
)
async def test_a_reset_is_shown_only_where_the_gpu_is_out_of_service(
    tmp_path: Path, xids: tuple[int, ...], is_offered: bool, healed: str
) -> None:
    """It would take a Healthy GPU away for its probes. The file forgets the errors all the same."""
    path = tmp_path / "faults.json"
    faults, driver = GpuFaults(path, 3, POLICY), driver_of(path)
    await driver.read()
    for xid in xids:
        faults.report_xid(1, xid)
    assert faults.heal(1, is_offered=is_offered) == f"GPU 1 {healed}"
    assert [gpu.is_healthy for gpu in (await driver.read()).gpus] == [True, "reset" not in healed, True]
    assert failing(path) == set()
    faults.report_xid(1, 79)
    assert [event.xid for event in await driver.events()] == [79]


# --- the commands ---


@pytest.mark.slow
async def test_fail_gpu_and_heal_gpu_from_another_terminal(short_dir: Path) -> None:
    """`status` shows what is wrong; the GPU's units leave the node and return; what containers use is shown as well."""
    state = short_dir / "s"
    load = {"sandbox.gpushare-agent/load": "0.5"}
    (short_dir / "p.yaml").write_text(yaml.safe_dump(pod("mine", container(cores=40, blocks=8), annotations=load)))
    async with live(state, "--apply", short_dir / "p.yaml", "--gpus", "2", *QUICK) as process:
        await read_until(process, "pod default/mine Running")
        lost = await sandbox("fail-gpu", "1", "--lost", "a cable", "--state-dir", state)
        assert (lost.code, lost.out) == (0, "GPU 1 is lost: a cable\n"), lost.err
        document = await shown_until(state, 1, is_healthy=False, used_bytes=1)
        assert reasons(document) == ["", "a cable"]
        usage = document["node"]["containers"][0]["gpus"][0]["usage"]
        assert (usage["sm_ratio"], usage["memory_bytes"] >> 20) == (0.2, 1024)
        status = await sandbox("status", "--state-dir", state)
        assert re.search(r"^1 .* Unhealthy .*\n +a cable; recovers ", status.out, flags=re.M)
        assert re.search(r"^  default/mine/main +Running +40 +20 +1/2", status.out, flags=re.M)
        healed = await sandbox("heal-gpu", "1", "--state-dir", state)
        assert healed.out == f"GPU 1 is no longer lost (a cable){TAKEN_BACK}\n"
        document = await shown_until(state, 1, is_healthy=True)
        assert reasons(document) == ["", ""]
        xid = await sandbox("fail-gpu", "0", "--xid", "79", "--state-dir", state)
        assert (xid.code, xid.out) == (0, "GPU 0 has reported Xid 79\n"), xid.err
        document = await shown_until(state, 0, is_healthy=False)
        assert reasons(document)[0].startswith("Xid 79") and reasons(document)[1] == ""
        assert [p["phase"] for p in document["pods"]] == ["Running"]
        missing = await sandbox("fail-gpu", "2", "--state-dir", state)
        assert (missing.code, missing.out) == (2, ""), missing.err  # as for every bad value of an argument
        reset = await sandbox("heal-gpu", "0", "--state-dir", state)
        assert reset.out.startswith("GPU 0 was reset after Xid 79; ")
        await shown_until(state, 0, is_healthy=True)
        await sandbox("fail-gpu", "0", "--xid", "31", "--state-dir", state)
        spared = await sandbox("heal-gpu", "0", "--state-dir", state)
        assert spared.out.startswith("GPU 0 is not ill (Xid 31: "), spared.err
        resets = json.loads((state / "faults.json").read_text())["resets"]
        assert len(resets) == 1  # that after Xid 79


@pytest.mark.parametrize("words", ["fail-gpu", "fail-gpu one", "fail-gpu 0 --xid 79 --lost x", "heal-gpu 0 --xid 79"])
def test_a_gpu_command_that_makes_no_sense_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2 and the usage."""
    parser = argparse.ArgumentParser()
    app.add_arguments(parser)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(words.split())
    assert "usage:" in capsys.readouterr().err


def reasons(document: dict[str, Any]) -> list[str]:
    """Why each GPU is out of service, without how it comes back."""
    return [gpu["health_reason"].partition(";")[0] for gpu in document["node"]["gpus"]]


async def shown_until(state: Path, gpu: int, *, is_healthy: bool, used_bytes: int = 0) -> dict[str, Any]:
    """The report once the agent offers the GPU so, and use is known and at least `used_bytes`: the sample before a
    container's first moment shows none."""
    while True:
        document = await document_of(state)
        node = document["node"]
        used = [part["usage"] for one in node["containers"] for part in one["gpus"]]
        is_used = used and all(one and (one["memory_bytes"] or 0) >= used_bytes for one in used)
        if node["gpus"][gpu]["is_healthy"] is is_healthy and is_used:
            return document
        await asyncio.sleep(0.05)  # another process: it can only be asked again
