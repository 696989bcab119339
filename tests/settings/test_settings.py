"""Settings: where they come from, which place wins, and what a mistake reads like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_settings import InitSettingsSource

from gpushare_agent.core.settings.reference import all_keys, help_text
from gpushare_agent.core.settings.settings import Settings, SettingsError, load_settings
from gpushare_agent.core.settings.sources import read_flags, read_variables, split_flags
from gpushare_agent.core.settings.tree import SOURCES
from gpushare_agent.core.settings.values import parse_duration


@pytest.fixture
def directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="gs", dir="/tmp") as name:
        yield Path(name)


def problems_of(*argv: str, environ: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load_settings(argv, environ or {})
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def write(directory: Path, text: str | bytes) -> str:
    path = directory / "settings.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(directory: Path) -> None:
    """Each place wins over those after it, key by key, and the source of each key is known."""
    path = write(directory, "web: {port: 1, addr: from-file}\nlog: {level: debug}\nsample_period_s: 3\n")
    environ = {"GPUSHARE_WEB__PORT": "2", "GPUSHARE_LOG__LEVEL": "error", "GPUSHARE_CONFIG": path}
    loaded = load_settings(["--query-port=3"], environ)
    assert (loaded.settings.web.port, loaded.sources["web.port"]) == (3, "flag --query-port")
    assert (loaded.settings.log.level, loaded.sources["log.level"]) == ("error", "variable GPUSHARE_LOG__LEVEL")
    assert (loaded.settings.web.addr, loaded.sources["web.addr"]) == ("from-file", f"file {path}")
    assert (loaded.settings.log.format, loaded.sources["log.format"]) == ("auto", "default")
    assert set(loaded.sources) == {key.name for key in all_keys()}


def test_the_tree_takes_any_sources_of_pydantic_settings() -> None:
    """The first wins key by key, and the argument of the sources is no setting."""
    own = InitSettingsSource(Settings, {"web": {"port": 1, "addr": "own"}, "node_name": "own"})
    arguments: dict[str, Any] = {SOURCES: [read_flags(["--web.port=2", "--node-name="]), own]}
    settings = Settings(**arguments)
    assert (settings.web.port, settings.web.addr, settings.node_name) == (2, "own", "own")
    assert Settings() == Settings.model_validate({}) and settings.web.model_fields_set == {"port", "addr"}


def test_every_variable_is_read_as_the_key_that_the_reference_gives_it() -> None:
    """Also lists and pairs, which are no JSON."""
    layer = read_variables({key.variable: f"a,{key.name}" for key in all_keys()})
    assert {name: raw.value for name, raw in layer.values.items()} == {key.name: f"a,{key.name}" for key in all_keys()}


def test_the_config_flag_beats_the_config_variable(directory: Path) -> None:
    """Only one file is read: the one that the stronger place names."""
    path = write(directory, "web: {port: 7}")
    loaded = load_settings(["--config", path], {"GPUSHARE_CONFIG": "/nonexistent"})
    assert loaded.settings.web.port == 7
    assert loaded.settings.config == Path(path)


def test_the_labels_of_a_stronger_place_replace_those_of_a_weaker_one(directory: Path) -> None:
    """Pairs are one value; they are not merged over the places."""
    path = write(directory, "node_labels: {zone: a, rack: 7, gpu: true, sold: yes}")
    labels = load_settings(["--config", path], {}).settings.node_labels
    assert labels == {"zone": "a", "rack": "7", "gpu": "true", "sold": "yes"}
    labels = load_settings(["--config", path, "--node-labels", "x=1, y=2"], {}).settings.node_labels
    assert labels == {"x": "1", "y": "2"}


def test_a_boolean_flag_may_stand_alone_or_take_a_word() -> None:
    """`--share-mode`, `--share-mode=true` and `--share-mode false` all work, and no other flag is swallowed."""
    assert load_settings(["--share-mode", "--query-port", "1"], {}).settings.share_mode is True
    assert load_settings(["--share-mode", "false"], {}).settings.share_mode is False
    assert load_settings(["--share-mode=no"], {}).settings.share_mode is False


def test_a_flag_given_twice_counts_the_last_time() -> None:
    """Wrappers append flags to override, as with gpu-manager."""
    assert load_settings(["--query-port=1", "--web.port=2"], {}).settings.web.port == 2


def test_flag_names_are_unique_and_variables_too() -> None:
    """No two settings share a spelling, also not when dots are written as dashes."""
    spellings = [name for key in all_keys() for name in key.flag_names]
    assert len(spellings) == len(set(spellings))
    assert len({key.variable for key in all_keys()}) == len(all_keys())


def test_every_setting_is_described_bounded_and_in_the_help() -> None:
    """A setting without a description, or a number without both bounds, is a mistake in the tree."""
    text = help_text(all_keys())
    for key in all_keys():
        assert key.description, key.name
        assert f"--{key.flag}" in text
        assert key.variable in text
        if key.field.annotation in (int, float):
            assert " from " in key.kind.allowed, key.name


def test_defaults_are_valid_and_the_tree_is_frozen() -> None:
    """The tree cannot change under the services that share it."""
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.driver = "simulated"
    with pytest.raises(ValidationError):
        settings.web.port = 1


def test_the_tree_alone_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only load_settings reads variables, and only those it gets."""
    monkeypatch.setenv("GPUSHARE_WEB__PORT", "1")
    monkeypatch.setenv("web", '{"port": 2}')
    monkeypatch.setenv("driver", "simulated")
    assert Settings().web.port == 5678
    assert load_settings([], {}).settings == load_settings([], {"HOME": "/root"}).settings


def test_the_node_name_is_the_flag_else_node_name_else_the_host() -> None:
    """It is never empty, and the source names which it was."""
    environ = {"NODE_NAME": "from-downward-api"}
    assert load_settings(["--node-name=n"], environ).settings.node_name == "n"
    loaded = load_settings(["--hostname-override="], environ)
    assert (loaded.settings.node_name, loaded.sources["node_name"]) == ("from-downward-api", "variable NODE_NAME")
    loaded = load_settings([], {})
    assert loaded.settings.node_name
    assert loaded.sources["node_name"] == "host name"


def test_several_memories_are_as_many_simulated_gpus() -> None:
    """Unless their number is given, or a topology file has it."""
    sizes = "--gpu-memory-mib=1024,2048,4096"
    assert load_settings([sizes], {}).settings.simulated.gpus == 3
    assert load_settings([sizes, "--topology=/t"], {}).settings.simulated.gpus == Settings().simulated.gpus
    assert load_settings(["--gpu-memory-mib=1024"], {}).settings.simulated.gpus == Settings().simulated.gpus


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--web.port=70000"], ["flag --web.port", "'70000'", "GPUSHARE_WEB__PORT", "from 0 to 65535"]),
        (["--query-port", "abc"], ["flag --query-port", "'abc'", "--web.port", "whole number"]),
        (["--driver", "cuda"], ["'cuda'", "GPUSHARE_DRIVER", "nvml, simulated"]),
        (["--sample-period", "5 days"], ["flag --sample-period", "'5 days'", "1m30s"]),
        (["--share-mode=maybe"], ["'maybe'", "true or false"]),
        (["--gpu-memory-mib", "1,x"], ["flag --gpu-memory-mib", "'1,x'", "comma list"]),
        (["--gpu-memory-mib", "0"], ["from 1 to"]),
        (["--gpus=2", "--gpu-memory-mib=1,2,3"], ["3 values for 2 GPUs", "--gpu-memory-mib"]),
        (["--node-labels", "novalue"], ["'novalue'", "zone=a"]),
        (["--resources.vcore", "x y"], ["'x y'", "tencent.com/vcuda-core"]),
        (["--resources.vcore", "a." * 60 + "b/vcore-x"], ["of 129 characters", "at most 127"]),
        (["--resources.vcore=a.b/c", "--resources.vmemory=a.b/c"], ["two resources", "--resources.vcore"]),
        (["--node-name", "UPPER_case"], ["'UPPER_case'", "small letters"]),
        (["--device-plugin-path="], ["flag --device-plugin-path", "a path"]),
        (["--extender.quota-name=A"], ["'A'", "name of a Kubernetes object"]),
        *(
            (
                ["--dra.nvidia-names", f"--dra.consumable-shares={bad}"],
                [f"'{bad}'", "memory, unlimited, or a number from 1"],
            )
            for bad in ("1.5", "-3", "1000", "unmemory", "")
        ),
        (["--topolgy", "file"], ["--topolgy is unknown", "did you mean --topology?"]),
        (["--resources.enabled=false"], ["resources.enabled is false", "dra.gpus"]),
        (["--v=loud"], ["flag --v", "'loud'", "klog's number"]),
        (["--log-dir"], ["flag --log-dir needs a value"]),
        (["--address=3456"], ["flag --address", "127.0.0.1:3456"]),
        (["--master=h:8080"], ["flag --master is unknown", "--kubeconfig"]),
        (["-x"], ["'-x' is not understood"]),
        (["--query-port"], ["--query-port needs a value", "GPUSHARE_WEB__PORT"]),
        (["--node-name", "--share-mode"], ["--node-name needs a value"]),
    ],
)
def test_a_bad_flag_ends_in_one_line_that_tells_what_is_allowed(argv: list[str], expected: list[str]) -> None:
    """The line names the flag as it was written, the value, the variable and what is allowed."""
    (problem,) = problems_of(*argv)
    assert all(part in problem for part in expected), problem


def test_a_number_of_shares_may_be_one_of_yaml(directory: Path) -> None:
    path = write(directory, "dra: {nvidia_names: true, consumable_shares: 4}")
    assert load_settings(["--config", path], {}).settings.dra.consumable_shares == "4"


def test_every_mistake_is_reported_at_once(directory: Path) -> None:
    """A person corrects all of them in one go."""
    path = write(directory, "web: {prt: 1}\nhealth: {check_period_s: .nan}\nnode_name: 5")
    found = problems_of("--nope", "--gpus=-1", environ={"GPUSHARE_LOG_LEVEL": "x", "GPUSHARE_CONFIG": path})
    assert len(found) == 6
    assert any("GPUSHARE_LOG__LEVEL" in problem for problem in found)


def test_variables_of_kubernetes_service_links_are_passed_over() -> None:
    """A Service named gpushare-… makes variables that begin like ours; the agent starts all the same."""
    environ = {
        "GPUSHARE_SERVICE_HOST": "10.0.0.1",
        "GPUSHARE_SERVICE_PORT": "80",
        "GPUSHARE_AGENT_SERVICE_PORT_METRICS": "80",
        "GPUSHARE_PORT": "tcp://10.0.0.1:80",
        "GPUSHARE_AGENT_PORT_80_TCP": "tcp://10.0.0.1:80",
        "GPUSHARE_AGENT_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings([], environ).settings == load_settings([], {}).settings
    (problem,) = problems_of(environ={"GPUSHARE_WEB_PORT": "80"})
    assert "GPUSHARE_WEB__PORT" in problem


BOMB = "a: &a [x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (BOMB, "aliases are not allowed (line 2"),
        (f"web: {{port: 0x{'f' * 6000}}}\n", "a number has 6002 characters, 40 are read (line 1"),
        ("web: {? !!binary aGk= : 1}\n", "tags are not allowed (line 1"),
        ("web: {2026-01-01: 1}\n", "key web.2026_01_01 is unknown"),
        ("web: {port: 1, port: 2}\n", "'port' is given twice"),
        ("just text", "must be a mapping"),
        ("web: [", "line 1"),
        ("? [a]\n: 1\n", "plain text"),
        (b"\xff\xfe\x00\x00x", "it is no text"),
        (b"web: \x01\n", "it is no text"),
        ("[" * 5000, "nested too deeply"),
        ("#" * (1 << 20) + "\n", "larger than 1 MiB"),
        ("#" * (1 << 18) + "\n", "262145 bytes, 262144 are read"),
        ("web: 5\n", "web is '5', but must be a mapping"),
        ("config: /other\n", "config cannot be set in a file"),
        ("kubelet: {api_prt: 1}\n", "did you mean kubelet.api_port?"),
        ("kubelet: {pod_lookup_timeout_s: true}\n", "True is not allowed for --kubelet.pod-lookup-timeout-s"),
        ("simulated: {gpus: 1.5}\n", "1.5 is not allowed"),
        ("driver: [nvml]\n", "one of nvml, simulated"),
    ],
)
def test_a_bad_file_ends_in_one_line_that_names_it(directory: Path, content: str | bytes, expected: str) -> None:
    """Hostile, broken and merely mistaken files are all reported in a line with the file's name."""
    path = write(directory, content)
    (problem,) = problems_of("--config", path)
    assert path in problem
    assert expected in problem


def test_of_a_file_full_of_mistakes_fifty_are_reported(directory: Path) -> None:
    """The messages go to the log and into an Event; looking for the name that was meant takes time for each."""
    path = write(directory, "".join(f"web{n}: 1\n" for n in range(60)))
    problems = problems_of("--config", path)
    assert len(problems) == 51
    assert problems[-1].endswith("there may be more mistakes; correct these first")


def test_a_missing_file_and_a_directory_are_reported(directory: Path) -> None:
    """The line names the place that names the file."""
    (problem,) = problems_of(environ={"GPUSHARE_CONFIG": f"{directory}/none.yaml"})
    assert problem.startswith("variable GPUSHARE_CONFIG: cannot read")
    (problem,) = problems_of("--config", str(directory))
    assert "directory" in problem


def test_an_empty_file_and_empty_sections_mean_the_defaults(directory: Path) -> None:
    """A file with everything commented out is a good start."""
    path = write(directory, "web:\n#  port: 1\nlog: {level: }\n")
    assert load_settings(["--config", path], {}).settings.web.port == 5678


def test_indexes_of_gpus_in_the_file_may_be_numbers(directory: Path) -> None:
    """As every person writes them. `true` is no index."""
    path = write(directory, "excluded_gpus: [0, GPU-1]\nmig: {on_demand: 2}\ndra: {gpus: [1, 12]}\n")
    settings = load_settings(["--config", path], {}).settings
    assert (settings.excluded_gpus, settings.mig.on_demand, settings.dra.gpus) == (("0", "GPU-1"), ("2",), ("1", "12"))
    for wrong in ("true", "[true]", "[1.5]"):
        assert "mig.on-demand" in problems_of("--config", write(directory, f"mig: {{on_demand: {wrong}}}\n"))[0]


def test_dashes_may_replace_underscores_in_the_file(directory: Path) -> None:
    """People copy flag names into files."""
    path = write(directory, "kubelet: {pod-lookup-timeout-s: 1}\nshare-mode: no\n")
    settings = load_settings(["--config", path], {}).settings
    assert settings.kubelet.pod_lookup_timeout_s == 1
    assert settings.share_mode is False


@given(st.integers(0, 10_000), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_go_durations_add_up(hours: int, minutes: int, seconds: int, milliseconds: int) -> None:
    """Each unit counts its own."""
    text = f"{hours}h{minutes}m{seconds}s{milliseconds}ms"
    assert parse_duration(text) == pytest.approx(hours * 3600 + minutes * 60 + seconds + milliseconds / 1000)


def test_a_duration_of_hundreds_of_digits_is_none() -> None:
    """The sum of two of them is larger than any number of Python's, which was an OverflowError."""
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration("9" * 305 + "h" + "9" * 305 + "h")


@given(
    st.lists(st.text(max_size=12) | st.sampled_from(["--gpus", "--gpus=3", "--share-mode", "true", "4"]), max_size=6)
)
def test_no_command_line_ends_in_anything_but_settings_or_a_settings_error(argv: list[str]) -> None:
    """Whatever is typed, the answer is settings or readable lines."""
    try:
        load_settings(argv, {})
    except SettingsError as error:
        assert error.problems


def test_splitting_takes_the_settings_flags_with_their_values_and_leaves_the_rest() -> None:
    """Another command's own words and flags stay in order; a name that it claims stays with it."""
    argv = ["apply", "--gpus", "4", "-f", "x.yaml", "--share-mode", "--once", "--query-port=1", "--topology", "t"]
    mine, others = split_flags(argv, leave=frozenset({"--topology"}))
    assert mine == ["--gpus", "4", "--share-mode", "--query-port=1"]
    assert others == ["apply", "-f", "x.yaml", "--once", "--topology", "t"]


def test_a_resource_name_of_127_characters_is_taken() -> None:
    """The longest name that the kubelet's answers can be scanned for is no error."""
    name = "a." * 60 + "b/vcore"
    assert len(name) == 127
    assert load_settings(["--resources.vcore", name], {}).settings.resources.vcore == name


def test_the_nodes_places_follow_from_one_root_but_for_those_that_are_named() -> None:
    """The kubelet's from its own, where that is named, but for its device plugins, which it keeps at one place; what is of
    this process or of the kernel is left where it is."""
    loaded = load_settings(["--root=/x", "--mps-pipe=/pipe", "--kubelet.root-dir=/k"], {"GPUSHARE_DISPLAY__SOCKET": ""})
    settings = loaded.settings
    assert settings.cdi.spec_directories == (Path("/x/etc/cdi"), Path("/x/var/run/cdi"))
    assert settings.claim_directory == Path("/x/var/lib/gpushare-agent/claims")
    assert settings.kubelet.device_plugin_path == Path("/x/var/lib/kubelet/device-plugins")
    assert settings.kubelet.pod_resources_socket == Path("/k/pod-resources/kubelet.sock")
    assert (settings.mps.pipe_directory, settings.display.socket) == (Path("/pipe"), None)
    assert settings.runtime.proc_root == Path("/proc") and settings.libgpushare.library.is_relative_to("/usr")
    assert loaded.sources["virtual_manager.path"] == "flag --root"
    assert load_settings(["--root=/x"], {}).settings.kubelet.root_dir == Path("/x/var/lib/kubelet")


def test_claims_need_a_place_for_their_records() -> None:
    with pytest.raises(SettingsError, match=r"dra\.gpus and mig\.on_demand need state_directory"):
        load_settings(["--dra.gpus=all", "--state-directory="], {})
