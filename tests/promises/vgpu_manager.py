"""vgpu-manager 3d7f66d (coldzerofear/vgpu-manager): its device plugin, webhook and scheduler."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept, not_kept

_POD = "tests/extender/test_vgpu_names.py"
_CHOICE = "tests/placement/test_gpu_choice.py::test_a_gpu_is_accepted_as_by_hami_and_vgpu_manager"
_REFUSED = f"{_POD}::test_what_cannot_be_said_here_is_refused_with_what_to_write"
_WARNED = f"{_POD}::test_an_annotation_that_chooses_no_gpu_is_warned_of"
_FLAGS = "tests/settings/test_gpushare_flags.py"

PROMISES: Promises = {
    "Pods": (
        kept(
            "README.md",
            "`nvidia.com/vgpu-number: 1`, `vgpu-cores: 10`, `vgpu-memory: 1024`",
            f"{_POD}::test_a_request_becomes_cores_and_blocks",
            "`vcuda-core: 10`, `vcuda-memory: 4`: MiB become whole blocks",
        ),
        different(
            "pkg/device/allocator/allocator.go",
            "`vgpu-memory` without `vgpu-cores`: compute is not limited",
            "1 core, and 100 as ceiling: not limited while nobody else uses the GPU",
            f"{_POD}::test_compute_of_which_nothing_is_said_is_limited_only_where_others_use_it",
        ),
        not_kept(
            "README.md",
            "`vgpu-number: 2` with cores or memory, parts of two GPUs",
            "denied: a share is of one GPU. A [ResourceClaim](share-a-gpu-by-a-claim.md) may have two",
            _REFUSED,
        ),
        kept(
            "pkg/webhook/pod/mutate",
            "`vgpu-cores` or `vgpu-memory` without `vgpu-number`",
            f"{_POD}::test_a_request_becomes_cores_and_blocks",
            "of one GPU",
        ),
        kept(
            "README.md",
            "`vgpu-number: n` alone",
            f"{_POD}::test_a_request_becomes_cores_and_blocks",
            "n whole GPUs",
        ),
        kept(
            "README.md, Device TYPE",
            "the annotations `nvidia.com/include-gpu-type`, `exclude-gpu-type`",
            _CHOICE,
        ),
        kept(
            "README.md, Device UUID",
            "the annotations `nvidia.com/include-gpu-uuid`, `exclude-gpu-uuid`",
            _CHOICE,
        ),
        kept(
            "README.md, Compute Policy",
            "`nvidia.com/vgpu-compute-policy` of a pod: `fixed`, `balance`, `none`",
            f"{_POD}::test_a_compute_policy_is_the_pods_ceiling",
            "`balance` and `none` are `tencent.com/vcuda-core-limit: 100`",
        ),
        not_kept(
            "README.md, Compute Policy",
            "`nvidia.com/vgpu-compute-policy` of a node",
            "write it into the pods",
        ),
        not_kept(
            "README.md, Scheduling Policy",
            "`nvidia.com/node-scheduler-policy`, `device-scheduler-policy`",
            "ignored with a warning: `extender.node_policy` and `placement.share_policy` are for all pods",
            _WARNED,
        ),
        not_kept(
            "how_to_use_gpu_topology.md",
            "`nvidia.com/device-topology-mode`, `cross-pod-topology`, `memory-scheduler-policy`",
            "ignored with a warning: links are followed always, and memory is that which is there",
            _WARNED,
        ),
        kept(
            "charts/vgpu-manager, webhook",
            "the label `vgpu-manager.io/ignore-webhook: true` of a pod",
            "tests/manifests/test_extender.py::test_pods_that_the_former_webhooks_leave_alone_are_left_alone",
        ),
        different(
            "how_to_use_vgpu_resource_quota.md",
            "a ResourceQuota of `requests.nvidia.com/vgpu-number`",
            "of `requests.tencent.com/vcuda-core`: the API server counts the pod as it was changed",
            f"{_POD}::test_a_request_becomes_cores_and_blocks",
        ),
        not_kept(
            "README.md",
            "`schedulerName: vgpu-scheduler`",
            "take it out: kube-scheduler asks the extender",
        ),
        kept(
            "README.md",
            "`nvidia-smi` in the container shows the share",
            "tests/gpushare/test_memory.py::test_nvml_shows_the_share",
        ),
        kept(
            "how_to_use_DRA_driver.md",
            "shares by ResourceClaims",
            "tests/e2e/test_claims.py::test_shares_and_whole_gpus",
            "[by claims of this driver](share-a-gpu-by-a-claim.md), DeviceClass `gpu.gpushare-agent`",
        ),
        not_kept(
            "how_to_use_gpu_virtual_memory.md", "virtual memory beyond the limit", "an allocation beyond it fails"
        ),
    ),
    "Nodes": (
        kept(
            "README.md",
            "the label `vgpu-manager=device-plugin`",
            "tests/manifests/test_chart.py::test_nodes_may_be_chosen_by_the_label_that_another_program_gave_them",
            "Helm: `nodeSelector: {nvidia-device-enable: null, vgpu-manager: device-plugin}`; else"
            " `nvidia-device-enable=enable`",
        ),
        kept(
            "cmd/device-plugin/options",
            "`--exclude-devices`, also with ranges",
            f"{_FLAGS}::test_vgpu_managers_excluded_devices_are_the_setting",
            "it is `excluded_gpus`",
        ),
        different(
            "cmd/device-plugin/options",
            "`--device-split-count`, `--device-cores-scaling`, `--device-memory-factor`, `--open-kernel-modules`,"
            " `--feature-gates`, `--domain`",
            "accepted, and reported once with the reason",
            f"{_FLAGS}::test_a_flag_without_effect_is_reported_once",
        ),
        not_kept(
            "how_to_use_deviceplugin_nodeconfig.md",
            "`--node-config-path`, a file for all nodes",
            "refused: [configurations](configure-single-nodes.md) by a label of the node",
            f"{_FLAGS}::test_a_mistake_leads_to_the_right_setting",
        ),
        different(
            "README.md",
            "pods whose allocation failed are deleted",
            "the oldest are: the newest of each controller stay, to be read",
            "tests/cluster/test_rejected_pods.py::test_the_newest_of_each_controller_stay",
        ),
    ),
}
