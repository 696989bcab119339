"""NVIDIA's device plugin v0.20.0. Its keys, variables and flags have a table of their own (settings/nvidia_options.py)."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept, not_kept

_NODE = "tests/agent/test_nvidia_node.py::"
_UNITS = "tests/admission/test_units.py::"
_LABELS = "tests/cluster/test_feature_labels.py::"
_PLUGIN = "tests/settings/test_nvidia_plugin.py::"
_FAULTS = "tests/agent/test_faults_gpus.py::"

PROMISES: Promises = {
    "Configuration": (
        kept(
            "chart, templates/daemonset-device-plugin.yml",
            "the variables that the chart writes",
            "tests/docs/test_migration_nvidia.py::test_every_variable_of_the_chart_is_known",
        ),
        kept(
            "config.map",
            "a configuration by the node's label",
            "tests/agent/test_node_configuration_node.py::"
            "test_the_nodes_label_and_the_files_change_the_settings_without_a_new_registration",
        ),
        kept(
            "README, label",
            "without a label the default, the only one, or the one called `default`",
            "tests/settings/test_node_configuration.py::"
            "test_the_label_names_the_configuration_else_the_default_rules_do",
        ),
        kept(
            "README, label",
            "an unknown name changes nothing",
            "tests/agent/test_node_configuration_node.py::"
            "test_the_nodes_label_and_the_files_change_the_settings_without_a_new_registration",
            "the same, nor does a wrong configuration; an Event says so",
        ),
        kept(
            "README",
            "a flag goes before a variable, and a variable before the file",
            _PLUGIN + "test_a_flag_beats_a_variable_and_a_variable_the_file",
        ),
        kept("README", "a whole configuration file", _PLUGIN + "test_a_whole_file_becomes_our_settings"),
        different(
            "api/config/v1",
            "a key that it does not know is passed over",
            "it is reported, with the nearest that there is",
            _PLUGIN + "test_names_of_keys_in_any_case_and_unknown_ones",
        ),
        kept(
            "README",
            "several device list strategies, as a list or between commas",
            _PLUGIN + "test_device_lists_are_a_text_or_a_list",
        ),
        different(
            "README",
            "no device nodes, unless by `passDeviceSpecs`",
            "device nodes by default",
            _PLUGIN + "test_device_nodes_are_passed_unless_cdi_alone_names_the_devices",
        ),
        kept(
            "failOnInitError: true",
            "a driver that cannot be read ends the start",
            _FAULTS + "test_without_a_driver_the_agent_ends_with_the_reason",
        ),
        kept(
            "failOnInitError: false",
            "the start waits for the driver",
            _FAULTS + "test_without_a_driver_and_reported_to_stay_the_agent_serves_no_device",
            "the same, and goes on once it is there",
        ),
        not_kept(
            "deployments/static",
            "its DaemonSets, with this image",
            "`manifests/base` with the component `nvidia`, or the chart: the agent needs other mounts",
        ),
        kept(
            "chart, values.yaml",
            "nodes by GPU Feature Discovery's label",
            "tests/manifests/test_chart.py::test_nodes_may_be_chosen_by_the_label_that_another_program_gave_them",
            '`nodeSelector: {nvidia-device-enable: null, nvidia.com/gpu.present: "true"}`',
        ),
        kept(
            "README, Running GPU Jobs",
            "nodes with the taint `nvidia.com/gpu`",
            "tests/manifests/test_manifests.py::test_the_agent_runs_on_the_nodes_with_gpu_managers_label",
        ),
    ),
    "Pods": (
        kept("README", "`nvidia.com/gpu: 1`, its example pods", "tests/e2e/test_nvidia.py::test_nvidias_example_pods"),
        kept(
            "README, time-slicing",
            "replicas, also renamed to `.shared`",
            "tests/e2e/test_nvidia.py::test_nvidias_example_of_time_slicing",
        ),
        kept(
            "failRequestsGreaterThanOne",
            "several replicas are refused",
            _UNITS + "test_several_replicas_are_refused_where_the_setting_says_so",
        ),
        kept(
            "allocate, distributed and packed", "replica policies", _UNITS + "test_replicas_are_distributed_or_packed"
        ),
        kept("gpuallocator", "GPUs by their links", _UNITS + "test_several_gpus_are_placed_by_their_links"),
        kept(
            "reading notes, GetPreferredAllocation",
            "the devices that the kubelet must include are among those preferred",
            "tests/placement/test_placement.py::test_must_include_is_part_of_the_whole_gpus",
        ),
        kept(
            "internal/rm/devices.go",
            "the NUMA node of each device",
            "tests/kubelet/test_device_plugin.py::"
            "test_list_and_watch_sends_all_devices_then_one_message_per_change_and_ends_on_request",
        ),
        different(
            "reading notes, GetDevicePluginOptions",
            "no call before a container starts",
            "PreStartContainer, where limits must be there before it does",
            "tests/kubelet/test_device_plugin.py::test_the_options_name_the_calls_that_the_plugin_needs",
        ),
        different(
            "internal/plugin, Allocate",
            "the answer to an Allocate",
            "the same but for a list of differences, each with its reason",
            "tests/admission/test_nvidia_answers.py::test_every_listed_difference_is_one",
        ),
        kept(
            "migStrategy mixed",
            "`nvidia.com/mig-<profile>`",
            _UNITS + "test_mig_instances_are_units_of_their_own_names_with_strategy_mixed",
        ),
        kept(
            "migStrategy single, none",
            "instances as `nvidia.com/gpu`, or none",
            _UNITS + "test_mig_instances_are_units_of_the_plain_name_with_strategy_single_and_none_by_default",
        ),
        different(
            "migStrategy single",
            "unlike instances end the plugin",
            "they are given to nobody, and the agent stays",
            _NODE + "test_with_strategy_single_unlike_instances_are_given_to_nobody",
        ),
        kept(
            "README, MPS",
            "a client has 1/replicas of memory and threads",
            "tests/admission/test_nvidia_answers.py::test_our_answer_is_theirs_but_for_the_listed_differences",
            "the same, by variables of its own",
        ),
        kept(
            "README, MPS",
            "more than one replica is refused by default",
            "tests/settings/test_nvidia_settings.py::test_several_replicas_are_refused_under_mps_unless_said_otherwise",
        ),
        different(
            "README, MPS",
            "beside MIG the plugin does not start",
            "instances are given whole",
            _UNITS + "test_replicas_of_instances_are_time_slices_alone",
        ),
        different(
            "README",
            "time-slicing and MPS exclude each other",
            "MPS counts, and a warning names the other's keys",
            _PLUGIN + "test_mps_is_used_in_the_place_of_time_slicing",
        ),
        different(
            "README, time-slicing",
            "replicas are of nobody's memory and compute",
            "so they are, and with `nvidia.sharing: shares` each is limited",
            _NODE + "test_replicas_that_are_shares_are_held_to_their_part",
        ),
        different(
            "internal/rm",
            "a GPU is `nvidia.com/gpu` alone",
            "also parts of it by the other names; one that is given whole is out of the shares",
            _NODE + "test_a_gpu_given_whole_is_out_of_the_shares_also_over_a_restart",
        ),
        different(
            "internal/cdi",
            "a CDI specification of its own, `k8s.device-plugin.nvidia.com/gpu`",
            "`nvidia.com/gpu`; nvidia-ctk's is used where it names the GPUs",
            "tests/isolation/test_cdi_specs.py::test_where_nvidia_ctk_names_all_nothing_is_written",
        ),
        different(
            "sharing.mps",
            "the plugin's own daemon",
            "this project's, manifests/mps-daemon",
            "tests/agent/test_mps_node.py::test_a_share_finds_the_deployers_daemon_and_its_own_limits_inside_its_process",
        ),
    ),
    "Health": (
        kept(
            "internal/rm/health.go",
            "Xids 13, 31, 43, 45, 68, 109 leave a GPU healthy",
            "tests/settings/test_nvidia_plugin.py::test_xids_that_leave_a_gpu_healthy",
        ),
        different(
            "internal/plugin/server.go",
            "no way back from Unhealthy",
            "three probes, or a reset, and the GPU is back",
            "tests/agent/test_health_node.py::test_xid_79_takes_the_gpu_away_and_a_reset_brings_it_back",
        ),
        different(
            "internal/rm/health.go",
            "events that cannot be waited for make all GPUs Unhealthy",
            "they are waited for anew, and the GPUs polled",
            "tests/gpus/test_nvml_events.py::test_a_failing_wait_is_reported_once_and_the_set_is_made_again",
        ),
        different(
            "internal/rm/health.go",
            "an Xid whose GPU is unknown makes all Unhealthy",
            "none, and they are polled at once",
            "tests/gpus/test_watch.py::test_an_event_of_no_gpu_makes_none_unhealthy_and_is_followed_by_a_poll",
        ),
        kept(
            "internal/rm/health.go",
            "an Xid of a MIG instance is that instance's",
            "tests/gpus/test_nvml_mig.py::test_an_xid_names_its_instance",
        ),
        different(
            "internal/plugin, ListAndWatch",
            "a failure is a line of the log",
            "and an Event of the node, with the reason",
            "tests/gpus/test_observer.py::test_a_failure_and_a_recovery_are_reported_once_each_with_the_gpu_and_the_reason",
        ),
        kept(
            "reading notes, main",
            "a new kubelet socket is registered with again",
            "tests/agent/test_faults_kubelet.py::test_a_kubelet_restarted_at_any_moment_of_an_admission_admits_again_what_it_had_begun",
        ),
    ),
    "Labels and devices": (
        kept("GPU Feature Discovery", "labels of whole GPUs", _LABELS + "test_whole_gpus"),
        kept("GPU Feature Discovery", "labels of MIG profiles", _LABELS + "test_mixed_has_labels_of_each_profile"),
        kept(
            "GPU Feature Discovery",
            "`-SHARED`, replicas, sharing strategy, `mps.capable`",
            _LABELS + "test_replicas",
        ),
        kept(
            "GPU Feature Discovery",
            "with strategy `single` product, count and memory of the instances",
            _LABELS + "test_single_gives_the_instances_as_gpus",
        ),
        kept("GPU Feature Discovery", "`gpu.clique`", _LABELS + "test_the_clique_of_an_nvlink_fabric"),
        kept(
            "GPU Feature Discovery",
            "`vgpu.present`, `vgpu.host-driver-version`, `-branch`",
            _LABELS + "test_vgpus_are_known_by_their_pci_configuration",
        ),
        kept("GPU Feature Discovery", "`gpu.family`", _LABELS + "test_families"),
        different(
            "GPU Feature Discovery",
            "by Node Feature Discovery, which need be there",
            "by the agent itself, with `nvidia.labels`; labels of GPU Feature Discovery are left alone",
            _LABELS + "test_labels_of_gpu_feature_discovery_are_left_alone",
        ),
        kept(
            "deviceListStrategy",
            "`envvar`, `volume-mounts`, `cdi-annotations`, `cdi-cri`",
            "tests/admission/test_golden_edits.py::test_the_edits_are_those_that_were_read",
        ),
        kept(
            "README, move",
            "running pods keep their GPUs",
            "tests/e2e/test_nvidia.py::test_a_node_is_moved_from_nvidias_plugin_while_pods_run",
        ),
        kept(
            "this project",
            "a node with NVIDIA's names alone: `resources.enabled: false`",
            _NODE + "test_a_node_may_offer_nvidias_names_alone",
        ),
    ),
}
