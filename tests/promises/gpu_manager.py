"""gpu-manager v1.1.5 (tkestack/gpu-manager), and reading notes of its source."""

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
        kept(
            "README.md",
            "containers need no NVIDIA runtime: the driver is in `/usr/local/nvidia`",
            "tests/admission/test_container_edits.py::"
            "test_the_driver_is_mounted_under_every_isolation_where_the_setting_says_so",
            "the same; with `manifests/base` by `driver_volume.mount`",
        ),
        different(
            "README.md",
            "Kubernetes 1.9 and later",
            "1.30 and later: with an older kubelet the agent ends with the reason",
            "tests/kubelet/test_facts.py::test_an_old_kubelet_ends_the_agent_with_the_reason",
        ),
        different(
            "README.md",
            "the role `cluster-admin`",
            "works; `manifests/base` has roles of its own, without wildcards",
            "tests/manifests/test_manifests.py::test_the_roles_have_no_wildcard_and_exactly_the_rights_that_check_asks_for",
        ),
        different(
            "gpu-manager.yaml",
            "an update during which no pod is admitted",
            "with `manifests/base` the old agent serves until the new one does, and no pod is rejected",
            "tests/e2e/test_upgrade.py::test_a_rolling_update_during_a_burst_rejects_no_pod",
        ),
        not_kept(
            "build/Dockerfile",
            "`/start.sh` or `/usr/bin/gpu-manager` as command",
            "leave the command out: the image's own is the agent's",
        ),
    ),
    "Command line and environment": (
        kept(_OPTIONS, "all 18 flags, also with `_`", _FLAGS + "test_every_flag_of_gpu_manager_is_a_setting"),
        kept("build/start.sh", "`EXTRA_FLAGS`", _FLAGS + "test_extra_flags_are_flags"),
        different(
            "build/start.sh",
            "`LOG_LEVEL` and `--v`, klog's number",
            "5 and more are level debug, less is info",
            _FLAGS + "test_log_level_is_klogs_number_or_a_word",
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
        not_kept(
            "build/copy-bin-lib.sh",
            "`FILE`, `FIND_BASE`",
            "`volume_config` and `driver_volume.root`",
        ),
        kept(
            _OPTIONS,
            "`--extra-config` of a file that cannot be read ends the start",
            "tests/isolation/test_extra_config.py::test_a_missing_file_is_refused_by_name",
        ),
        different(
            "cmd/manager/app",
            "a part of `--node-labels` that is no pair is passed over",
            "a mistake that ends the start",
            "tests/settings/test_settings.py::test_a_bad_flag_ends_in_one_line_that_tells_what_is_allowed",
        ),
        kept(
            "pkg/version",
            "`--version`",
            "tests/cli/test_main.py::test_version_is_the_packages",
            "the same, of `gpushare-agent`",
        ),
        different(
            "build/gpu-manager.service",
            "`systemctl reload`, which sends SIGHUP and so ends it",
            "the settings are read anew, and what runs goes on",
            "tests/agent/test_faults_signals.py::"
            "test_sighup_takes_the_changed_settings_file_into_effect_and_a_broken_one_keeps_the_old",
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
            "pkg/services/watchdog",
            "label `gaia.tencent.com/gpu-model`, `--node-labels`",
            "tests/cluster/test_node_labels.py::test_the_model_is_the_word_behind_the_brand",
        ),
        different(
            "reading notes, seven Tesla P40",
            "668 blocks allocatable",
            "665: a GPU of 24,451 MiB has 95 whole blocks, and a block of two GPUs could be given to nobody",
            "tests/kubelet/test_device_table.py::test_vmemory_ids_count_whole_blocks_of_each_gpu",
        ),
        kept(
            "README.md, and reading notes",
            "their example pods: 50 cores and 30 blocks, 200 and 60, 100 and 30",
            "tests/agent/test_gpu_managers_examples.py::test_an_example_runs",
        ),
        kept(
            "allocator, allocateOne",
            "`NVIDIA_VISIBLE_DEVICES`, the UUIDs",
            "tests/isolation/test_device_lists.py::test_envvar_lists_the_uuids",
        ),
        kept(
            "allocator, allocateOne",
            "`--share-mode=false`: parts of a GPU are refused",
            "tests/placement/test_placement.py::test_shares_are_refused_where_sharing_is_off",
        ),
        different(
            "allocator, allocateOne",
            "memory beside whole GPUs is not looked at",
            "the GPUs together have at least that much, or the pod is refused",
            "tests/placement/test_placement.py::test_whole_gpus_must_have_the_memory_together",
        ),
        different(
            "pkg/server/vmemory.go",
            "`vcuda-memory` without cores: the container starts without a GPU",
            "refused: a share has both",
            "tests/admission/test_plan.py::test_requests_that_cannot_be_are_refused_with_what_is_valid",
        ),
        kept(
            "allocator, allocateOne",
            "`request memory … is larger than …`",
            "tests/admission/test_decide.py::test_a_refusal_for_too_little_memory_at_all_has_its_own_reason",
            "the same, in words of its own",
        ),
        different(
            "pkg/utils",
            "the number in `predicate-gpu-idx-<i>` is the minor number",
            "NVML's index, as `nvidia-smi` counts: minor numbers may have gaps",
            "tests/cluster/test_annotations.py::test_a_gpu_is_named_by_nvmls_index",
        ),
        different(
            "allocator, capacity",
            "device IDs `tencent.com/vcuda-core-<n>` in the kubelet's records",
            "`<8 digits of the UUID>-<n>`: an ID names its GPU",
            "tests/kubelet/test_device_ids.py::test_an_id_is_eight_digits_of_the_uuid_and_a_number",
        ),
        different(
            "allocator, Allocate",
            "init containers get no GPU",
            "they get one, and the containers after them stay on it",
            "tests/admission/test_plan.py::test_an_init_container_goes_where_its_heir_fits",
        ),
        kept(
            "allocator, Allocate",
            "several containers of a pod, each with a GPU or a part of one",
            "tests/admission/test_identity.py::test_containers_are_served_in_spec_order",
        ),
    ),
    "Which GPU, and until when": (
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
        different(
            "allocator, Allocate",
            "the pod that has waited longest and asks for as many cores is taken for the one that starts",
            "the kubelet is asked whom it is for; where two fit, nobody is served by guess",
            "tests/admission/test_identity.py::test_two_that_fit_are_never_guessed_between",
        ),
        different(
            "allocator, allocateOne",
            "a GPU other than the one that gpu-admission named fails the pod",
            "the named one is taken where it fits, else another",
            "tests/placement/test_placement.py::test_a_hint_is_followed_if_it_fits_and_ignored_otherwise",
        ),
        different(
            "allocator, ListAndWatch",
            "devices are Healthy for ever",
            "those of a failed GPU are Unhealthy, and pods go elsewhere",
            "tests/agent/test_faults_gpus.py::test_a_lost_gpu_is_unhealthy_in_both_resources_and_new_pods_go_elsewhere",
        ),
        different(
            "pkg/device/nvidia, Init",
            "GPUs are counted at the start",
            "and followed from then on",
            "tests/gpus/test_watch.py::test_a_node_without_gpus_waits_for_them",
        ),
        kept(
            "pkg/device/nvidia, parseFromLibrary",
            "two GPUs of one board are behind one switch",
            "tests/gpus/test_nvml.py::test_the_tree_follows_the_common_ancestors",
        ),
        different(
            "allocator, PreStartContainer",
            "a container whose records disagree: its pod fails, `PreStartContainerCheckErr`",
            "its start is refused with the reason, and the kubelet tries again",
            "tests/admission/test_admission.py::test_a_start_that_is_refused_names_the_container",
        ),
        different(
            "allocator, checkAllocation",
            "rejected pods of a controller are deleted",
            "the oldest are: the newest of each controller stay, to be read",
            "tests/cluster/test_rejected_pods.py::test_the_newest_of_each_controller_stay",
        ),
        kept(
            "allocator, checkAllocation",
            "annotations that were lost are written again",
            "tests/cluster/test_pod_annotations.py::test_all_pods_are_compared_again_after_a_while",
        ),
        kept(
            "allocator, recoverInUsed",
            "pods keep their GPUs over a restart",
            "tests/e2e/test_device_plugin_specs.py::test_an_agent_that_is_killed_has_the_same_ledger_after",
        ),
        kept(
            "pkg/utils, GetCheckpointData",
            "the kubelet's checkpoint in its older and newer forms",
            "tests/kubelet/test_records.py::test_old_kubelets_write_a_plain_list",
        ),
        different(
            "watchdog, podIsTerminated",
            "a pod deleted by force leaves its GPU to the next at once",
            "once its last process has ended",
            "tests/agent/test_faults_pods.py::test_a_force_deleted_pods_share_is_kept_until_its_processes_are_gone",
        ),
        different(
            "pkg/server, Run",
            "without the API server it does not start",
            "it serves, and says why it refuses a pod that it does not know",
            "tests/agent/test_faults_api_server.py::"
            "test_without_an_api_server_the_agent_registers_and_says_why_it_refuses",
        ),
    ),
    "Inside the containers": (
        kept(
            "vcuda-controller",
            "an allocation beyond `vcuda-memory` fails: out of memory",
            "tests/gpushare/test_memory.py::test_every_way_to_a_function_ends_at_the_limit",
        ),
        kept(
            "vcuda-controller",
            "`nvidia-smi` shows the share's memory",
            "tests/gpushare/test_memory.py::test_nvml_shows_the_share",
        ),
        kept(
            "vcuda-controller",
            "compute is held at the cores",
            "tests/gpushare/test_compute.py::test_the_error_budget",
        ),
        kept(
            "vcuda-controller",
            "up to `vcuda-core-limit` while the GPU is idle",
            "tests/gpushare/test_compute.py::test_an_idle_gpu_is_given_up_to_the_ceiling",
        ),
        kept(
            "vcuda-controller",
            "whole GPUs are not limited",
            "tests/isolation/test_gpushare.py::test_whole_gpus_get_nothing",
        ),
        different(
            "vcuda-controller",
            "a program that cannot register ends",
            "it goes on, within its limits",
            "tests/gpushare/test_registration.py::test_no_answer_of_the_agents_keeps_a_program_from_its_gpu",
        ),
        not_kept(
            "FAQ 2",
            "`LOGGER_LEVEL` in a pod",
            "it is the control library's: isolation `vcuda`",
        ),
    ),
    "vDevice": (
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
        different(
            "FAQ 1, 3",
            "`--container-runtime-endpoint`, `--cgroup-driver` by hand",
            "found by themselves; a contradiction is logged",
            "tests/cli/test_check_containers.py::test_a_cgroup_driver_that_the_pods_contradict_is_a_warning",
        ),
        kept(
            "CHANGELOG, v1.0.4",
            "any user of a container may register",
            "tests/isolation/test_vdevice_files.py::test_the_tree_has_the_documented_modes_under_any_umask",
        ),
        kept(
            "virtual-manager, registerVDeviceWithContainerName",
            "a registration by container name, also in dockershim's form",
            "tests/isolation/test_vdevice_files.py::test_a_container_name_is_plain_or_of_dockershims_form",
        ),
        different(
            "virtual-manager, RegisterVDevice",
            "whoever reaches a socket may register any container",
            "its own alone, by the kernel's word",
            "tests/isolation/test_vdevice_server.py::test_a_process_of_another_container_is_refused_whatever_it_says",
        ),
        kept(
            "virtual-manager, vDeviceWatcher",
            "sockets are served again after a restart",
            "tests/agent/test_vdevice_node.py::test_after_a_restart_every_live_share_has_its_socket_again",
        ),
        different(
            "virtual-manager, vDeviceWatcher",
            "a path beyond 107 characters is left out",
            "it is served",
            "tests/isolation/test_vdevice_server.py::test_the_socket_works_beyond_107_bytes_of_path",
        ),
        different(
            "virtual-manager, writeConfigFile",
            "`vcuda.config` stays as it was written first",
            "it follows `vcuda-core-limit`, and a resize",
            "tests/agent/test_vdevice_node.py::test_an_elastic_limit_is_followed_and_a_bad_one_reported",
        ),
        different(
            "virtual-manager, writePidFile",
            "`pids.config` is of the moment of a registration",
            "it follows the container's processes",
            "tests/isolation/test_virtual_manager.py::test_processes_are_followed_between_two_polls_of_everything",
        ),
        different(
            "pkg/types",
            "cgroup v1 alone",
            "v1 and v2",
            "tests/runtime/test_cgroups.py::test_a_container_is_found_by_its_id_under_v2",
        ),
        different(
            "cmd/manager/options",
            "`/var/run/dockershim.sock`",
            "a runtime with CRI v1: containerd, CRI-O, cri-dockerd",
            "tests/runtime/test_cri.py::test_a_runtime_without_cri_v1_is_rejected_with_the_cure",
        ),
    ),
    "The driver's files": (
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
        kept(
            "pkg/services/volume",
            "hard links to the host's files, else copies",
            "tests/isolation/test_driver_directory.py::test_another_device_gets_copies",
        ),
        kept(
            "pkg/services/volume",
            "in volume `nvidia` the names of libcuda and libnvidia-ml lead to the control library",
            "tests/isolation/test_driver_plan.py::"
            "test_in_the_volume_for_shares_the_loaded_names_lead_to_the_control_library",
        ),
        kept(
            "pkg/services/volume",
            "the driver's version is that in libcuda's name",
            "tests/isolation/test_driver_plan.py::test_the_driver_version_is_in_the_full_name_of_libcuda",
        ),
        kept(
            "pkg/services/volume/ldcache",
            "libraries of 32 and 64 bits, by the loader's cache",
            "tests/isolation/test_driver_libraries.py::test_32_and_64_bit_libraries_are_reported_apart",
        ),
        different(
            "pkg/services/volume",
            "files are removed and made again at each start",
            "a new version is made beside the old, which programs keep",
            "tests/isolation/test_driver_directory.py::"
            "test_what_a_process_has_mapped_does_not_change_when_a_new_version_comes",
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
            "free GPUs behind `ROOT` and as `aval` of a branch",
            "tests/observability/test_graph.py::test_each_branch_of_the_graph_has_how_many_of_its_gpus_are_free",
        ),
        kept(
            "pkg/device/nvidia, PrintGraph",
            "pids, used and total memory of branches and GPUs, allocatable cores and memory of GPUs",
            _DISPLAY + "test_the_graph_shows_what_is_used_and_free_of_each_gpu",
        ),
        kept(
            "reading notes, tree of access costs",
            "costs of links, which gpu-manager's own graph has not",
            "tests/observability/test_graph.py::test_each_branch_of_the_graph_has_the_cost_of_its_dearest_pair",
            "`cost:` behind each branch of `/graph`; each pair's link in `/api/v1/node`",
        ),
        different(
            "pkg/services/display",
            "`/usage` has a pod once it runs",
            "from its allocation on",
            _DISPLAY + "test_containers_are_listed_before_the_first_sample",
        ),
        kept(
            "pkg/services/display",
            "the annotation `clusterName`, the variable `SUBMITTER`",
            _DISPLAY + "test_usage_is_reported_in_percent_and_mib_by_pod_and_container",
        ),
        different(
            "pkg/services/display",
            "at most 1,024 processes of a GPU, in the graph 64",
            "as many as the driver lists",
            "tests/gpus/test_nvml_processes.py::test_lists_of_any_length_are_read_whole",
        ),
        kept(
            "pkg/server, runServer",
            "root alone may ask the socket",
            _DISPLAY + "test_the_socket_is_for_root_alone",
        ),
        different(
            "pkg/server, setupGRPCGatewayService",
            "`/debug/pprof/` on port 5678",
            "for the pod itself (`kubectl port-forward`) or with a token, and with what there is",
            "tests/observability/test_server.py::test_the_debug_pages_are_on_this_port",
        ),
        different(
            "reading notes, start",
            "a failing NVML suggests nodeSelector and toleration",
            "the error has them, with what else to check",
            "tests/gpus/test_nvml.py::test_an_absent_library_is_unavailable_with_a_checklist",
        ),
    ),
}
