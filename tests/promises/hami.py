"""HAMi 4707fb0 (Project-HAMi/HAMi): its NVIDIA device plugin, webhook and scheduler."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept, not_kept

_POD = "tests/extender/test_vgpu_names.py"
_FLAGS = "tests/settings/test_gpushare_flags.py"
_REFUSED = f"{_POD}::test_what_cannot_be_said_here_is_refused_with_what_to_write"
_BECOMES = f"{_POD}::test_a_request_becomes_cores_and_blocks"

PROMISES: Promises = {
    "Pods": (
        kept(
            "examples/nvidia/default_use.yaml",
            "`nvidia.com/gpu: 1`, `gpumem: 3000`, `gpucores: 30`",
            "tests/e2e/test_former_names.py::test_a_pod_with_hamis_names_gets_its_share",
            "`vcuda-core: 30`, `vcuda-memory: 12`: MiB become whole blocks",
        ),
        kept(
            "examples/nvidia/use_exclusive_card.yaml",
            "`nvidia.com/gpu: n` alone, or with `gpumem-percentage: 100`, or with `gpucores: 100`",
            _BECOMES,
            "n whole GPUs",
        ),
        different(
            "pkg/device/nvidia/device.go",
            "`gpumem` without `gpucores`: compute is not limited",
            "1 core, and 100 as ceiling: not limited while nobody else uses the GPU",
            f"{_POD}::test_compute_of_which_nothing_is_said_is_limited_only_where_others_use_it",
        ),
        kept("pkg/device/nvidia/device.go", "`gpumem` or `gpucores` without `nvidia.com/gpu`", _BECOMES, "of one GPU"),
        not_kept(
            "examples/nvidia/use_memory_fraction.yaml",
            "`gpumem-percentage` below 100",
            "denied: how much that is depends on the GPU. Write `gpumem`",
            _REFUSED,
        ),
        not_kept(
            "pkg/device/nvidia/device.go",
            "`nvidia.com/gpu: 2` with `gpumem`, parts of two GPUs",
            "denied: a share is of one GPU. A [ResourceClaim](share-a-gpu-by-a-claim.md) may have two",
            _REFUSED,
        ),
        not_kept(
            "examples/nvidia/specify_card_type_to_use.yaml",
            "the annotations `nvidia.com/use-gputype`, `nouse-gputype`, `use-gpuuuid`, `nouse-gpuuuid`",
            "denied: name the nodes by the label `gpushare-agent/gpu.product`",
            _REFUSED,
        ),
        not_kept(
            "pkg/device/nvidia/device.go",
            "`nvidia.com/priority`; the annotations `nvidia.com/vgpu-mode`, `numa-bind`",
            "taken off, or ignored, with a warning",
            f"{_POD}::test_what_has_no_effect_is_warned_of",
        ),
        not_kept(
            "examples/nvidia/dynamic_mig_example.yaml",
            "MIG instances made for a pod",
            "instances that are there are [resources](../explanation/nvidia.md#mig)",
        ),
        kept(
            "pkg/device-plugin/nvidiadevice/nvinternal/plugin/server.go",
            "`CUDA_DEVICE_MEMORY_LIMIT_0`, `CUDA_DEVICE_SM_LIMIT`, HAMi-core",
            "tests/isolation/test_hami_core_edits.py::test_a_share_gets_its_limits_in_the_librarys_units",
            "isolation `hami-core`; the default is this project's library",
        ),
        different(
            "charts/hami/values.yaml",
            "`CUDA_DISABLE_CONTROL=true` of a pod",
            "only where the setting `hami_core.allow_opt_out` allows it",
            "tests/isolation/test_hami_core_edits.py::test_a_container_opts_out_only_where_the_node_allows_it",
        ),
    ),
    "Nodes": (
        different(
            "charts/hami, devicePlugin.deviceSplitCount",
            "`--device-split-count`",
            "none: as many shares as cores and memory are enough for",
            f"{_FLAGS}::test_a_flag_without_effect_is_reported_once",
        ),
        different(
            "charts/hami, devicePlugin.deviceMemoryScaling",
            "`--device-memory-scaling`, `--device-cores-scaling`",
            "`hami_core.memory_scaling`, `hami_core.core_scaling` scale the limits, and not what a GPU offers",
            "tests/isolation/test_hami_core_edits.py::test_scaling_multiplies_up_to_the_gpu",
        ),
        different(
            "charts/hami, devicePlugin.disablecorelimit",
            "`--disable-core-limit`",
            "`hami_core.core_policy`, or the annotation `tencent.com/vcuda-core-limit`",
            "tests/isolation/test_hami_core_edits.py::test_the_policy_of_cores_is_handed_to_the_library",
        ),
        different(
            "pkg/device/nvidia/device.go",
            "the annotation `hami.io/device-cordon`",
            "`gpushare-agent cordon GPU`",
            "tests/gpus/test_control_server.py::test_a_gpu_is_cordoned_and_put_back",
        ),
        different(
            "README.md",
            "the label `gpu=on`",
            "`nvidia-device-enable=enable`",
            "tests/manifests/test_manifests.py::test_the_agent_runs_on_the_nodes_with_gpu_managers_label",
        ),
    ),
}
