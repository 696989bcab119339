"""GPUShare: gpushare-device-plugin 45fb8b8, gpushare-scheduler-extender c0b6141 (AliyunContainerService), and a document
on the device plugin with MPS."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept, not_kept

_FLAGS = "tests/settings/test_gpushare_flags.py"
_AGENT = "tests/agent/test_gpushare.py"
_ON_A_CLUSTER = "tests/e2e/test_former_names.py::test_gpushares_demo_runs_on_a_node_with_its_label"

PROMISES: Promises = {
    "Command line": (
        kept(
            "device-plugin-ds.yaml",
            "`gpushare-device-plugin-v2`, the program",
            f"{_FLAGS}::test_gpushares_program_is_the_command_run",
            "the same: `gpushare-agent run`, with the settings for its DaemonSet (below)",
        ),
        kept(
            "cmd/nvidia/main.go",
            "`-logtostderr`, `--v=5`, `--memory-unit=GiB`",
            f"{_FLAGS}::test_the_command_line_of_the_daemonset_serves_gpu_mem",
            "the same: `--memory-unit` turns `gpushare.enabled` on",
        ),
        different(
            "cmd/nvidia/main.go",
            "another `--memory-unit`, which is read as GiB",
            "a mistake that ends the start",
            f"{_FLAGS}::test_the_unit_is_one_of_two",
        ),
        kept(
            "document on MPS",
            "`--mps-pipe=/root/nvidia-mps` alone",
            f"{_FLAGS}::test_the_pipe_directory_alone_switches_mps_on",
            "isolation `mps`, unless a setting names another",
        ),
        kept("cmd/nvidia/main.go", "`--mps`", f"{_FLAGS}::test_mps_is_an_isolation", "isolation `mps`"),
        different(
            "cmd/nvidia/main.go",
            "`--health-check`, `--query-kubelet`, `--kubelet-address`, `--kubelet-port`, `--client-cert`, `--client-key`,"
            " `--token`, `--timeout`",
            "taken, and reported once with the reason: GPUs are always watched, and pods read from the kubelet's sockets",
            f"{_FLAGS}::test_a_flag_without_effect_is_reported_once",
        ),
        kept(
            "pkg/gpu/nvidia/podmanager.go",
            "`NODE_NAME`",
            "tests/settings/test_settings.py::test_the_node_name_is_the_flag_else_node_name_else_the_host",
        ),
        different(
            "pkg/gpu/nvidia/podmanager.go",
            "`KUBECONFIG` goes before the pod's own account",
            "after it; `--kubeconfig` goes before it",
            "tests/cluster/test_kube_client.py::test_the_explicit_kubeconfig_comes_first",
        ),
        different(
            "pkg/gpu/nvidia/gpumanager.go",
            "without NVML, or without GPUs, it waits for ever",
            "it ends with the reason; with `fail_on_init_error: false` it waits, and takes up GPUs that come",
            "tests/agent/test_faults_gpus.py::test_without_a_driver_the_agent_ends_with_the_reason",
        ),
        kept(
            "pkg/gpu/nvidia/gpumanager.go",
            "a new kubelet socket is registered with again",
            "tests/kubelet/test_registration.py::test_a_restarted_kubelet_is_registered_with_again",
        ),
        kept(
            "pkg/gpu/nvidia/gpumanager.go",
            "SIGHUP starts it anew",
            "tests/agent/test_faults_signals.py::"
            "test_sighup_takes_the_changed_settings_file_into_effect_and_a_broken_one_keeps_the_old",
            "the settings are read anew, and nothing is registered again",
        ),
        different(
            "pkg/gpu/nvidia/coredump.go",
            "SIGQUIT writes stacks to `/etc/kubernetes/go_….txt`",
            "`/debug/tasks`, and `/debug/pprof/goroutine`",
            "tests/observability/test_debug_routes.py::test_gos_profiles_are_answered_with_what_there_is",
        ),
    ),
    "Nodes": (
        kept("install.md", "the label `gpushare=true`", _ON_A_CLUSTER, "the same, with the component `gpushare`"),
        different(
            "device-plugin-ds.yaml, device-plugin-rbac.yaml",
            "its DaemonSet and account, with nothing changed but the image",
            "the same, as `apps/v1`. Without the mounts of `manifests/base` two pods that wait and ask for the same are"
            " refused, and nothing is limited; without its rights nodes have no labels or annotations. Warnings name each",
            "tests/e2e/test_gpushare_daemonset.py::test_gpushares_daemonset_serves_with_this_image",
        ),
        kept(
            "pkg/gpu/nvidia/podmanager.go",
            "`aliyun.com/gpu-count` in capacity and allocatable",
            f"{_AGENT}::test_the_nodes_capacity_tells_how_many_gpus_there_are",
        ),
        different(
            "pkg/gpu/nvidia/nvidia.go",
            "`--memory-unit=MiB` with any number of GPUs",
            "some 60,000 MiB a node, which is what the kubelet takes; else the agent does not start",
            f"{_AGENT}::test_units_of_which_there_are_too_many_end_the_start",
        ),
        different(
            "pkg/cache/nodeinfo.go",
            "the ConfigMap `unhealthy-gpu-NODE`",
            "`gpushare-agent cordon GPU`; failed GPUs are found by the driver's events",
            "tests/gpus/test_control_server.py::test_a_gpu_is_cordoned_and_put_back",
        ),
        different(
            "pkg/gpu/nvidia/nvidia.go",
            "every GPU has the units of the first",
            "those of its own memory",
            "tests/kubelet/test_device_table.py::test_gpu_mem_units_are_those_of_each_gpus_own_memory",
        ),
        different(
            "pkg/gpu/nvidia/nvidia.go",
            "device IDs `<UUID>-_-<n>`",
            "`<8 digits of the UUID>-<n>`",
            "tests/kubelet/test_device_ids.py::test_an_id_is_eight_digits_of_the_uuid_and_a_number",
        ),
        different(
            "pkg/gpu/nvidia/server.go",
            "an Unhealthy GPU is so until the plugin starts anew",
            "until three probes are passed, or it was reset",
            "tests/agent/test_health_node.py::test_xid_79_takes_the_gpu_away_and_a_reset_brings_it_back",
        ),
        different(
            "pkg/gpu/nvidia/nvidia.go",
            "an Xid without a GPU makes all of them Unhealthy",
            "none; they are polled at once",
            "tests/gpus/test_watch.py::test_an_event_of_no_gpu_makes_none_unhealthy_and_is_followed_by_a_poll",
        ),
        kept(
            "deployer/README.md",
            "nodes of the label alone, with Helm",
            "tests/manifests/test_chart.py::test_nodes_may_be_chosen_by_the_label_that_another_program_gave_them",
            '`nodeSelector: {nvidia-device-enable: null, gpushare: "true"}`',
        ),
        not_kept(
            "deployer/chart",
            "the chart gpushare-installer, which takes NVIDIA's plugin off the nodes",
            "`gpuMem.enabled` of this chart; take NVIDIA's plugin off yourself",
        ),
        not_kept(
            "pkg/gpu/nvidia/const.go",
            "the node label `cgpu.disable.isolation`",
            "cGPU is not supported; `isolation: none` for such a node",
        ),
    ),
    "Pods": (
        kept(
            "pkg/gpu/nvidia/allocate.go",
            "`ALIYUN_COM_GPU_MEM_IDX`, `_POD`, `_CONTAINER`, `_DEV`",
            f"{_AGENT}::test_a_pod_gets_memory_of_one_gpu_with_gpushares_variables_and_annotations",
        ),
        different(
            "pkg/gpu/nvidia/nvidia.go",
            "that index is the minor number, `/dev/nvidiaN`, and `NVIDIA_VISIBLE_DEVICES` the index",
            "NVML's index, as `nvidia-smi` and GPUShare's extender count, and the UUID: minor numbers may have gaps",
            "tests/admission/test_container_edits.py::test_gpushares_variable_has_nvmls_index_and_the_gpu_is_named_by_uuid",
        ),
        kept(
            "document on MPS",
            "`CUDA_MPS_PIPE_DIRECTORY` and its volume, at the host's path",
            "tests/isolation/test_mps_edits.py::test_a_share_gets_its_own_limits_the_way_to_the_daemon_and_gpushares_variables",
        ),
        kept(
            "document on MPS",
            "`CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`, 100 × memory / GPU",
            "tests/isolation/test_mps_edits.py::test_memory_alone_gives_the_same_part_of_the_compute",
            "the same, at least 1: 0 is no limit",
        ),
        different(
            "pkg/gpu/nvidia/allocate.go",
            "memory is not limited",
            "the node's isolation limits it, and compute in proportion; `isolation: none` does not",
            f"{_AGENT}::test_a_pod_gets_memory_of_one_gpu_with_gpushares_variables_and_annotations",
        ),
        different(
            "pkg/gpu/nvidia/allocate.go",
            "a pod that no GPU serves starts with `NVIDIA_VISIBLE_DEVICES=no-gpu-has-…`",
            "it is refused with the reason",
            "tests/admission/test_memory_share.py::test_a_wish_that_cannot_be_met_is_refused_with_what_is_valid",
        ),
        different(
            "pkg/cache/nodeinfo.go",
            "all containers of a pod are on one GPU",
            "each container is on one; where they are on several, `scheduler.framework.gpushare.allocation` says which, and"
            " `kubectl inspect gpushare` adds it up",
            "tests/cluster/test_annotations.py::test_gpushares_inspection_adds_up_what_the_ledger_has",
        ),
        kept(
            "pkg/gpu/nvidia/podutils.go",
            "the annotations `ALIYUN_COM_GPU_MEM_IDX`, `_ASSIGNED`, `_ASSUME_TIME`",
            "tests/cluster/test_annotations.py::test_gpushares_memory_has_gpushares_annotations_and_gpu_managers",
        ),
        different(
            "pkg/gpu/nvidia/allocate.go",
            "of pods that ask for as much the one that was bound first is taken for the one that starts",
            "the kubelet is asked whom it is for",
            "tests/admission/test_identity.py::test_two_that_fit_are_never_guessed_between",
        ),
        kept(
            "pkg/gpu/nvidia/allocate.go",
            "a node with one GPU needs no extender",
            f"{_AGENT}::test_a_pod_gets_memory_of_one_gpu_with_gpushares_variables_and_annotations",
            "no node does",
        ),
        different(
            "pkg/gpu/nvidia/podutils.go",
            "memory of init containers is not counted",
            "it is, and goes on to the containers after them",
            "tests/admission/test_memory_share.py::test_an_init_containers_units_go_on_to_the_containers_after_it",
        ),
        kept(
            "document on MPS",
            "the deployer's own MPS daemon, found by the directory",
            "tests/agent/test_mps_node.py::test_a_share_finds_the_deployers_daemon_and_its_own_limits_inside_its_process",
        ),
        different(
            "document on MPS",
            "a pod starts whether or not the daemon runs",
            "a share is refused while it does not",
            "tests/agent/test_mps_node.py::test_while_the_daemon_is_down_shares_are_refused_and_whole_gpus_go",
        ),
        kept(
            "demo/binpack-1",
            "the demo: StatefulSet, Service and Job",
            "tests/sandbox/test_gpushare_demos.py::test_the_binpack_demo_runs_on_one_gpu",
            "the same in the sandbox; a cluster wants `apps/v1`, for Kubernetes 1.16 removed `apps/v1beta1`",
        ),
        kept(
            "demo/binpack-1",
            "the demo on a cluster, with `apps/v1`",
            _ON_A_CLUSTER,
        ),
        kept(
            "samples/",
            "the samples 1 to 4",
            "tests/sandbox/test_gpushare_demos.py::test_the_samples_run_and_the_one_in_mib_waits_where_units_are_gib",
            "the same; the last asks for MiB",
        ),
    ),
    "Scheduling": (
        kept(
            "pkg/routes/routes.go",
            "`/gpushare-scheduler/filter` and `/bind`",
            "tests/extender/test_verbs.py::test_each_verb_answers_as_the_scheduler_reads_it",
            "the same, by [the extender](schedule-with-the-extender.md): another address in `urlPrefix`, and TLS",
        ),
        different(
            "config/scheduler-policy-config-v1.28+.yaml",
            "a scheduler that asks `http://127.0.0.1:32766/gpushare-scheduler`",
            "the same, by `manifests/extender/static-pod` with the flags `--address=127.0.0.1:32766 --gpushare.enabled` in"
            " the place of `--address` and `--extender.reserve`",
            "tests/e2e/test_static_extender.py::test_gpushares_configuration_schedules_gpu_mem",
        ),
        kept(
            "pkg/scheduler/inspect.go",
            "`/gpushare-scheduler/inspect`, and `/inspect/NODE`",
            "tests/extender/test_http.py::test_gpushares_inspect_counts_in_its_units",
            "the same; memory of other resources counts as used",
        ),
        kept(
            "pkg/cache/nodeinfo.go",
            "GPUShare's own extender, beside this agent",
            f"{_AGENT}::test_the_gpu_that_gpushares_extender_chose_is_taken_where_it_fits",
            "its GPU is taken where it fits",
        ),
        different(
            "config/scheduler-policy-config.yaml",
            "`aliyun.com/gpu-mem` in `managedResources`",
            "the chart's scheduler has it with `gpuMem.enabled`; `manifests/extender/*/scheduler.yaml` have a line for it",
            "tests/manifests/test_chart.py::test_the_values_reach_their_places",
        ),
        different(
            "config/gpushare-schd-extender.yaml",
            "one replica, NodePort 32766",
            "two, behind a Service",
            "tests/manifests/test_extender.py::test_there_are_two_replicas_and_one_is_always_there",
        ),
        kept(
            "README.md, demo 2",
            "a pod that fits a node and none of its GPUs waits",
            "tests/extender/test_cluster_state.py::test_memory_that_is_free_on_two_gpus_together_serves_no_pod",
        ),
        kept(
            "designs.md",
            "of the GPUs that fit, the one with least left",
            "tests/admission/test_memory_share.py::test_the_fullest_gpu_that_fits_is_taken_and_its_ids_are_preferred",
        ),
        different(
            "pkg/scheduler/predicate.go",
            "`Insufficient GPU Memory in one device`",
            "how much the GPUs have at most",
            "tests/placement/test_lack.py::test_a_nodes_lack_is_one_sentence_without_a_gpus_name",
        ),
        different(
            "pkg/routes/routes.go",
            "a bind that fails has status 500",
            "200 and `Error`, which kube-scheduler reads",
            "tests/extender/test_verbs.py::test_a_full_gpu_is_refused_with_a_reason_at_bind_too",
        ),
        kept(
            "cmd/main.go",
            "`LOG_LEVEL`: debug, info, warn, error",
            "tests/settings/test_gpu_manager.py::test_log_level_is_klogs_number_or_a_word",
        ),
        different(
            "cmd/main.go",
            "the extender's variables `PORT`, `THREADNESS`",
            "`extender.port`; one process needs no threads. Its paths answer wherever the others do",
            "tests/extender/test_verbs.py::test_each_verb_answers_as_the_scheduler_reads_it",
        ),
    ),
    "`kubectl inspect gpushare`": (
        kept(
            "cmd/inspect",
            "used memory of each GPU, of the node and the cluster",
            "tests/agent/test_gpushare_inspection.py::test_its_sums_are_what_the_kubelet_has_given",
        ),
        different(
            "cmd/inspect, buildNodeInfoWithPods",
            "total memory of each GPU",
            "an equal part of the node's, as ever; the node's is what is left for gpu-mem beside other resources",
            "tests/agent/test_gpushare_inspection.py::test_its_sums_are_what_the_kubelet_has_given",
        ),
        kept(
            "cmd/inspect, getDeivceInfo",
            "pending memory: pods without an annotation",
            "tests/agent/test_gpushare_inspection.py::test_a_pod_that_is_not_admitted_yet_is_pending",
        ),
    ),
}
