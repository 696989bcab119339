"""gpu-manager v1.1.5 (tkestack/gpu-manager), and the reading notes of its source that this project was begun from."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept, not_kept

_FLAGS = "tests/settings/test_gpu_manager.py::"
_E2E = "tests/e2e/test_gpu_manager.py::test_gpu_managers_daemonset_serves_with_this_image"
_DISPLAY = "tests/observability/test_display.py::"
_OPTIONS = "cmd/manager/options"

LEFT_OUT = {
    "nvidia-cuda-mps-control": "MPS is the daemon's, isolation `mps`",
    "nvidia-cuda-mps-server": "MPS is the daemon's, isolation `mps`",
    "nvidia-persistenced": "a daemon of the host",
    "libcuda-control.so": "put there without being named",
    "libnvidia-fatbinaryloader.so": "not in drivers from 450 on",
    "libnvidia-compiler.so": "not in drivers from 525 on; `libnvidia-nvvm.so` took its place",
    **dict.fromkeys(
        (
            *("libvdpau_nvidia.so", "libnvidia-fbc.so", "libnvidia-ifr.so", "libGL.so", "libGLX.so", "libOpenGL.so"),
            *(
                "libGLESv1_CM.so",
                "libGLESv2.so",
                "libEGL.so",
                "libGLdispatch.so",
                "libGLX_nvidia.so",
                "libEGL_nvidia.so",
            ),
            *("libGLESv2_nvidia.so", "libGLESv1_CM_nvidia.so", "libnvidia-eglcore.so", "libnvidia-egl-wayland.so"),
            *("libnvidia-glcore.so", "libnvidia-tls.so", "libnvidia-glsi.so"),
        ),
        "graphics and screens",
    ),
}
"""What gpu-manager's volume.conf names and manifests/base/volume.conf does not, and why."""
TAKEN = (
    *("nvidia-debugdump", "nvidia-smi", "gpu-client", "libnvidia-ml.so", "libcuda.so", "libnvidia-ptxjitcompiler.so"),
    *(
        "libnvidia-opencl.so",
        "libnvidia-encode.so",
        "libnvcuvid.so",
        "libnvidia-opticalflow.so",
        "libnvidia-gpucomp.so",
    ),
)
"""The rest of it."""

PROMISES: Promises = {
    "The DaemonSet, with nothing changed but the image": (
        kept(
            "gpu-manager.yaml", "account, `privileged`, `hostPID`, user, tolerations, priority class, node label", _E2E
        ),
        kept("gpu-manager.yaml", "Service `gpu-manager-metric`, port 5678 on every address", _E2E),
        kept("gpu-manager.yaml", "`/var/run/gpu-manager.sock` on the host, by the mount of `/var/run`", _E2E),
        kept(
            "gpu-manager.yaml",
            "`NODE_NAME`",
            "tests/settings/test_settings.py::test_the_node_name_is_the_flag_else_node_name_else_the_host",
        ),
        different(
            "gpu-manager.yaml",
            "no mount of `/var/lib/kubelet/pod-resources`",
            "the host's own is reached by `/proc/1/root`; where that is closed pods are identified by the API server alone,"
            " and two that wait and ask for the same are refused; a warning names the mount",
            "tests/agent/test_faults_pod_resources.py::"
            "test_without_pod_resources_pods_are_identified_by_the_api_server_and_known_to_the_next_agent",
        ),
        different(
            "gpu-manager.yaml",
            "`/etc/gpu-manager/checkpoint`",
            "cordons and sizes are kept there; the ledger is rebuilt from the kubelet's records",
            _FLAGS + "test_gpu_managers_daemonset_finds_the_host_where_it_mounts_nothing",
        ),
        different(
            "build/start.sh",
            "the driver's files of `/usr/local/host`",
            "collected from `/proc/1/root` before the start, for containers and for the agent's own NVML",
            "tests/e2e/test_driver_from_host.py::test_gpu_managers_daemonset_finds_the_driver_by_the_hosts_root",
        ),
        different(
            "build/Dockerfile",
            "vcuda-control limits the shares",
            "libgpushare does; an image built with the control library goes on with isolation `vcuda`",
            _FLAGS + "test_an_image_with_the_control_library_goes_on_with_it",
        ),
        kept(
            "build/start.sh",
            "`/etc/gpu-manager/extra-config.json`",
            _FLAGS + "test_the_extra_config_of_the_start_script_is_read",
        ),
        not_kept("gpu-manager.yaml", "logs in `/var/log/gpu-manager`", "logs go to standard error"),
    ),
    "Command line and environment": (
        kept(_OPTIONS, "all 18 flags, also with `_`", _FLAGS + "test_every_flag_of_gpu_manager_is_a_setting"),
        kept("build/start.sh", "`EXTRA_FLAGS`", _FLAGS + "test_extra_flags_are_flags"),
        different(
            "build/start.sh",
            "`LOG_LEVEL` and `--v`, klog's number",
            "5 and more are level debug, less is info",
            _FLAGS + "test_log_level_is_klogs_number_or_a_word_of_ours",
        ),
        different(
            "pkg/flags",
            "`--logtostderr`, `--alsologtostderr`, `--log-dir`, `--stderrthreshold`, `--vmodule`, `--log-backtrace-at`",
            "accepted and reported once",
            _FLAGS + "test_a_flag_without_effect_is_accepted_and_reported_once",
        ),
        kept("build/gpu-manager.conf", "`--addr`", _FLAGS + "test_the_display_socket_of_the_service_unit_is_taken"),
        not_kept(
            "build/copy-bin-lib.sh",
            "`LIBCUDA`",
            "the file of `volume_config` describes the driver directory; a warning says so",
            _FLAGS + "test_libcuda_is_reported",
        ),
        not_kept(
            _OPTIONS,
            "`--wait-timeout`, `--checkpoint-path`",
            "accepted without effect: the agent waits for the kubelet, whose records are the state",
            _FLAGS + "test_every_flag_of_gpu_manager_is_a_setting",
        ),
        different(
            "build/gpu-manager.service",
            "a service of systemd",
            "`gpushare-agent run` tells systemd when it is ready; there is no unit file",
            "tests/kit/test_supervision.py::test_the_service_manager_is_reported",
        ),
    ),
    "What pods ask for and get": (
        kept(
            "README.md, Pod template example",
            "`tencent.com/vcuda-core`, 100 to a GPU; `tencent.com/vcuda-memory`, 256 MiB each",
            "tests/kubelet/test_device_table.py::test_vcore_ids_are_a_hundred_per_gpu_in_order_of_index",
        ),
        kept(
            "README.md, notice",
            "150 cores are refused",
            "tests/admission/test_plan.py::test_requests_that_cannot_be_are_refused_with_what_is_valid",
            "refused with what is valid; cores without memory too",
        ),
        kept(
            "README.md, 2 GPU card",
            "200 cores are two whole GPUs",
            "tests/admission/test_container_edits.py::test_whole_gpus_are_listed_in_order_of_index",
        ),
        different(
            "README.md, annotation",
            "`tencent.com/vcuda-core-limit`",
            "above 100 counts as 100, 0 as none; what gpu-manager fails at or takes below the request is ignored, Event"
            " `CoreLimitIgnored`",
            "tests/isolation/test_shares.py::test_a_core_limit_is_read_as_gpu_manager_reads_it",
        ),
        kept(
            "pkg/services/allocator",
            "container annotations `tencent.com/vcuda-device`, `-core`, `-memory`; device nodes by minor number",
            "tests/admission/test_container_edits.py::test_a_share_gets_its_gpu_by_minor_number",
        ),
        kept(
            "pkg/services/allocator",
            "pod annotations `tencent.com/gpu-assigned`, `predicate-gpu-idx-<i>`",
            "tests/cluster/test_pod_annotations.py::test_an_assignment_is_patched",
        ),
        kept(
            "pkg/services/allocator",
            "`LD_LIBRARY_PATH`, 32-bit libraries with `compat32=true` (isolation `vcuda`)",
            "tests/admission/test_container_edits.py::"
            "test_the_search_path_is_set_where_the_driver_directory_is_mounted_and_nowhere_else",
        ),
        kept(
            "extra-config.json",
            "`default.devices`",
            "tests/isolation/test_extra_config.py::test_device_nodes_are_read_in_order",
        ),
        kept(
            "pkg/algorithm",
            "whole GPUs by their links",
            "tests/admission/test_units.py::test_several_gpus_are_placed_by_their_links",
        ),
        kept(
            "pkg/algorithm",
            "shares on the fullest GPU",
            "tests/placement/test_placement.py::test_binpack_takes_the_fullest_gpu_that_fits",
        ),
        kept(
            "pkg/algorithm",
            "a free branch left whole",
            "tests/placement/test_placement.py::test_fragment_takes_from_the_branch_with_the_fewest_free_gpus",
        ),
        kept(
            "pkg/services/watchdog",
            "label `gaia.tencent.com/gpu-model`, `--node-labels`",
            "tests/cluster/test_node_labels.py::test_the_model_is_the_word_behind_the_brand",
        ),
        different(
            "the seed's seven Tesla P40",
            "668 blocks allocatable",
            "665: a GPU of 24,451 MiB has 95 whole blocks, and a block of two GPUs could be given to nobody",
            "tests/kubelet/test_device_table.py::test_vmemory_ids_count_whole_blocks_of_each_gpu",
        ),
        different(
            "pkg/device/nvidia, resetGPUFeature",
            "clocks, ECC and mode are set back on a GPU that becomes free",
            "a GPU's settings are the operator's; only `mps.exclusive_process` sets the compute mode, and back",
            "tests/gpus/test_nvml_compute_mode.py::test_the_mode_is_set_only_if_the_setting_asks_and_set_back_at_the_end",
        ),
        different(
            "allocator, loadModule",
            "the kernel modules are loaded",
            "by the host: NVIDIA's runtime or nvidia-modprobe; `gpushare-agent check` names a missing device node",
            "tests/cli/test_check.py::test_device_nodes_must_be_character_devices",
        ),
        different(
            "cmd/manager/app",
            "the process ends when the kubelet's socket is new",
            "it registers again and goes on",
            "tests/agent/test_faults_kubelet.py::test_running_pods_survive_a_kubelet_restart_and_nothing_of_theirs_is_freed",
        ),
    ),
    "vDevice and the driver's files": (
        kept(
            "pkg/services/virtual-manager",
            "`/etc/gpu-manager/vm`, a socket for registrations",
            "tests/agent/test_vdevice_node.py::test_a_share_finds_its_limits_and_its_socket_before_it_starts",
            "a socket and a directory for each container, which were the pod's",
        ),
        kept(
            "vcuda.config",
            "`gpu_memory`, `utilization`, `hard_limit`, `limit`, `enable`, the driver's version",
            "tests/isolation/test_vdevice_files.py::test_a_c_program_reads_every_field_of_vcuda_config",
        ),
        kept(
            "pids.config",
            "host PIDs, sorted",
            "tests/isolation/test_vdevice_files.py::test_a_c_program_finds_every_pid_by_bisection",
        ),
        kept("cmd/client", "`gpu-client`", "tests/isolation/test_gpu_client.py::test_it_registers_by_name_and_by_id"),
        kept(
            "virtual-manager, garbageCollector",
            "directories of pods that ended are removed",
            "tests/isolation/test_virtual_manager.py::test_a_share_that_is_released_is_no_longer_served",
        ),
        kept(
            "pkg/services/volume",
            "volumes `nvidia` and `origin` of volume.conf",
            "tests/cli/test_driver_volume.py::test_both_volumes_are_made_and_the_report_says_what_was_linked",
        ),
        different(
            "build/volume.conf",
            "graphics, MPS programs and libraries of old drivers in volume.conf",
            "left out of the default; name them in yours",
            "tests/promises/test_volume_conf.py::test_every_name_of_gpu_managers_volume_conf_is_here_or_left_out_for_a_reason",
        ),
        different(
            "FAQ 1, 3",
            "`--container-runtime-endpoint`, `--cgroup-driver` by hand",
            "found by themselves; a contradiction is logged",
            "tests/cli/test_check_containers.py::test_a_cgroup_driver_that_the_pods_contradict_is_a_warning",
        ),
    ),
    "Observation": (
        kept(
            "pkg/services/display",
            "the four `container_…` series",
            "tests/observability/test_metrics_node.py::test_gpu_managers_four_series_keep_their_names_labels_and_units",
        ),
        kept(
            "pkg/services/display",
            "`/metric`",
            "tests/observability/test_server.py::test_metrics_are_served_under_both_names",
        ),
        kept(
            "pkg/services/display",
            "`container_request_gpu_memory` is what was asked for",
            "tests/observability/test_metrics_node.py::test_requested_memory_of_whole_gpus_is_what_was_requested",
            "the same; whole GPUs without a request count with their memory",
        ),
        kept(
            "pkg/services/display",
            "`/usage`, `/graph`, `/version` and `display.GPUDisplay`, with `device_mem`",
            _DISPLAY + "test_usage_is_reported_in_percent_and_mib_by_pod_and_container",
        ),
        kept(
            "pkg/device/nvidia, PrintGraph",
            "`aval`, the number of free GPUs of a branch; pids, memory, allocatable cores and memory of each GPU",
            "tests/observability/test_graph.py::test_each_branch_of_the_graph_has_how_many_of_its_gpus_are_free",
        ),
        different(
            "the seed's tree of access costs",
            "a cost for each GPU",
            "the link of each pair, in `gpushare-agent graph -o json`",
            "tests/cli/test_inspect.py::test_the_graph_as_a_document_has_tree_links_and_what_is_free",
        ),
        different(
            "pkg/server, setupGRPCGatewayService",
            "`/debug/pprof/` on port 5678",
            "`/debug` names the debug listener, port 5679 of the pod alone, which answers with what there is",
            "tests/observability/test_server.py::test_debug_pages_lead_to_the_debug_listener",
        ),
        different(
            "the seed's start",
            "a failing NVML suggests nodeSelector and toleration",
            "the error has them, with what else to check",
            "tests/gpus/test_nvml.py::test_an_absent_library_is_unavailable_with_a_checklist",
        ),
    ),
}
