"""libgpushare with one fault in it: a test must fail by each. Without each of its hooks, so that a program gets the driver's
function; and with functions of the library that do nothing, or answer always the same.

What a fault of SURVIVORS changes no test can see, for the reason that is given there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from native.build_gpushare import CALL, FLAGS, SOURCES, CannotBuildError, run
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import ROOT, GpushareBuilt, Machine
from tests.gpushare.test_every_hook import HOOKED, UNSEEN, container, has_effect
from tests.native.build import cuda_include

pytestmark = pytest.mark.mutants

HOOKS, MEMORY, GPUS, HARD, COMPUTE = (
    f"tests/gpushare/test_{name}.py" for name in ("every_hook", "memory", "several_gpus", "hard_programs", "compute")
)
OF_MEMORY, OF_COMPUTE = (HOOKS, MEMORY, GPUS), (HOOKS, COMPUTE, HARD)


@dataclass(frozen=True, slots=True)
class Fault:
    """A function of the library that begins with another statement; and the tests of which one must fail."""

    function: str
    statement: str
    tests: Sequence[str] = OF_MEMORY

    def __str__(self) -> str:
        return f"{self.function}: {self.statement}"


FAULTS = [
    Fault("map_to_hook", "return;"),
    Fault("entry_at", "return NULL;"),
    Fault("entry_of_version", "return NULL;"),
    Fault("hooked_entry", "return NULL;"),
    Fault("hook_or_nothing", "return entry->hook;", ["tests/gpushare/test_library.py"]),
    Fault("leave_hook", "return;"),
    Fault("take_bytes", "return true;"),
    Fault("take_bytes", "return false;"),
    Fault("give_bytes", "return;"),
    Fault("charge_bytes", "return;"),
    Fault("reclaim_dead", "return;"),
    Fault("is_above", "return false;"),
    Fault("attribute", "return;"),
    Fault("with_unattributed", "return held;"),
    Fault("note_change", "return;"),
    Fault("free_unused", "return false;"),
    Fault("settle_freed", "return;"),
    Fault("keep", "return result;"),
    Fault("amend", "return;"),
    Fault("give_all_of", "return;"),
    Fault("device_of_node", "return -1;"),
    Fault("is_without_processors", "return false;"),
    Fault("is_without_processors", "return true;"),
    Fault("device_at", "return -1;"),
    Fault("device_at", "return current_device();"),
    Fault("charge_difference", "return;"),
    Fault("is_capturing", "return false;", (*OF_MEMORY, COMPUTE)),
    Fault("is_capturing", "return true;"),
    Fault("relax_capture", "return CU_STREAM_CAPTURE_MODE_RELAXED;", (*OF_MEMORY, HARD)),
    Fault("restore_capture", "return;", (*OF_MEMORY, HARD)),
    Fault("read_pool", "return;"),
    Fault("read_pools", "return;"),
    Fault("known_pool", "return NULL;"),
    Fault("drop_handle", "return;"),
    Fault("hold_handle", "return;"),
    Fault("bytes_of_level", "return 0;"),
    Fault("bytes_of_array", "return 0;"),
    Fault("sixteenths_of", "return 64;"),
    Fault("count_context", "return true;"),
    Fault("drop_context", "return;"),
    Fault("settle_primary", "return result;"),
    Fault("forget_memory", "return;", (*OF_MEMORY, HARD)),
    Fault("read_graph_memory", "return;"),
    Fault("bytes_of_graph", "return 0;"),
    Fault("remember_graph", "return result;"),
    Fault("forget_graph", "return result;"),
    Fault("launch_with_more_memory", "return real(executable, stream);"),
    Fault("begin_launch", "*measurement = (struct measurement){.gpu = -1}; return;", OF_COMPUTE),
    Fault("end_launch", "return;", OF_COMPUTE),
    Fault("begin_wait", "return;", OF_COMPUTE),
    Fault("forget_launches_of", "return;", (*OF_COMPUTE, MEMORY)),
    Fault("forget_launches", "return;", OF_COMPUTE),
    Fault("notice_fork", "return;", (*OF_MEMORY, HARD)),
    Fault("register_process", "return;", ["tests/gpushare/test_registration.py"]),
    Fault("gpu_of_device", "return 0;"),
    Fault("read_share", "return false;"),
    Fault("list_slots", "return 0;"),
    Fault("used_on_whole_gpu", "return 0;"),
]
SURVIVORS = {
    "entry_of_version: return NULL;": "for drivers that answer with other functions than they export: the fake one does not",
}
SMOKE = (
    "cuMemAlloc_v2",
    "cuMemFreeAsync_ptsz",
    "cuMemsetD2D16Async",
    "map_to_hook: return;",
    "take_bytes: return true;",
)


def marked(name: str) -> list[pytest.MarkDecorator]:
    survives = (
        [pytest.mark.xfail(strict=True, raises=AssertionError, reason=SURVIVORS[name])] if name in SURVIVORS else []
    )
    return survives + [pytest.mark.smoke] * (name in SMOKE)


class Builder:
    """Compiles what a change changes, and links that with the rest of the library."""

    def __init__(self, directory: Path) -> None:
        self._base = directory / "base"
        self._include = cuda_include()
        self._texts: dict[str, str] = {}
        self._texts = self._compile(self._base, {})

    def build(self, library: Path, changed: Mapping[str, str]) -> Path:
        """`changed`: new texts of files of native/gpushare. Raises CannotBuildError."""
        scratch = library.parent / "objects"
        self._compile(scratch, changed)
        objects = [one if (one := scratch / path.name).exists() else path for path in sorted(self._base.glob("*.o"))]
        links = ["-Wl,-z,now", "-Wl,-soname,libgpushare.so", f"-Wl,--version-script={scratch / 'exports.map'}"]
        run(["cc", *FLAGS, *map(str, objects), *links, "-o", str(library), "-ldl", "-lpthread"])
        return library

    def _compile(self, scratch: Path, changed: Mapping[str, str]) -> dict[str, str]:
        shutil.copytree(SOURCES, scratch)
        for name, text in changed.items():
            (scratch / name).write_text(text, encoding="utf-8")
        run([sys.executable, str(scratch / "generate.py"), str(self._include), str(scratch)])
        texts = {
            path.name: path.read_text(encoding="utf-8") for path in scratch.iterdir() if path.suffix in (".c", ".h")
        }
        has_other_heads = any(text != self._texts.get(name) for name, text in texts.items() if name.endswith(".h"))
        includes = [f"-I{path}" for path in (scratch, CALL.parent, self._include)]
        places = ["-w", '-DGPUSHARE_DIRECTORY="."', '-DGPUSHARE_NODES="."']
        for source in [*(scratch / name for name in texts if name.endswith(".c")), CALL]:
            is_same = texts.get(source.name) == self._texts.get(source.name)
            if has_other_heads or not is_same:
                output = scratch / f"{source.stem}.o"
                run(["cc", *FLAGS, *places, *includes, "-c", str(source), "-o", str(output)])
        return texts


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    try:
        return Builder(tmp_path_factory.mktemp("mutants"))
    except CannotBuildError as error:
        pytest.skip(str(error))


def without_hook(name: str) -> str:
    """hooks.in where it is only called."""
    text = (SOURCES / "hooks.in").read_text(encoding="utf-8")
    changed, count = re.subn(rf"^(hook .*?) {name}(?= |$)", r"\1", text, flags=re.MULTILINE)
    assert count == 1
    return f"{changed}call: {name}\n"


@pytest.mark.parametrize("name", [pytest.param(name, marks=marked(name)) for name in HOOKED if name not in UNSEEN])
def test_without_a_hook_its_test_fails(builder: Builder, machine_with: MachineWith, tmp_path: Path, name: str) -> None:
    library = builder.build(tmp_path / "libgpushare.so", {"hooks.in": without_hook(name)})
    machine = machine_with()
    machine = Machine(replace(machine.built, library=library), machine.directory, {})
    with pytest.raises(AssertionError):
        assert has_effect(container(machine), "does", name)


def with_fault(fault: Fault) -> dict[str, str]:
    """The file that has the function, changed."""
    definition = re.compile(rf"^(?:[\w *]+\b|[\w *]+\*){fault.function}\([^;{{]*\)\n{{", re.MULTILINE)
    one_line = re.compile(rf"^(?:[\w *]+\b|[\w *]+\*){fault.function}\([^;{{\n]*\) {{", re.MULTILINE)
    for path in sorted(SOURCES.glob("*.c")):
        text = path.read_text(encoding="utf-8")
        if found := definition.search(text) or one_line.search(text):
            return {path.name: f"{text[: found.end()]} {fault.statement} {text[found.end() :]}"}
    raise LookupError(f"the library has no function {fault.function} any more: what does what it did?")


@pytest.mark.parametrize("fault", [pytest.param(fault, id=str(fault), marks=marked(str(fault))) for fault in FAULTS])
def test_with_a_fault_a_test_fails(
    builder: Builder,
    gpushare: GpushareBuilt,
    tmp_path: Path,
    fault: Fault,
    record_property: Callable[[str, object], None],
) -> None:
    """By which one it was seen is in the file of `--junitxml`."""
    shutil.copytree(
        gpushare.library.parent, tmp_path, dirs_exist_ok=True, symlinks=True
    )  # other users may come by it there
    builder.build(tmp_path / gpushare.library.name, with_fault(fault))
    flaky: list[str] = []
    while seen_by := failing(tmp_path, *fault.tests, *(f"--deselect={test}" for test in flaky)):
        if failing(tmp_path, seen_by) and not failing(gpushare.library.parent, seen_by):
            record_property("seen_by", seen_by)
            return
        flaky.append(seen_by)  # it fails for another reason, as on a machine that is busy
    raise AssertionError(f"no test has seen it; {flaky=}")


def failing(built: Path, *tests: str) -> str:
    """The first of these tests that fails with what is built there; empty: none does."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "isolation", f"--built={built}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    env = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    assert done.returncode == (pytest.ExitCode.TESTS_FAILED if found else pytest.ExitCode.OK), done.stdout + done.stderr
    return found[0] if found else ""
