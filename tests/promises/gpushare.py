"""GPUShare: gpushare-device-plugin 45fb8b8, gpushare-scheduler-extender c0b6141 (AliyunContainerService), and the document
on the device plugin with MPS that this project was begun from."""

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
            "the same, `gpushare-agent run --gpushare.enabled`",
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
            "cmd/main.go",
            "the extender's variables `PORT`, `THREADNESS`",
            "`extender.port`; one process needs no threads. Its paths answer wherever the others do",
            "tests/extender/test_verbs.py::test_each_verb_answers_as_the_scheduler_reads_it",
        ),
    ),
}
