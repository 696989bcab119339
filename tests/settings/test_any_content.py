"""Whatever stands in a file that the agent reads at its start: it is settings, or an error that a person can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare_agent.agent.admission.resizing import ResizeFile
from gpushare_agent.agent.delivery.cdi_files import CdiFiles, _NoSpecError, _spec
from gpushare_agent.agent.delivery.device_nodes import read_extra_devices
from gpushare_agent.agent.delivery.volume_config import read_volume_config
from gpushare_agent.agent.dra.claim_files import ClaimFiles
from gpushare_agent.agent.gpus.part import open_driver
from gpushare_agent.agent.gpus.saved_health import HealthStateFile
from gpushare_agent.agent.kubelet.records import read_checkpoint
from gpushare_agent.core.kit.shallow_yaml import MAX_DEPTH
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.settings.node_configuration import NamedConfiguration
from gpushare_agent.core.settings.nvidia_options import OPTIONS
from gpushare_agent.core.settings.reference import all_keys
from gpushare_agent.core.settings.settings import SettingsError, load_settings
from gpushare_agent.core.settings.yaml import UnreadableYaml, parse_yaml
from gpushare_agent.sandbox.manifests import ManifestError, parse_manifests
from gpushare_agent.sandbox.runtime.cdi_resolver import _devices

SEXAGESIMAL = "1:" * 600 + "1.0"
"""As YAML 1.1's float it is larger than any."""

_SCALARS = st.sampled_from([
    SEXAGESIMAL, "1:30", "yes", "No", "0o17", "017", "0x1F", "1e999", "-.inf", ".nan", ".", "-", "~", "<<", "=", "1_000",
    "2026-01-01", "2026-13-45", "9" * 39, "9" * 400, "9" * 305 + "h" + "9" * 305 + "h", "true", "all", '"\\ud800"', '"\\0"',
    '"a\\nb"', '"\\UFFFFFFFF"', "'", "!!float x",
    "&a b", "*a", "", "envvar", "v1", "gpu", "[]", "{}", "[[[", "a: b: c", "\t", "%",
])  # fmt: skip
_LEAVES = _SCALARS | st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)
_NAMES = st.sampled_from(sorted({
    *(part for key in all_keys() for part in key.name.split(".")),
    *(part for option in OPTIONS for part in option.name.split(".")),
    "default", "devices", "volume", "version", "resources", "replicas", "name", "cards", "shares", "kind", "spec",
}))  # fmt: skip
_FLOWS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(_NAMES | _LEAVES, inner), max_size=3).map(
            lambda pairs: f"{{{', '.join(f'{name}: {value}' for name, value in pairs)}}}"
        )
    ),
    max_leaves=8,
)
_YAML = st.lists(st.tuples(_NAMES | _LEAVES, _FLOWS), max_size=4).map(
    lambda pairs: "".join(f"{name}: {value}\n" for name, value in pairs).encode("utf-8", "surrogatepass")
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())
CONTENT = st.binary(max_size=60) | _YAML | _JSON


def _settings_file(path: Path) -> None:
    load_settings(["--config", str(path)], {})


def _node_configuration(path: Path) -> None:
    load_settings([], {}, NamedConfiguration(name="a", content=path.read_bytes()))


def _nvidia_configuration(path: Path) -> None:
    load_settings([], {"CONFIG_FILE": str(path)})


def _topology(path: Path) -> None:
    driver = open_driver(load_settings(["--driver=simulated", "--topology", str(path)], {}).settings)
    asyncio.run(driver.close())


def _state_files(path: Path) -> None:
    content = path.read_bytes()
    asyncio.run(HealthStateFile(path).load())
    path.write_bytes(content)
    asyncio.run(ResizeFile(path).load())


def _claim_record(path: Path) -> None:
    record = path.with_name("11111111-2222-3333-4444-555555555555.json")
    path.rename(record)
    ClaimFiles(path.parent, path.parent).load()


READERS: dict[str, Callable[[Path], object]] = {
    "settings.yaml": _settings_file,
    "node configuration": _node_configuration,
    "configuration of NVIDIA's plugin": _nvidia_configuration,
    "extra-config": read_extra_devices,
    "volume.conf": read_volume_config,
    "topology": _topology,
    "state files": _state_files,
    "kubelet's checkpoint": read_checkpoint,
    "claim record": _claim_record,
    "CDI spec": lambda path: CdiFiles([path.parent]).read(),
}


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="gs", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("name", READERS)
@settings(derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(content=CONTENT)
def test_no_content_of_a_file_ends_the_agent_without_a_line_for_people(
    directory: Path, name: str, content: bytes
) -> None:
    """Each error is one of the agent's own, which name the file; of settings one line for each mistake."""
    path = directory / ("spec.yaml" if name == "CDI spec" else "file")
    path.write_bytes(content)
    try:
        READERS[name](path)
    except SettingsError as error:
        assert error.problems
        assert all(problem and "\n" not in problem for problem in error.problems)
    except AgentError as error:
        assert str(error)


@pytest.mark.parametrize("piece", ["[", "{", "[{", "- ", "? ", "{a: ", "[\n"])
def test_deep_nesting_is_refused_before_it_takes_long(piece: str, short_dir: Path) -> None:
    """Each loader: of the settings, of CDI specs, of the sandbox's manifests. The scanner looks at few levels only."""
    content = piece * (100_000 // len(piece))
    deepest = 0

    def looked(self: yaml.scanner.Scanner) -> None:
        nonlocal deepest
        deepest = max(deepest, self.flow_level)
        real(self)

    real = yaml.scanner.Scanner.stale_possible_simple_keys
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml.scanner.Scanner, "stale_possible_simple_keys", looked)
        with pytest.raises(UnreadableYaml, match="nested too deeply"):
            parse_yaml(content.encode())
        with pytest.raises(_NoSpecError, match="nested too deeply"):
            _spec(content.encode(), is_json=False)
        with pytest.raises(ManifestError, match="nested too deeply"):
            parse_manifests(content, "x")
        (short_dir / "x.yaml").write_text(content)
        assert _devices(short_dir / "x.yaml") == {}
    assert deepest <= MAX_DEPTH + 1


def test_what_is_nested_as_deep_as_manifests_are_is_read() -> None:
    depth = 80
    assert parse_yaml(("a: " + "[" * depth + "]" * depth).encode())


@pytest.mark.parametrize("name", ["settings.yaml", "node configuration", "configuration of NVIDIA's plugin"])
@pytest.mark.parametrize("text", [SEXAGESIMAL, '"\\ud800"', '"/x\\0"', '"\\UFFFFFFFF"'])
def test_what_no_setting_can_be_is_a_settings_error(directory: Path, name: str, text: str) -> None:
    """The reader's own errors, too: of a float of YAML 1.1 that is larger than any, and of halves of characters."""
    path = directory / "file"
    path.write_text(f"version: {text}\nsample_period_s: {text}\n" if "NVIDIA" in name else f"sample_period_s: {text}\n")
    with pytest.raises(SettingsError):
        READERS[name](path)


def test_a_claim_record_with_an_infinite_number_is_passed_over(directory: Path) -> None:
    """JSON of Python's has it; as a number of cores it was an OverflowError."""
    uid = "11111111-2222-3333-4444-555555555555"
    result = {"key": "a", "request": "a", "device": "gpu-0", "share_id": "", "gpu": "GPU-1", "cores": float("inf")}
    results = [{**result, "memory_mib": 1, "is_whole": False, "cdi_devices": []}]
    record = {
        "namespace": "n",
        "name": "c",
        "uid": uid,
        "pod": "p",
        "isolation": "none",
        "results": results,
        "spec": {},
    }
    (directory / f"{uid}.json").write_text(json.dumps(record))
    assert ClaimFiles(directory, directory).load() == []


def test_a_cdi_spec_with_a_character_that_there_is_not_is_passed_over(directory: Path) -> None:
    """It was an OverflowError, and no other spec was read either."""
    (directory / "spec.yaml").write_text('"\\UFFFFFFFF": []')
    (found,) = (one for one in CdiFiles([directory]).read() if one.path.endswith("spec.yaml"))
    assert "is no YAML" in found.problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"), ("Off", "Off"), ("1:30", "1:30"), (SEXAGESIMAL, SEXAGESIMAL), ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"), ("0b1", "0b1"), ("010", 10), ("0o17", 15), ("0x1F", 31), ("-5", -5), ("1e5", 1e5), (".5", 0.5),
        ("5.", 5.0), (".inf", float("inf")), ("-.INF", float("-inf")), ("~", None), ("", None), ("TRUE", True),
        ('"\\ud83d\\ude00"', "\N{GRINNING FACE}"), ("<<", "<<"), ("=", "="),
    ],
)  # fmt: skip
def test_a_scalar_means_what_the_core_schema_of_yaml_1_2_says(text: str, value: object) -> None:
    """Sexagesimal numbers, dates, and yes and no are of YAML 1.1 alone."""
    found = parse_yaml(f"a: {text}".encode())["a"]
    assert (found, type(found)) == (value, type(value))


@given(value=st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text())
def test_what_json_has_is_read_as_json_does(value: object) -> None:
    """Tabs included: the configuration of NVIDIA's plugin may be JSON that is indented by them."""
    text = json.dumps({"a": [value]}, indent="\t")
    try:
        assert parse_yaml(text.encode()) == json.loads(text, parse_constant=lambda word: word)
    except UnreadableYaml as error:
        assert isinstance(value, str) and not value.isprintable(), error
