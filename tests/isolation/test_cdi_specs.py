"""The agent's own spec next to those of others, as GPUs and files come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.delivery.cdi_files import CdiFiles
from gpushare_agent.agent.delivery.cdi_specs import CdiSpecs, SpecChange
from gpushare_agent.agent.delivery.own_spec import SpecNodes
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.sandbox.runtime.cdi_resolver import resolve_cdi
from tests.isolation.support_cdi import NVIDIA_CTK, schema, write_spec
from tests.support_core import inventory

GPUS = inventory(3).gpus
KIND = "nvidia.com/gpu"


class Host:
    """Two spec directories, a runtime that reads them, and control nodes that come and go."""

    def __init__(self, root: Path) -> None:
        self.etc, self.run = root / "etc", root / "run"
        self.control: tuple[str, ...] = ("/dev/nvidiactl",)
        self.absent: tuple[str, ...] = ()
        self.specs = CdiSpecs(
            CdiFiles([self.etc, self.run]), kind=KIND, nodes=lambda: SpecNodes(control=self.control, absent=self.absent)
        )
        self.own_path = self.run / "gpushare-agent.json"

    def own(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.own_path.read_text())
        schema().validate(found)
        return found

    def own_names(self) -> list[str]:
        return [device["name"] for device in self.own()["devices"]] if self.own_path.exists() else []

    def nodes_of(self, gpu: Gpu) -> tuple[str, ...]:
        """As the runtime gives them."""
        return resolve_cdi([self.etc, self.run], [f"{KIND}={gpu.uuid}"]).device_nodes


@pytest.fixture
def host(short_dir: Path) -> Host:
    return Host(short_dir)


def test_where_nobody_names_the_gpus_ours_does(host: Host) -> None:
    """Every name resolves to the GPU's node and the control nodes; the second time nothing is written."""
    assert host.specs.plan(GPUS).change is SpecChange.WRITTEN
    assert not host.own_path.exists()
    state = host.specs.ensure(GPUS)
    assert state.change is SpecChange.WRITTEN and state.troubles == ()
    assert state.named == tuple((gpu.uuid, str(host.own_path)) for gpu in GPUS)
    for gpu in GPUS:
        assert host.nodes_of(gpu) == ("/dev/nvidiactl", f"/dev/nvidia{gpu.minor}")
    identity = host.own_path.stat().st_ino
    assert host.specs.ensure(GPUS).change is SpecChange.NONE
    assert host.own_path.stat().st_ino == identity


def test_where_nvidia_ctk_names_all_nothing_is_written(host: Host) -> None:
    """By UUID and under our kind; its spec brings the driver's libraries too."""
    host.etc.mkdir()
    (host.etc / "nvidia.yaml").write_bytes(NVIDIA_CTK)
    state = host.specs.ensure(GPUS[:2])
    assert state.change is SpecChange.NONE and state.spec is None
    assert dict(state.named) == {gpu.uuid: str(host.etc / "nvidia.yaml") for gpu in GPUS[:2]}
    assert not host.run.exists()


def test_where_others_name_some_ours_names_the_rest(host: Host) -> None:
    """A spec from before a GPU was added; one of another kind, and one that names GPUs by index alone, name none of ours."""
    write_spec(host.etc / "x.json", "GPU-2", kind="x.io/gpu")
    host.run.mkdir()
    (host.run / "nvidia.yaml").write_bytes(NVIDIA_CTK)
    assert host.specs.ensure(GPUS).named[2] == (GPUS[2].uuid, str(host.own_path))
    assert host.own_names() == ["GPU-2"]
    (host.run / "nvidia.yaml").unlink()
    write_spec(host.run / "nvidia.json", "0", "1", "2", "all")
    assert host.specs.ensure(GPUS).change is SpecChange.WRITTEN
    assert host.own_names() == ["GPU-0", "GPU-1", "GPU-2"]


def test_a_spec_that_comes_later_beside_ours_makes_names_ambiguous_until_the_next_check(host: Host) -> None:
    """nvidia-ctk's service writes into the same directory at boot; then ours goes."""
    host.specs.ensure(GPUS[:2])
    (host.run / "nvidia.yaml").write_bytes(NVIDIA_CTK)
    with pytest.raises(Rejected):
        host.nodes_of(GPUS[0])
    assert host.specs.ensure(GPUS[:2]).change is SpecChange.REMOVED
    assert not host.own_path.exists()
    assert "/dev/nvidia0" in host.nodes_of(GPUS[0])
    (host.run / "nvidia.yaml").unlink()
    assert host.specs.ensure(GPUS[:2]).change is SpecChange.WRITTEN


def test_the_spec_follows_gpus_and_control_nodes(host: Host) -> None:
    """A GPU that came, another minor number, a node that the first user of a GPU made."""
    host.specs.ensure(GPUS[:1])
    assert host.specs.ensure(GPUS[:2]).change is SpecChange.WRITTEN
    assert host.specs.ensure([GPUS[0], replace(GPUS[1], minor=9)]).change is SpecChange.WRITTEN
    assert "/dev/nvidia9" in host.nodes_of(GPUS[1])
    host.control = ("/dev/nvidiactl", "/dev/nvidia-uvm")
    assert host.specs.ensure(GPUS[:2]).change is SpecChange.WRITTEN
    assert "/dev/nvidia-uvm" in host.nodes_of(GPUS[0])


def test_no_gpus_for_a_moment_take_no_names(host: Host) -> None:
    """A driver that does not answer is no reason that a container cannot restart."""
    host.specs.ensure(GPUS)
    assert host.specs.ensure([]).change is SpecChange.NONE
    assert host.own_names() == ["GPU-0", "GPU-1", "GPU-2"]


def test_two_others_in_one_directory_are_reported_once(host: Host) -> None:
    """The GPU has no name then, and ours would not help; the log reports it once."""
    write_spec(host.etc / "a.json", "GPU-0")
    write_spec(host.etc / "b.json", "GPU-0")
    (host.etc / "c.json").write_text("{")
    with capture_logs() as logs:
        state = host.specs.ensure(GPUS[:2])
        host.specs.ensure(GPUS[:2])
    assert state.unnamed == ("GPU-0",)
    [failure], [passed_over] = state.troubles, state.passed_over
    assert "a.json and " in failure and "Remove all but one" in failure
    assert "c.json: is no JSON" in passed_over
    reported = [entry["detail"] for entry in logs if entry["event"] == "cdi_spec_problem"]
    assert reported == [failure, passed_over]
    assert host.own_names() == ["GPU-1"]
    with pytest.raises(Rejected):
        host.nodes_of(GPUS[0])
    (host.etc / "b.json").unlink()
    assert host.specs.ensure(GPUS[:2]).unnamed == ()
    assert "/dev/nvidia0" in host.nodes_of(GPUS[0])


def test_what_the_host_lacks_is_reported_once(host: Host) -> None:
    """The spec leaves it out, so that containers start; where others name the GPUs it does not matter."""
    host.absent = ("/dev/nvidia-uvm",)
    with capture_logs() as logs:
        assert host.specs.ensure(GPUS[:2]).left_out == ("/dev/nvidia-uvm: not on this host",)
        host.specs.ensure(GPUS[:2])
        (host.run / "nvidia.yaml").write_bytes(NVIDIA_CTK)
        assert host.specs.ensure(GPUS[:2]).left_out == ()
    assert [entry["event"] for entry in logs].count("cdi_spec_problem") == 1


def test_a_gpu_of_which_only_the_uuid_is_known_has_no_name(host: Host) -> None:
    """It is reported, and the others are named."""
    state = host.specs.ensure([GPUS[0], replace(GPUS[1], minor=-1)])
    assert state.unnamed == ("GPU-1",) and "minor number" in state.troubles[0]
    assert host.own_names() == ["GPU-0"]
