"""HAMi 4707fb0 (Project-HAMi/HAMi): its NVIDIA device plugin, webhook and scheduler."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept, not_kept

_POD = "tests/extender/test_vgpu_names.py"
_FLAGS = "tests/settings/test_gpushare_flags.py"
_CHOICE = "tests/placement/test_gpu_choice.py::test_a_gpu_is_accepted_as_by_hami_and_vgpu_manager"
_REFUSED = f"{_POD}::test_what_cannot_be_said_here_is_refused_with_what_to_write"
_BECOMES = f"{_POD}::test_a_request_becomes_cores_and_blocks"
_WARNED = f"{_POD}::test_an_annotation_that_chooses_no_gpu_is_warned_of"
_SERIES = "tests/observability/test_metrics_node.py"

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
        kept(
            "examples/nvidia/specify_card_type_to_use.yaml, specify_card_type_not_use.yaml",
            "the annotations `nvidia.com/use-gputype`, `nouse-gputype`",
            _CHOICE,
        ),
        different(
            "examples/nvidia/specify_uuid_to_use.yaml, specify_uuid_not_use.yaml",
            "the annotations `nvidia.com/use-gpuuuid`, `nouse-gpuuuid`",
            "a part of a UUID, or small letters, name it too",
            _CHOICE,
        ),
        different(
            "pkg/device/devices.go, CheckType",
            "the filter knows the choice of GPUs",
            "the extender and the agents do; without the extender a pod may be refused on its node",
            "tests/extender/test_cluster_state.py::test_a_gpu_that_the_pods_annotations_leave_out_is_not_chosen",
        ),
        not_kept(
            "pkg/device/devices.go, CheckUUID",
            "a choice of GPUs by annotation, where `claims-webhook` makes claims of limits",
            "denied: ask by a [ResourceClaim](share-a-gpu-by-a-claim.md) with a selector on `uuid` or `productName`",
            "tests/extender/test_vgpu_names.py::test_a_choice_of_gpus_stays_on_the_pod",
        ),
        not_kept(
            "examples/nvidia/specify_scheduling_policy.yaml",
            "the annotations `hami.io/node-scheduler-policy`, `gpu-scheduler-policy`",
            "ignored with a warning: `extender.node_policy` and `placement.share_policy` are for all pods",
            _WARNED,
        ),
        kept(
            "charts/hami, admissionWebhook.objectSelector",
            "the label `hami.io/webhook: ignore` of a pod",
            "tests/manifests/test_extender.py::test_pods_that_the_former_webhooks_leave_alone_are_left_alone",
        ),
        kept(
            "develop/initContainer-design.md",
            "init containers with HAMi's names",
            f"{_POD}::test_init_containers_and_those_that_ask_for_nothing",
        ),
        kept(
            "examples/nvidia/mig_example.yaml",
            "`nvidia.com/mig-<profile>`",
            "tests/admission/test_units.py::test_mig_instances_are_units_of_their_own_names_with_strategy_mixed",
            "the same, with the component `nvidia` and `nvidia.mig_strategy: mixed`",
        ),
        kept(
            "pkg/device/nvidia/device.go",
            "`gpucores` above 100: never scheduled",
            _REFUSED,
            "denied at once",
        ),
        different(
            "pkg/device/nvidia/device.go",
            "a ResourceQuota of `nvidia.com/gpumem` or `gpucores`",
            "of `requests.tencent.com/vcuda-memory` and `vcuda-core`: the API server counts the pod as it was changed",
            _BECOMES,
        ),
        not_kept(
            "pkg/scheduler/webhook.go",
            "`schedulerName` is set to `hami-scheduler`",
            "it stays; take it out where you wrote it yourself",
        ),
        not_kept(
            "charts/hami, devicePlugin.runtimeClassName",
            "`runtimeClassName` is set by the webhook",
            "write it, or give GPUs by CDI (`device_list_strategy`)",
        ),
        not_kept(
            "charts/hami, scheduler.overwriteEnv",
            "`NVIDIA_VISIBLE_DEVICES=none` for pods without GPUs",
            "in NVIDIA's runtime set `accept-nvidia-visible-devices-envvar-when-unprivileged = false`",
        ),
        not_kept(
            "charts/hami, scheduler.defaultGPUNum",
            "`defaultMemory`, `defaultCores`, `defaultGPUNum`",
            "what is not named is as HAMi's defaults have it: all memory, no cores, one GPU",
            _BECOMES,
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
        different(
            "develop/protocol.md",
            "the annotations `hami.io/vgpu-node`, `vgpu-devices-allocated`, `bind-phase`",
            "`tencent.com/predicate-node`, `predicate-gpu-idx-<i>`, `gpu-assigned`",
            "tests/cluster/test_pod_annotations.py::test_an_assignment_is_patched",
        ),
        not_kept(
            "charts/hami, devices.nvidia.gpuCorePolicy",
            "the variables `GPU_CORE_UTILIZATION_POLICY`, `LIBCUDA_LOG_LEVEL`, `CUDA_DISABLE_CONTROL` of a pod",
            "HAMi-core is not used: this project's library reads no variable",
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
            "none: limits are not scaled",
            f"{_FLAGS}::test_a_flag_without_effect_is_reported_once",
        ),
        different(
            "charts/hami, devicePlugin.disablecorelimit",
            "`--disable-core-limit`",
            "the annotation `tencent.com/vcuda-core-limit` of a pod",
            f"{_FLAGS}::test_a_flag_without_effect_is_reported_once",
        ),
        different(
            "pkg/device/nvidia/device.go",
            "the annotation `hami.io/device-cordon`",
            "`gpushare-agent cordon GPU`",
            "tests/gpus/test_control_server.py::test_a_gpu_is_cordoned_and_put_back",
        ),
        kept(
            "README.md",
            "the label `gpu=on`",
            "tests/manifests/test_chart.py::test_nodes_may_be_chosen_by_the_label_that_another_program_gave_them",
            'Helm: `nodeSelector: {nvidia-device-enable: null, gpu: "on"}`; else `nvidia-device-enable=enable`',
        ),
        different(
            "charts/hami, devicePlugin.nodeConfiguration",
            "`nodeconfig` by the node's name",
            "[configurations](configure-single-nodes.md) by a label of the node",
            "tests/agent/test_node_configuration_node.py::"
            "test_the_nodes_label_and_the_files_change_the_settings_without_a_new_registration",
        ),
        different(
            "charts/hami, nodeConfiguration, filterdevices",
            "GPUs that are not offered",
            "`excluded_gpus`: indexes, UUIDs or models",
            "tests/agent/test_nvidia_node.py::test_an_excluded_gpu_is_offered_to_nobody",
        ),
        different(
            "charts/hami, nodeConfiguration, operatingmode",
            "`hami-core`, `mps`, `mig`",
            "isolation `gpushare` or `mps`; `nvidia.mig_strategy`",
            "tests/agent/test_isolations_inside.py::test_a_pod_may_choose_among_the_isolations_that_the_node_allows",
        ),
        kept(
            "charts/hami, devicePlugin.enableNumaTopology",
            "each device's NUMA node for the topology manager",
            "tests/kubelet/test_device_table.py::test_vcore_ids_are_a_hundred_per_gpu_in_order_of_index",
            "always",
        ),
        not_kept(
            "charts/hami, devicePlugin.preConfiguredDeviceMemory",
            "a memory size other than the driver's",
            "the driver's counts",
        ),
        kept(
            "charts/hami, devicePlugin.migStrategy, deviceListStrategy, passDeviceSpecsEnabled",
            "the flags that are those of NVIDIA's plugin",
            "tests/settings/test_nvidia_plugin.py::test_a_flag_beats_a_variable_and_a_variable_the_file",
            "as [from NVIDIA's plugin](migrate-from-nvidia.md)",
        ),
        different(
            "develop/protocol.md",
            "the annotation `hami.io/node-nvidia-register`",
            "`gpushare-agent/cards`, and in `gpushare-agent/held` what is allocated",
            "tests/cluster/test_node_labels.py::test_the_annotation_tells_each_gpu_with_its_links_in_the_lists_order",
        ),
        different(
            "develop/protocol.md",
            "a node that has not registered for five minutes is unavailable",
            "the kubelet's allocatable is what can be given",
            "tests/extender/test_objects.py::test_the_gpus_of_a_node_that_offers_nothing_now_take_no_pod",
        ),
    ),
    "Scheduling and metrics": (
        different(
            "charts/hami, scheduler.defaultSchedulerPolicy",
            "GPUs by `spread`, nodes by `binpack`",
            "both by `binpack`; `placement.share_policy: spread`",
            "tests/placement/test_placement.py::test_spread_takes_the_emptiest_gpu",
        ),
        different(
            "charts/hami, scheduler.nodeLockExpire",
            "one pod at a time on a node, by a lock",
            "as many as come: the extender reserves, and the agent asks the kubelet",
            "tests/agent/test_extender_nodes.py::"
            "test_five_hundred_pods_on_twenty_nodes_of_mixed_gpus_are_never_rejected_and_land_where_planned",
        ),
        different(
            "charts/hami, scheduler.leaderElect",
            "one scheduler leads",
            "one extender does; kube-scheduler stays your own",
            "tests/extender/test_app.py::test_the_other_replica_takes_over_what_a_killed_one_had_bound",
        ),
        different(
            "cmd/vGPUmonitor/metrics.go",
            "`hami_vgpu_memory_used_bytes`, `hami_vgpu_memory_limit_bytes`, `hami_container_device_utilization_ratio`",
            "`gpushare_container_memory_used_bytes`, `gpushare_container_memory_limit_bytes`,"
            " `gpushare_container_sm_utilization_ratio` (0 to 1)",
            f"{_SERIES}::test_our_series_of_a_container_are_in_base_units_for_each_gpu",
        ),
        different(
            "cmd/vGPUmonitor/metrics.go",
            "`hami_host_gpu_memory_used_bytes`, `hami_host_gpu_utilization_ratio`",
            "`gpushare_card_memory_used_bytes`, `gpushare_card_sm_utilization_ratio` (0 to 1)",
            f"{_SERIES}::test_every_sample_of_a_gpu_has_its_series",
        ),
        different(
            "cmd/scheduler/metrics.go",
            "`hami_gpu_memory_allocated_bytes`, `hami_gpu_core_allocated_ratio`",
            "`gpushare_card_memory_allocated_bytes`, `gpushare_card_cores_allocated_ratio`",
            f"{_SERIES}::test_what_is_given_of_a_gpu_is_shown_from_the_allocation_on",
        ),
        different(
            "README.md",
            "metrics on port 31993 of the scheduler and 31992 of a node",
            "`/metrics` on port 5678 of each node's agent",
            "tests/observability/test_server.py::test_metrics_are_served_under_both_names",
        ),
    ),
}
