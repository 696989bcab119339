"""What a container with GPUs gets, by the names of docs/reference/formats.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy, edits_for
from gpushare_agent.agent.delivery.device_lists import NodeDevices
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import ISOLATION_ANNOTATION
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.core.settings.sections import DriverVolumeSettings, RuntimeSettings
from tests.support_core import NAMES, container, inventory, isolation_config, pod

GPUS = tuple(replace(gpu, minor=gpu.index + 4) for gpu in inventory().gpus)
POLICY = EditPolicy(names=NAMES, config=isolation_config(), isolation="none")


def edits_of(wanted: ContainerSpec, gpus: int = 1, policy: EditPolicy = POLICY, **annotations: str) -> ContainerEdits:
    found = edits_for(pod("a", wanted, annotations=annotations), wanted, GPUS[:gpus], policy)
    assert isinstance(found, ContainerEdits)
    return found


def test_gpushares_variable_has_nvmls_index_and_the_gpu_is_named_by_uuid() -> None:
    """Not the minor number, which GPUShare's plugin takes: its extender counts GPUs from 0, as NVML does, and NVIDIA's
    runtime reads numbers as NVML's."""
    names = replace(NAMES, gpu_mem="aliyun.com/gpu-mem")
    wanted = ContainerSpec(name="main", kind=ContainerKind.MAIN, position=0, requests={names.gpu_mem: 6})
    env = dict(edits_of(wanted, policy=replace(POLICY, names=names)).env)
    assert (GPUS[0].index, GPUS[0].minor) == (0, 4)
    assert (env["ALIYUN_COM_GPU_MEM_IDX"], env["NVIDIA_VISIBLE_DEVICES"]) == ("0", "GPU-0")


def test_the_search_path_is_set_where_the_driver_directory_is_mounted_and_nowhere_else() -> None:
    """It takes the place of the image's own. 32-bit programs, requested by the variable compat32, get theirs too."""
    config = isolation_config(shared_driver=Path("/vdriver/nvidia"))
    vcuda = replace(POLICY, config=config, isolation="vcuda")
    share = container(cores=30, blocks=1)
    assert dict(edits_of(share, 1, vcuda).env)["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    both = edits_of(replace(share, env={"compat32": "true"}), 1, vcuda)
    assert dict(both.env)["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64:/usr/local/nvidia/lib"
    without = replace(vcuda, config=replace(config, shared_driver=None))
    assert "LD_LIBRARY_PATH" not in dict(edits_of(share, 1, without).env)
    assert "LD_LIBRARY_PATH" not in dict(edits_of(share, 1, replace(vcuda, isolation="none")).env)


def test_the_driver_is_mounted_under_every_isolation_where_the_setting_says_so() -> None:
    """For pods without an NVIDIA runtime, as gpu-manager's are; vcuda has its own choice of the two directories."""
    config = isolation_config(whole_driver=Path("/vdriver/origin"), driver_volume=DriverVolumeSettings(mount=True))
    share, policy = container(cores=30, blocks=1), replace(POLICY, config=config)
    for name in ("none", "gpushare"):
        edits = edits_of(share, 1, replace(policy, isolation=name))
        assert dict(edits.env)["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
        assert {m.host_path for m in edits.mounts if m.container_path == "/usr/local/nvidia"} == {"/vdriver/origin"}
    assert "LD_LIBRARY_PATH" not in dict(edits_of(share, 1, replace(policy, isolation="vcuda")).env)


def test_simulated_gpus_have_no_device_nodes_on_a_real_node() -> None:
    """A container that names a device node which does not exist cannot start; the annotation still names the GPU."""
    edits = edits_of(container(cores=30, blocks=1), 1, replace(POLICY, devices=NodeDevices(has_gpu_nodes=False)))
    assert edits.devices == () and dict(edits.annotations)["tencent.com/vcuda-device"] == "/dev/nvidia4"


def test_a_pod_may_choose_an_isolation_that_the_node_allows() -> None:
    """And is refused, with the names that it may choose, where it names another."""
    wanted = container(cores=30, blocks=1)
    policy = replace(POLICY, isolation="vcuda", allowed=("none",))
    assert edits_of(wanted, 1, policy).mounts
    assert not edits_of(wanted, 1, policy, **{ISOLATION_ANNOTATION: "none"}).mounts
    for text in ("mps", "VCUDA", "", "x" * 5000, "none\nnone"):
        owner = pod("a", wanted, annotations={ISOLATION_ANNOTATION: text})
        refused = edits_for(owner, wanted, GPUS[:1], policy)
        assert isinstance(refused, Refused) and refused.reason is RefusalReason.INVALID_REQUEST
        assert "none, vcuda" in refused.detail and len(refused.detail) < 400


@pytest.mark.parametrize(
    ("runtime_class", "handlers", "is_refused"),
    [
        ("", {}, False),
        ("nvidia", {"nvidia": "nvidia"}, False),
        ("secure", {"secure": "runsc"}, True),
        ("secure", {"secure": "kata-qemu"}, True),
        ("gvisor", {"gvisor": "runc"}, False),
        ("gvisor", {}, True),
        ("secure", {}, False),
        ("katana", {}, False),
    ],
)
@pytest.mark.parametrize("isolation", ["gpushare", "vcuda", "mps", "driver", "none"])
def test_a_share_that_is_limited_is_not_given_to_a_sandbox(
    runtime_class: str, handlers: dict[str, str], isolation: str, *, is_refused: bool
) -> None:
    """By the handler of the pod's RuntimeClass, by the class's name where the handler is not known. Isolation none limits
    nothing anywhere, and whole GPUs are not limited."""
    policy = replace(POLICY, isolation=isolation, handlers=handlers)

    def outcome(wanted: ContainerSpec, policy: EditPolicy) -> ContainerEdits | Refused:
        return edits_for(pod("a", wanted, runtime_class=runtime_class), wanted, GPUS[:1], policy)

    found = outcome(container(cores=30, blocks=10), policy)
    assert isinstance(found, Refused) is (is_refused and isolation != "none")
    if isinstance(found, Refused):
        assert found.reason is RefusalReason.INVALID_REQUEST
        assert f"handler {handlers.get(runtime_class, runtime_class)}, " in found.detail
        assert "runtime.sandboxed_handlers" in found.detail and "ask for whole GPUs" in found.detail
    assert isinstance(outcome(container(cores=100), policy), ContainerEdits)
    of_others = isolation_config(runtime=RuntimeSettings(sandboxed_handlers=()))
    assert isinstance(outcome(container(cores=30, blocks=10), replace(policy, config=of_others)), ContainerEdits)
