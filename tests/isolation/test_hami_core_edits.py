"""Isolation hami-core: the numbers that its library reads, and which of them it would take for no limit at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.isolation import ISOLATIONS, GpuShare, IsolationRequest
from gpushare_agent.isolation.hami_core.edits import edit_hami_core
from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.model.allocations import ContainerEdits, ContainerKey
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.isolation import CorePolicy
from gpushare_agent.model.names import PodUid
from gpushare_agent.settings.sections import HamiCoreSettings
from tests.isolation.support_hami_core import fake_library
from tests.support_core import container, inventory, isolation_config

UID = PodUid("11111111-2222-3333-4444-555555555555")
GPUS = inventory(memory_mib=24 * 1024).gpus
HAMI = HamiCoreSettings(directory=Path("/hami"))


def request(cores: int = 30, memory_mib: int = 6144, gpus: int = 1, **changes: object) -> IsolationRequest:
    own = ("memory_scaling", "core_scaling", "core_policy", "allow_opt_out")
    config = HAMI.model_copy(update={k: changes.pop(k) for k in own if k in changes})
    made = IsolationRequest(
        pod_uid=UID,
        container=container("cuda"),
        shares=tuple(
            GpuShare(gpu=gpu, cores=cores, memory_mib=memory_mib, is_whole=cores >= 100) for gpu in GPUS[:gpus]
        ),
        config=isolation_config(hami_core=config),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def env_of(wanted: IsolationRequest) -> dict[str, str]:
    edits = edit_hami_core(wanted)
    assert isinstance(edits, ContainerEdits)
    return dict(edits.env)


def test_a_share_gets_its_limits_in_the_librarys_units() -> None:
    """MiB with an m for the one GPU it sees, percent without a sign, and where its processes meet."""
    assert env_of(request()) == {
        "CUDA_DEVICE_MEMORY_LIMIT_0": "6144m",
        "CUDA_DEVICE_SM_LIMIT": "30",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/usr/local/vgpu/cache/cuda.cache",
        "LIBCUDA_LOG_LEVEL": "1",
    }


def test_only_its_own_cache_is_writable() -> None:
    """Library and preload file are the same for all; the cache is a file below the pod's and the container's names."""
    edits = edit_hami_core(request())
    assert isinstance(edits, ContainerEdits)
    assert {(m.host_path, m.container_path, m.read_only) for m in edits.mounts} == {
        ("/hami/libvgpu.so", "/usr/local/vgpu/libvgpu.so", True),
        ("/hami/ld.so.preload", "/etc/ld.so.preload", True),
        (f"/hami/containers/{UID}/cuda/cuda.cache", "/usr/local/vgpu/cache/cuda.cache", False),
    }
    assert (edits.devices, edits.annotations, edits.cdi_devices) == ((), (), ())


def test_the_mounts_name_the_files_that_the_adapter_makes(short_dir: Path) -> None:
    """Two places name library, preload file and cache; they must agree."""
    files = HamiCoreFiles(fake_library(short_dir / "source.so"), short_dir / "hami")
    files.install()
    files.prepare(ContainerKey(UID, "cuda"))
    wanted = request()
    config = isolation_config(hami_core=HAMI.model_copy(update={"directory": files.directory}))
    edits = edit_hami_core(replace(wanted, config=config))
    assert isinstance(edits, ContainerEdits)
    assert len(edits.mounts) == 3 and all(Path(mount.host_path).is_file() for mount in edits.mounts)


@pytest.mark.parametrize("policy", ["force", "disable"])
def test_the_policy_of_cores_is_handed_to_the_library(policy: CorePolicy) -> None:
    """The default is the library's own, and sets nothing."""
    assert env_of(request(core_policy=policy))["GPU_CORE_UTILIZATION_POLICY"] == policy
    assert "GPU_CORE_UTILIZATION_POLICY" not in env_of(request())


@pytest.mark.parametrize(
    "variable",
    [
        "CUDA_DEVICE_MEMORY_LIMIT_0=80g",
        "CUDA_DEVICE_SM_LIMIT=100",
        "CUDA_DEVICE_SM_LIMIT_0=100",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE=/tmp/mine",
        "GPU_CORE_UTILIZATION_POLICY=Disable",
        "CUDA_REDIRECT=libcuda.so.1",
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_VISIBLE_DEVICES=",
    ],
)
def test_a_spec_that_would_lift_a_limit_is_refused(variable: str) -> None:
    """The kubelet appends the spec's variables to the agent's, so they win."""
    name, _, value = variable.partition("=")
    refused = edit_hami_core(request(container=replace(container("cuda"), env={name: value})))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.INVALID_REQUEST
    assert name in refused.detail and "Remove the variable" in refused.detail


def test_a_spec_may_tighten_what_the_agent_leaves_open() -> None:
    """HAMi's own users write GPU_CORE_UTILIZATION_POLICY=force; where GPUs come by CDI NVIDIA's runtime may be sent away."""
    for env in ({"GPU_CORE_UTILIZATION_POLICY": "force"}, {"NVIDIA_VISIBLE_DEVICES": "void"}):
        assert env_of(request(container=replace(container("cuda"), env=env))) == env_of(request())


@pytest.mark.parametrize("value", ["true", "1", "T"])
def test_a_container_opts_out_only_where_the_node_allows_it(value: str) -> None:
    """Then it has neither library nor limits; else the variable changes nothing."""
    asks = replace(container("cuda"), env={"CUDA_DISABLE_CONTROL": value})
    assert edit_hami_core(request(container=asks, allow_opt_out=True)) == ContainerEdits()
    assert env_of(request(container=asks)) == env_of(request())
    no = replace(container("cuda"), env={"CUDA_DISABLE_CONTROL": "false"})
    assert env_of(request(container=no, allow_opt_out=True)) == env_of(request())


def test_where_opting_out_is_allowed_cores_may_be_lifted_alone() -> None:
    """Memory stays limited."""
    asks = replace(container("cuda"), env={"GPU_CORE_UTILIZATION_POLICY": "disable"})
    assert "CUDA_DEVICE_MEMORY_LIMIT_0" in env_of(request(container=asks, allow_opt_out=True))


@pytest.mark.parametrize("gpus", [1, 2])
def test_whole_gpus_get_neither_library_nor_limits(gpus: int) -> None:
    """What is nobody else's needs no guard, whatever the scaling."""
    assert edit_hami_core(request(100 * gpus, 0, gpus, memory_scaling=2.0)) == ContainerEdits()


def test_an_elastic_ceiling_raises_the_limit_and_never_lowers_it() -> None:
    """The library knows one number: the ceiling, or the scaled share where that is higher."""
    assert env_of(request(30, core_limit=60))["CUDA_DEVICE_SM_LIMIT"] == "60"
    assert env_of(request(30, core_limit=60, core_scaling=3.0))["CUDA_DEVICE_SM_LIMIT"] == "90"
    assert env_of(request(30, core_limit=60, memory_scaling=2.0))["CUDA_DEVICE_MEMORY_LIMIT_0"] == "12288m"


@pytest.mark.parametrize(
    ("scaling", "mib", "percent"), [(1.0, "6144m", "30"), (1.5, "9216m", "45"), (16.0, "24576m", "100")]
)
def test_scaling_multiplies_up_to_the_gpu(scaling: float, mib: str, percent: str) -> None:
    """No container gets a limit above the GPU's memory."""
    found = env_of(request(memory_scaling=scaling, core_scaling=scaling))
    assert (found["CUDA_DEVICE_MEMORY_LIMIT_0"], found["CUDA_DEVICE_SM_LIMIT"]) == (mib, percent)


@pytest.mark.parametrize(
    "wanted", [request(30, 0), request(0, 6144), request(30, 6144, 0), request(30, 0, memory_scaling=16.0)]
)
def test_a_limit_of_zero_is_refused(wanted: IsolationRequest) -> None:
    """The library takes it for no limit: the share would be the whole GPU."""
    refused = edit_hami_core(wanted)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.INVALID_REQUEST
    assert "no limit" in refused.detail and "container cuda" in refused.detail and "at least one" in refused.detail


@given(
    cores=st.integers(1, 99),
    memory_mib=st.integers(1, 24 * 1024),
    memory_scaling=st.floats(1, 16),
    core_scaling=st.floats(1, 100),
    core_limit=st.integers(0, 100),
)
def test_every_limit_is_a_number_that_the_library_reads_as_one(
    cores: int, memory_mib: int, memory_scaling: float, core_scaling: float, core_limit: int
) -> None:
    """Digits without a leading zero (which it would read as octal), at least the share, at most the GPU."""
    found = env_of(
        request(cores, memory_mib, memory_scaling=memory_scaling, core_scaling=core_scaling, core_limit=core_limit)
    )
    memory, percent = found["CUDA_DEVICE_MEMORY_LIMIT_0"], found["CUDA_DEVICE_SM_LIMIT"]
    assert memory.endswith("m") and str(int(memory[:-1])) == memory[:-1] and str(int(percent)) == percent
    assert memory_mib <= int(memory[:-1]) <= 24 * 1024
    assert cores <= int(percent) <= 100


def test_it_is_registered_under_its_name() -> None:
    """With the preparation that the services make."""
    assert ISOLATIONS["hami-core"].edit is edit_hami_core


@pytest.mark.parametrize("path", ["/usr/local/vgpu", "/usr/local/vgpu/cache/cuda.cache", "/etc/ld.so.preload", "/usr"])
def test_a_volume_over_the_librarys_files_is_refused(path: str) -> None:
    refused = edit_hami_core(request(container=replace(container("cuda"), mounts=(path,))))
    assert isinstance(refused, Refused) and f"mounts a volume at {path}, by which" in refused.detail
    assert isinstance(edit_hami_core(request(container=replace(container("cuda"), mounts=("/data",)))), ContainerEdits)
