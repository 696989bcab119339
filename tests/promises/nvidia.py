"""NVIDIA's device plugin v0.20.0. Its keys, variables and flags have a table of their own (settings/nvidia_options.py)."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept

_NODE = "tests/agent/test_nvidia_node.py::"
_UNITS = "tests/admission/test_units.py::"
_LABELS = "tests/cluster/test_feature_labels.py::"

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
            "the seed's FIXME",
            "no way back from Unhealthy",
            "three probes, or a reset, and the GPU is back",
            "tests/agent/test_health_node.py::test_xid_79_takes_the_gpu_away_and_a_reset_brings_it_back",
        ),
        kept(
            "failOnInitError",
            "the start ends, or waits for a driver",
            "tests/agent/test_faults_gpus.py::test_without_a_driver_and_reported_to_stay_the_agent_serves_no_device",
        ),
        kept(
            "the seed's main",
            "a new kubelet socket is registered with again",
            "tests/agent/test_faults_kubelet.py::test_a_kubelet_restarted_at_any_moment_of_an_admission_admits_again_what_it_had_begun",
        ),
    ),
    "Labels and devices": (
        kept("GPU Feature Discovery", "labels of whole GPUs", _LABELS + "test_whole_gpus"),
        kept("GPU Feature Discovery", "labels of MIG profiles", _LABELS + "test_mixed_has_labels_of_each_profile"),
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
