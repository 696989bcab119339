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
from functools import cache
from pathlib import Path

import pytest

from native.build_gpushare import CALL, FLAGS, SOURCES, CannotBuildError, run
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import ROOT, GpushareBuilt, Machine
from tests.gpushare.test_every_hook import HOOKED, UNSEEN, container, has_effect, settings_for
from tests.native.build import cuda_include

pytestmark = pytest.mark.mutants

HOOKS, MEMORY, COUNTED, GPUS, INSTANCES, MANY, HARD, COMPUTE, FINDING, PLUGINS = (
    f"tests/gpushare/test_{name}.py"
    for name in (
        *("every_hook", "memory", "counted", "several_gpus", "instances", "many_processes"),
        *("hard_programs", "compute", "finding", "plugins"),
    )
)
OF_MEMORY, OF_COMPUTE = (HOOKS, MEMORY, COUNTED, GPUS), (HOOKS, COMPUTE, HARD)


@dataclass(frozen=True, slots=True)
class Fault:
    """A function of the library that begins with another statement, or has it instead of what a pattern finds. One of
    the tests must fail; or what every_hook.c does, if there are words for it, has no effect."""

    function: str
    statement: str
    tests: Sequence[str] = OF_MEMORY
    instead_of: str = ""
    words: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{self.function}: {self.instead_of and f'{self.instead_of} -> '}{self.statement}"


def no_effect(function: str, statement: str, of: str) -> Fault:
    """Of a hook, or of another action of every_hook.c."""
    return Fault(function, statement, words=("does", of) if of in HOOKED else (of,))


WAYS = f"{HOOKS}::test_a_program_comes_by_each_hook"
LATER = f"{FINDING}::test_a_function_of_a_later_cuda_is_the_driver_s_and_is_counted"
REASON = f"{FINDING}::test_a_function_that_is_not_found_leaves_the_loader_s_reason"
NEXT = "tests/gpushare/test_library.py::test_other_libraries_find_the_next_function"
OWN = f"{FINDING}::test_functions_of_the_program_s_own_are_its_own"
FORWARDS = f"{FINDING}::test_a_driver_that_forwards_to_another_one_is_limited_once"
DEEP = f"{PLUGINS}::test_a_plugin_of_rtld_deepbind_is_limited_and_bound_to_its_own"
MODULES = f"{COUNTED}::test_modules_are_counted_by_the_first_observation_while_a_program_goes_on_allocating"
MEANWHILE = f"{COUNTED}::test_what_a_program_held_meanwhile_is_not_taken_for_more"
CONTEXT = f"{COUNTED}::test_a_context_costs_what_the_agent_has_measured_until_it_sees_more_or_less"
EXPORTER = f"{COUNTED}::test_exported_memory_counts_for_the_importer_once_the_exporter_has_ended"
SIZES = f"{COUNTED}::test_memory_of_any_size_ends_within_a_page_of_the_share"
MANAGED = f"{COUNTED}::test_managed_memory_is_in_no_observation_and_stays_counted"
OWN_GPU = f"{GPUS}::test_memory_counts_on_its_own_gpu_whichever_is_current"
ENDS = f"{GPUS}::test_every_end_of_a_context_gives_back_what_it_had"
AT_ONCE = f"{HARD}::test_threads_that_begin_at_once_have_the_share_together"
NODES = f"{MEMORY}::test_memory_of_a_node_of_the_host_counts_where_it_is_the_gpus"
OTHER_NODES = f"{MEMORY}::test_the_node_of_another_gpu_is_refused"
QUIET = f"{MEMORY}::test_what_the_agent_observes_is_believed_once_nothing_changes"
WAITED = f"{MEMORY}::test_what_was_freed_is_given_back_when_the_program_has_waited"
FORK = f"{MEMORY}::test_a_child_of_fork_is_counted_beside_its_parent"
KILLED = f"{MEMORY}::test_a_killed_process_s_memory_is_free_at_once"
GRAPHS = f"{MEMORY}::test_a_graph_that_is_launched_has_its_memory_of_the_share"
UPLOADED = f"{MEMORY}::test_a_graph_that_is_uploaded_has_its_memory_of_the_share"
LONG, STREAMS, SEVERAL, RESTED = (
    f"tests/gpushare/test_turns.py::test_each_container_has_its_share[{cell}]"
    for cell in (
        *("alone 70 50ms", "streams 30 of 8 50ms async", "20 10ms + 30 1ms + 50 100us"),
        "start 30 gemm after 5us",
    )
)
WRONG_COSTS = f"{COMPUTE}::test_costs_that_are_wrong_are_put_right_by_what_the_agent_sees"

FAULTS = [
    # resolve.c, deepbind.c
    no_effect("map_to_hook", "return;", "cuGetProcAddress"),
    Fault("entry_at", "return NULL;", [WAYS]),
    Fault("entry_of_version", "return NULL;", [LATER]),
    Fault("entry_of_version", "true", [LATER], r"ask_again\(.*\) == function"),
    no_effect("hooked_entry", "return NULL;", "cuInit"),
    Fault("hook_or_found", "return entry->hook;", [OWN, "tests/gpushare/test_library.py"]),
    Fault("hook_or_found", "if (!found) return (void)dlerror(), NULL;", [REASON]),
    Fault("open_driver", ";", [REASON], r"\(void\)dlerror\(\);"),
    Fault(
        "loaded_function",
        "0",
        [f"{FINDING}::test_a_question_loads_no_driver_and_finds_none_that_is_not_loaded"],
        "RTLD_NOLOAD",
    ),
    Fault("is_hook_next", "return false;", [FINDING, NEXT]),
    Fault("is_hook_next", "return true;", [FINDING]),
    Fault("is_of_libc", "return true;", [FINDING, PLUGINS]),
    Fault("enter", "find_driver(driver, 0); notice_fork(); stay_within(frame); return true;", [FORWARDS]),
    no_effect("leave_hook", "return;", "cuMemAlloc_v2"),
    Fault(
        "__asan_default_options", 'return "";', [f"{FINDING}::test_programs_with_a_compiler_s_sanitizer_are_limited"]
    ),
    Fault("put", "return;", [DEEP]),
    Fault("put", ";", [f"{PLUGINS}::test_pages_that_were_read_only_are_so_again"], r"\(void\)mprotect\(.*;"),
    Fault("scan_object", "return 0;", [DEEP]),
    Fault("is_deep", "return false;", [DEEP]),
    Fault("loader_named", "return NULL;", [PLUGINS]),
    Fault(
        "search_path_of",
        "return 0;",
        [f"{PLUGINS}::test_where_the_caller_s_run_path_decides_the_plugin_is_found_there"],
    ),
    # region.c
    no_effect("take_bytes", "return true;", "cuMemAlloc_v2"),
    no_effect("take_bytes", "return false;", "cuMemAlloc_v2"),
    no_effect("give_bytes", "return;", "cuMemFree_v2"),
    Fault("charge_bytes", "return;", [SIZES, *OF_MEMORY]),
    Fault("reclaim_dead", "return;", [EXPORTER]),
    Fault("clear_dead", "return;", [EXPORTER]),
    Fault("is_above", "return false;", [KILLED]),
    Fault("attribute", "return;", [QUIET]),
    Fault("attribute", "if (seen->observed_at) believe_more(gpu, seen); return;", [QUIET, CONTEXT]),
    Fault(
        "attribute",
        "struct config_gpu late = *seen; late.observed_at = seen->observed_at ? UINT64_MAX : 0; seen = &late;",
        [MEANWHILE, COUNTED],
    ),
    Fault("believe_more", "return;", [MODULES]),
    Fault("raise_window", "return;", [MEANWHILE, COUNTED]),
    Fault("begin_window", "return false;", [MODULES]),
    Fault("is_raised_by_all", "return true;", [COUNTED]),
    Fault("note_end", "return;", [COUNTED]),
    Fault("seen_of", "return all->held + all->pending;", [MANAGED]),
    Fault("with_unattributed", "return held;", [QUIET]),
    Fault("forbid_cancel", "return;", [f"{HARD}::test_a_cancelled_thread_leaves_no_lock"]),
    Fault("waits_for_agent", "return true;", [f"{HARD}::test_a_sequence_that_stays_odd_stops_nobody"]),
    no_effect("list_slots", "return 0;", "nvmlDeviceGetComputeRunningProcesses"),
    # memory.c
    Fault("change_pages", "return bytes;", [SIZES]),
    Fault("bytes_of_pages", "return round_up(of->units, PAGE_UNITS) * UNIT_BYTES;", [SIZES]),
    Fault("free_unused", "return false;", [KILLED, MEMORY, COUNTED]),
    no_effect("settle_freed", "return;", "cuMemFree_v2"),
    no_effect("keep", "return result;", "cuMemFree_v2"),
    no_effect("amend", "return;", "cuGraphExecUpdate"),
    Fault("give_all_of", "return;", [ENDS]),
    Fault("current_context", "return NULL;", [ENDS]),
    Fault("device_of_node", "return -1;", [NODES]),
    Fault("is_without_processors", "return false;", [OTHER_NODES]),
    Fault("is_without_processors", "return true;", [OTHER_NODES]),
    Fault("device_at", "return -1;", [NODES]),
    Fault("device_at", "return current_device();", [OWN_GPU]),
    Fault("charge_difference", "return;", [SIZES, *OF_MEMORY]),
    Fault("change_size", "return bytes;", [SIZES]),
    no_effect("is_capturing", "return false;", "captures"),
    no_effect("is_capturing", "return true;", "cuMemAllocAsync"),
    no_effect("relax_capture", "return CU_STREAM_CAPTURE_MODE_RELAXED;", "captures"),
    no_effect("restore_capture", "return;", "captures"),
    no_effect("read_pool", "return;", "cuMemPoolTrimTo"),
    Fault("read_pools", "return;", [WAITED]),
    Fault(
        "read_pools",
        "trims",
        [f"{GPUS}::test_a_pool_that_has_more_than_is_in_use_ends_at_the_share"],
        r"trims \|\| .*is_ended",
    ),
    Fault("read_freed", "return;", [WAITED]),
    no_effect("find_pool", "return NULL;", "cuMemPoolTrimTo"),
    no_effect("known_pool", "return NULL;", "cuMemAllocAsync"),
    no_effect("remember_pool", "return;", "cuMemPoolCreate"),
    Fault("owner_of", "return otherwise;", [OWN_GPU]),
    Fault("is_of_user", "return false;", [OWN_GPU]),
    Fault("is_of_user", "return true;", [OWN_GPU]),
    Fault("lacking_in", "return bytes;", [SIZES]),
    no_effect("drop_handle", "return;", "cuMemUnmap"),
    no_effect("hold_handle", "return;", "cuMemMap"),
    no_effect("bind", "return result;", "cuMulticastBindMem"),
    no_effect("unbind", "return;", "cuMulticastUnbind"),
    no_effect("handle_at", "return 0;", "cuMulticastBindAddr"),
    no_effect("bytes_of_level", "return 0;", "formats"),
    no_effect("bytes_of_array", "return 0;", "cuArray3DCreate_v2"),
    no_effect("sixteenths_of", "return 64;", "formats"),
    Fault("reserve_context", "0 ?", [CONTEXT], r"limits\.context \?"),
    Fault("keep_context", "return result;", [ENDS]),
    Fault("drop_context", "return;", [ENDS]),
    Fault("settle_primary", "return result;", [ENDS]),
    no_effect("is_primary_known", "return true;", "cuDevicePrimaryCtxRetain"),
    no_effect("is_primary_known", "return false;", "cuDevicePrimaryCtxRetain"),
    Fault("cuDevicePrimaryCtxRetain", "false", [AT_ONCE], r"atomic_exchange\(&is_beginning.*true\)"),
    Fault("attribute_of", "return 1;", [OWN_GPU]),
    no_effect("bytes_for_each", "return 0;", "cuCtxSetLimit"),
    Fault("forget_memory", "return;", [FORK, HARD, *OF_MEMORY]),
    # graph.c
    no_effect("read_graph_memory", "return;", "cuDeviceGraphMemTrim"),
    no_effect("add_node", "return;", "cuGraphUpload"),
    no_effect("bytes_on", "return 0;", "cuGraphInstantiate"),
    no_effect("bytes_of_nodes", "return 0;", "cuGraphInstantiate"),
    no_effect("remember_graph", "return result;", "cuGraphInstantiate"),
    no_effect("forget_graph", "return result;", "cuGraphExecUpdate"),
    no_effect("launch_with_more_memory", "return real(executable, stream);", "cuGraphInstantiate"),
    Fault("lacking_for", "return bytes;", [GRAPHS]),
    no_effect("take_lacking", "return true;", "cuGraphInstantiate"),
    Fault(
        "instantiate_and_upload",
        "return remember_graph(real(made, from, parameters), made, from);",
        [UPLOADED, GRAPHS, MEMORY],
    ),
    # limit.c, launches.c
    no_effect("begin_launch", "*measurement = (struct measurement){.gpu = -1}; return;", "cuLaunchKernel"),
    no_effect("end_launch", "return;", "cuLaunchKernel"),
    Fault("pay_and_wait", "measurement->now = now; return;", OF_COMPUTE[1:]),
    Fault("is_to_wait", "return false;", [LONG]),
    Fault("is_to_wait", "false", [STREAMS], r"SEE\(cost->ns\) == 0 &&[^;]*"),
    Fault("are_enough_ahead", "return false;", [SEVERAL]),
    Fault("keep_up", "SECOND_NS", [RESTED], r"BURST_NS \* scale"),
    Fault("note_done", "return;", OF_COMPUTE[1:]),
    Fault("take_sample", "return;", [WRONG_COSTS]),
    Fault("set_scale", "return;", [WRONG_COSTS]),
    Fault("ratio_of", "return 1;", [WRONG_COSTS]),
    no_effect("begin_wait", "return;", "cuStreamSynchronize"),
    no_effect("forget_launches_of", "return;", "ends"),
    no_effect("forget_launches", "return;", "forks"),
    # start.c, view.c
    Fault("device_of_stream", "return current_device();", [OWN_GPU]),
    Fault("has_several_devices", "return false;", [OWN_GPU]),
    Fault("find_gpu", "named", [INSTANCES], r"named < 0 .*named"),
    Fault("list_own", ";", [INSTANCES], r"memcpy\(entry \+ 1.*;"),
    Fault("take_sample", "false", ["tests/gpushare/test_turns.py"], r"limits->is_instance"),
    Fault("gpu_of_device", "return 0;", [GPUS]),
    Fault("notice_fork", "return;", [FORK, HARD]),
    Fault("say_once", "return;", [f"{MEMORY}::test_without_limits_no_memory_is_given_and_one_line_says_why"]),
    Fault("register_process", "return;", ["tests/gpushare/test_registration.py"]),
    no_effect("read_share", "return false;", "cuMemGetInfo_v2"),
    Fault("gpu_of_handle", "return 0;", [f"{GPUS}::test_nvml_shows_a_share_of_its_own_gpu_alone"]),
]
SURVIVORS = {
    "change_size: return bytes;": "the driver has rows of a multiple of 512 bytes, as they are reserved; others may not",
    "entry_at: return NULL;": "by its name and version the same hook is found, with one more question to the driver",
    "lacking_for: return bytes;": "a launch that is refused trims what graphs keep unused, and then has enough",
}
RACES = {
    r"cuDevicePrimaryCtxRetain: atomic_exchange\(&is_beginning.*true\) -> false": "two of 32 threads must come at once"
}
"""Faults that a test sees now and then."""
SMOKE = (
    "cuMemAlloc_v2",
    "cuMemFreeAsync_ptsz",
    "cuMemsetD2D16Async",
    "map_to_hook: return;",
    "take_bytes: return true;",
)


def marked(name: str) -> list[pytest.MarkDecorator]:
    reason = SURVIVORS.get(name) or RACES.get(name)
    survives = [pytest.mark.xfail(strict=name in SURVIVORS, raises=AssertionError, reason=reason)] if reason else []
    return survives + [pytest.mark.smoke] * (name in SMOKE)


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


class Builder:
    """Compiles what a change changes, and links that with the rest of the library."""

    def __init__(self, directory: Path) -> None:
        self._base = directory / "base"
        self._include = cuda_include()
        self._texts: dict[str, str] = {}
        self._texts = self._compile(self._base)

    def build(self, library: Path, changed: Mapping[str, str] | None = None, without_hook: str = "") -> Path:
        """`changed`: new texts of files of native/gpushare. Raises CannotBuildError."""
        scratch = library.parent / "objects"
        self._compile(scratch, changed, without_hook)
        objects = [one if (one := scratch / path.name).exists() else path for path in sorted(self._base.glob("*.o"))]
        links = ["-Wl,-z,now", "-Wl,-soname,libgpushare.so", f"-Wl,--version-script={scratch / 'exports.map'}"]
        run(["cc", *FLAGS, *map(str, objects), *links, "-o", str(library), "-ldl", "-lpthread"])
        return library

    def _compile(
        self, scratch: Path, changed: Mapping[str, str] | None = None, without_hook: str = ""
    ) -> dict[str, str]:
        shutil.copytree(SOURCES, scratch)
        for name, text in (changed or {}).items():
            (scratch / name).write_text(text, encoding="utf-8")
        run([sys.executable, str(scratch / "generate.py"), str(self._include), str(scratch)])
        if without_hook:
            replace_once(scratch / "table.c", f", gpushare_{without_hook}}}", ", NULL}")
            replace_once(scratch / "exports.map", f" {without_hook};", "")
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


@pytest.mark.parametrize("name", [pytest.param(name, marks=marked(name)) for name in HOOKED if name not in UNSEEN])
def test_without_a_hook_its_test_fails(builder: Builder, machine_with: MachineWith, tmp_path: Path, name: str) -> None:
    library = builder.build(tmp_path / "libgpushare.so", without_hook=name)
    machine = machine_with(**settings_for(name))
    machine = replace(machine, built=replace(machine.built, library=library))
    with pytest.raises(AssertionError):
        assert has_effect(container(machine), "does", name)


def with_fault(fault: Fault) -> dict[str, str]:
    """The file that has the function, changed."""
    head = rf"(?:\w[\w *]*?\b{fault.function}\([^;{{]*\)|HOOK\({fault.function},[^;{{]*\))"
    definition = re.compile(rf"^{head}\s\{{(?=\n|[^\n]*\}}$)", re.MULTILINE)
    for path in sorted(SOURCES.glob("*.c")):
        text = path.read_text(encoding="utf-8")
        if not (found := definition.search(text)):
            continue
        head, body = text[: found.end()], text[found.end() :]
        if not fault.instead_of:
            return {path.name: f"{head} {fault.statement} {body}"}
        of, rest = body[: (end := body.index("\n}\n"))], body[end:]
        changed, count = re.subn(fault.instead_of, fault.statement, of)
        assert count == 1, f"{fault.function} has no {fault.instead_of} any more, or several"
        return {path.name: f"{head}{changed}{rest}"}
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
    library = tmp_path / gpushare.library.name
    if fault.words:
        builder.build(library, with_fault(fault))
        machine = Machine(replace(gpushare, library=library), tmp_path, {})
        with pytest.raises(AssertionError):
            assert has_effect(container(machine), *fault.words)
        record_property("seen_by", " ".join(fault.words))
        return
    shutil.copytree(
        gpushare.library.parent, tmp_path, dirs_exist_ok=True, symlinks=True
    )  # other users may come by it there
    builder.build(library, with_fault(fault))
    flaky: list[str] = []
    while seen_by := failing(tmp_path, *fault.tests, *(f"--deselect={test}" for test in flaky)):
        if failing(tmp_path, seen_by) and passes(gpushare.library.parent, seen_by):
            record_property("seen_by", seen_by)
            return
        flaky.append(seen_by)  # it fails for another reason, as on a machine that is busy
    raise AssertionError(f"no test has seen it; {flaky=}")


@cache
def passes(built: Path, test: str) -> bool:
    return not failing(built, test)


def failing(built: Path, *tests: str) -> str:
    """The first of these tests that fails with what is built there; empty: none does."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "isolation", f"--built={built}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    env = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    assert done.returncode == (pytest.ExitCode.TESTS_FAILED if found else pytest.ExitCode.OK), done.stdout + done.stderr
    return found[0] if found else ""
