"""How programs come by the driver's functions (tests/native/finding_program.c), and with what around them: what was found
is replaced where it is the driver's, and is as without the library everywhere else.

A share of 2,560 MiB: 8 blocks of 256 MiB next to a context.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from native.build_gpushare import CannotBuildError, run
from tests.gpushare.support_gpushare import BLOCK_MIB, MIB, TAKE, Container, GpushareBuilt, needs_own_programs
from tests.native.build import NATIVE, build_program, cuda_include
from tests.native.gpu_program import DEADLINE_S, finish

pytestmark = [pytest.mark.isolation, needs_own_programs]

HOOK, DRIVER = "cuMemAlloc_v2 in libgpushare.so", "cuMemAlloc_v2 in libcuda.so.1"
NEWER_CUDA = {"FAKE_GPU_CUDA_VERSION": "14000"}
Part = Callable[..., Path]


@pytest.fixture(scope="module")
def program(gpushare: GpushareBuilt, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finding") / "finding_program"
    return build_program(path, NATIVE / "finding_program.c", ["-rdynamic", "-ldl"])


@pytest.fixture
def part(gpushare: GpushareBuilt, tmp_path: Path) -> Part:
    """Builds one of finding_parts.c under a name: with these options, and the driver's functions where it needs them."""

    def build(name: str, *options: str, needs: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        links = [f"-L{gpushare.driver}", f"-l{needs}"] if needs else []
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}", *options, *links, "-ldl"]
        return build_program(path, NATIVE / "finding_parts.c", flags)

    return build


def lines(
    share: Container, program: Path, *words: str, env: dict[str, str] | None = None, preload: Sequence[Path] = ()
) -> list[str]:
    """Of its standard output; its code is 0 and standard error empty."""
    preload = preload or [share.machine.built.library]
    with share.start_command([str(program), *words], env=env, preload=preload) as process:
        try:
            output, error = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert (process.returncode, error) == (0, ""), (process.returncode, output, error)
    return output.splitlines()


def forwarding(share: Container, forwarder: Path) -> dict[str, str]:
    driver = share.machine.built.driver
    return {"LD_LIBRARY_PATH": f"{forwarder.parent}:{driver}", "FORWARDS_TO": str(driver / "libcuda.so.1")}


@pytest.mark.parametrize("way", ["use", "ask"])
@pytest.mark.parametrize("begins", [[], ["-DAT_START"], ["-DNESTS"]])
def test_a_driver_that_forwards_to_another_one_is_limited_once(
    share: Container, program: Path, part: Part, begins: list[str], way: str
) -> None:
    """As WSL2's: it asks for the other one's functions, which are not ours to replace. What its cuGetProcAddress answers
    lies in the other one, and is known by the version."""
    forwarder = part("forwards/libcuda.so.1", "-DFORWARDS", *begins)
    env = forwarding(share, forwarder)
    assert lines(share, program, way, "libcuda.so.1", env=env) == ["8"]


def test_functions_of_the_program_s_own_are_its_own(share: Container, program: Path, part: Part) -> None:
    """By the handle of its library: those that it has, and the loader's word for the one that it has not."""
    own = part("libown.so", "-DOWN_NAMES")
    assert lines(share, program, "own", str(own)) == [
        "handle: cuInit in libown.so",
        "version: cuInit in libown.so",
        "without: NULL in nothing",
        "1 4242",
    ]


@pytest.fixture
def other(share: Container, tmp_path: Path) -> Path:
    """A driver of another directory, by another name."""
    copy = tmp_path / "compat" / "libcuda.so.535"
    copy.parent.mkdir()
    return Path(shutil.copy(share.machine.built.driver / "libcuda.so", copy))


def test_of_two_drivers_each_has_its_own_functions(share: Container, program: Path, other: Path) -> None:
    """The one that is there under the driver's name is limited; calls of the other one do not end in the first."""
    assert lines(share, program, "two", str(other)) == [
        f"first: {HOOK}",
        "second: cuMemAlloc_v2 in libcuda.so.535",
        "8",
    ]


def test_the_driver_of_another_directory_is_limited(share: Container, program: Path, other: Path) -> None:
    """It was opened by its path: under the driver's name there is it then, and no other one is loaded."""
    assert lines(share, program, "use", str(other)) == ["8"]


def test_a_question_loads_no_driver_and_finds_none_that_is_not_loaded(share: Container, program: Path) -> None:
    """In all that is loaded, from the program's own handle, in the next library: before and after it has the driver. Its
    functions have no versions."""
    asked = ("default", "self", "next")
    nothing = "version: NULL in nothing"
    assert lines(share, program, "everywhere") == [
        *(f"{one}: NULL in nothing" for one in asked),
        nothing,
        "not loaded",
        *(f"{one}: {HOOK}" for one in asked),
        nothing,
        "loaded",
    ]


def test_wrappers_are_called_one_after_the_other_and_then_the_driver(
    share: Container, program: Path, part: Part
) -> None:
    """RTLD_NEXT of the first is the second one, and of that our hook."""
    first, second = part("libfirst.so", '-DWRAPS="first"'), part("libsecond.so", '-DWRAPS="second"')
    preload = [share.machine.built.library, first, second]
    assert lines(share, program, "wrapped", str(first), preload=preload) == ["first", "second", "0"]
    assert share.usage()[1][0].bytes_of_kind["linear"] == BLOCK_MIB * MIB


def test_a_function_that_is_not_found_leaves_the_loader_s_reason(
    share: Container, program: Path, tmp_path: Path
) -> None:
    """A driver without it, asked by its handle, in all libraries, in the next one; one that it has leaves no error, though
    it lacks what the library looks for last."""
    options = ["-shared", "-fPIC", "-DcuThreadExchangeStreamCaptureMode=unused"]
    build_program(tmp_path / "libcuda.so.1", NATIVE / "null_driver.c", options)
    assert lines(share, program, "errors", env={"LD_LIBRARY_PATH": str(tmp_path)}) == ["2 1 none"] * 3


@pytest.mark.parametrize("python", ["python3", "/usr/bin/python3"])
@pytest.mark.parametrize("has_driver", [False, True])
def test_python_asks_for_a_function_that_is_not_there(
    share: Container, tmp_path: Path, has_driver: bool, python: str
) -> None:
    """ctypes copies the loader's reason, whether there is one or not."""
    if shutil.which(python) is None:
        pytest.skip(f"{python} is not installed")
    build_program(tmp_path / "libcuda.so.1", NATIVE / "null_driver.c", ["-shared", "-fPIC"])
    script = "import ctypes, sys; print(hasattr(ctypes.CDLL(sys.argv[1] or None, 256), 'cuMemPoolTrimTo'))"
    words = ["-c", script, "libcuda.so.1" if has_driver else ""]
    assert lines(share, Path(python), *words, env={"LD_LIBRARY_PATH": str(tmp_path)}) == ["False"]


CALLS = (
    ("cuInit", "0", "(void)room", "cuda"),
    ("nvmlDeviceGetMemoryInfo", "room[0],room[1]", "(void)0", "nvidia-ml"),
    ("cuDevicePrimaryCtxRetain", "room,0", "cuInit(0)", "cuda"),
    ("cuCtxCreate_v2", "room,0,0", "cuInit(0)", "cuda"),
)


@pytest.mark.parametrize(("function", "arguments", "before", "needs"), CALLS)
def test_a_library_may_call_the_driver_when_it_is_loaded(
    share: Container, program: Path, part: Part, function: str, arguments: str, before: str, needs: str
) -> None:
    """Its thread has the loader's lock then, for which another one waits that calls the driver, too: to open that, or in the
    driver, which opens a library of its own. Both are answered."""
    options = [f"-DCALLS={function}", f"-DARGUMENTS={arguments}", f"-DBEFORE={before}"]
    plugin = part("libplugin.so", *options, needs=needs)
    env = {}
    if needs == "cuda":
        forwarder = part("forwards/libcuda.so.1", "-DFORWARDS", "-DOPENS")
        env = forwarding(share, forwarder)
    assert lines(share, program, "plugin", str(plugin), env=env) == ["0"]


def test_a_driver_that_comes_later_than_the_first_call_is_found(
    share: Container, program: Path, tmp_path: Path
) -> None:
    env = {"LD_LIBRARY_PATH": str(tmp_path)}
    with share.start_command([str(program), "later"], env=env, stdin=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "801\n"
            (tmp_path / "libcuda.so.1").symlink_to(share.machine.built.driver / "libcuda.so.1")
            assert process.communicate(timeout=DEADLINE_S) == ("0\n", "")
        finally:
            process.kill()


def test_a_child_of_a_fork_while_the_driver_is_opened_has_a_driver(share: Container, program: Path, part: Part) -> None:
    forwarder = part("forwards/libcuda.so.1", "-DFORWARDS", "-DFORKS")
    env = forwarding(share, forwarder)
    assert lines(share, program, "fork", env=env) == ["0 0"]


def test_a_function_of_a_later_cuda_is_the_driver_s_and_is_counted(share: Container, program: Path) -> None:
    """It has the name of an older one and other parameters, so the hook of that one must not be called for it."""
    assert lines(share, program, "versions", env=NEWER_CUDA) == [
        f"cuMemAlloc: {HOOK}",
        "cuMemAlloc: cuMemAlloc_v3 in libcuda.so.1",
        "cuMemFree: cuMemFree_v2 in libgpushare.so",
    ]
    assert [process.unhooked for process in share.usage()[1]] == [1]


SANITIZERS = ("address", "thread", "undefined", "leak")


@pytest.mark.parametrize(
    ("compiler", "flags"),
    [*((one, []) for one in ("gcc", "clang")), ("clang", ["-shared-libsan"])],
)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_programs_with_a_compiler_s_sanitizer_are_limited(
    share: Container, compiler: str, flags: list[str], sanitizer: str, tmp_path: Path
) -> None:
    """Its runtime looks for functions before anything else of it works. Where that is a library, as gcc's are, and clang's
    by an option, it is not the first one."""
    if (compiler == "clang" and flags and sanitizer == "thread") or shutil.which(compiler) is None:
        pytest.skip(f"{compiler} has none")  # Debian's shared runtime of TSan ends each program
    built, where = tmp_path / "program", "-print-file-name=libclang_rt.asan-x86_64.so"
    source = ["-pthread", f"-I{cuda_include()}", str(NATIVE / "gpu_program.c"), "-ldl"]
    try:
        run([compiler, f"-fsanitize={sanitizer}", *flags, "-o", str(built), *source])
    except CannotBuildError as error:
        pytest.skip(f"no sanitizer: {error}")
    found = subprocess.run([compiler, where], check=True, capture_output=True, text=True)
    runtime = Path(found.stdout.strip()).parent
    env = {"LD_LIBRARY_PATH": f"{share.machine.built.driver}:{runtime}"}
    env |= {f"{name}_OPTIONS": "detect_leaks=0" for name in ("ASAN", "LSAN")}  # gpu_program keeps what it has
    # TSan takes no randomized address space of newer kernels.
    command = ["setarch", os.uname().machine, "-R", str(built), "dlsym", "0", TAKE]
    ended = finish(share.start_command(command, env=env))
    assert (ended.code, ended.blocks()) == (0, [8]), ended


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"])
def test_programs_with_another_malloc_are_limited(share: Container, name: str, is_first: bool) -> None:
    """Preloaded before and behind the library."""
    found = sorted(Path("/usr/lib").glob(f"*/{name}"))
    if not found:
        pytest.skip(f"{name} is not installed")
    both = [share.machine.built.library, found[0]]
    ended = share.run(TAKE, "launch:kernel:0.1", "free", preload=both[::-1] if is_first else both)
    assert (ended.code, ended.error, ended.blocks()) == (0, "", [8])
