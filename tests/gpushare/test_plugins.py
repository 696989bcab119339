"""Plugins (tests/native/plugin.c) that are opened with RTLD_DEEPBIND, or have a dlsym of their own: they find libc's and the
driver's functions before libgpushare's, and keep within the share all the same.

A share of 2,560 MiB: 8 blocks of 256 MiB next to a context. `whose` is the plugin where RTLD_DEEPBIND is in force.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import Container, GpushareBuilt
from tests.native.build import NATIVE, build_program
from tests.native.gpu_program import Ended, finish, linked_to

pytestmark = pytest.mark.isolation

LINKED = ("-Wl,--no-as-needed", "-lcuda")
PLUGINS = {
    "lazy": ("-Wl,-z,lazy", *LINKED),
    "now": ("-Wl,-z,now,-z,relro", *LINKED),
    "without-plt": ("-fno-plt", "-Wl,-z,now,-z,relro", *LINKED),
    "addresses": ("-DPOINTERS", *LINKED),
    "addresses-in-text": ("-DCONSTANTS", "-Wl,-z,notext", *LINKED),
    "dlsym": ("-DFINDS=dlsym",),
    "dlvsym": ("-DFINDS=by_version(RTLD_NEXT)",),
    "dlvsym-of-libc": ("-DFINDS=by_version(libc)",),
    "dlsym-of-libc": ("-DFINDS=by_name(libc)",),
    "next-dlsym": ("-DFINDS=by_name(RTLD_NEXT)",),
    "opens": ('-DOPENS="./lazy.so"',),
}
FINDS = [name for name, flags in PLUGINS.items() if flags[0].startswith("-DFINDS=by")]


def changed(content: bytes, kind: str) -> bytes:
    """A library of which only the loader's own tables are others. What is none is of a function that nobody calls."""
    made = bytearray(content)
    at, size, count = *struct.unpack_from("Q", made, 32), *struct.unpack_from("HH", made, 54)
    [header] = [i for i in range(at, at + size * count, size) if struct.unpack_from("I", made, i)[0] == 2]
    start, _, _, length = struct.unpack_from("4Q", made, header + 8)
    tags = dict(struct.iter_unpack("QQ", made[start : start + length]))
    names, symbols, calls, bytes_of_calls = (tags[tag] for tag in (5, 6, 23, 2))
    if kind == "read-only-dynamic":  # as lld's -z rodynamic: the loader leaves offsets in it
        struct.pack_into("I", made, header + 4, 4)
    for call in range(calls, calls + bytes_of_calls, 24):
        symbol = symbols + 24 * struct.unpack_from("I", made, call + 12)[0]
        [name] = struct.unpack_from("I", made, symbol)
        if made[names + name :].startswith(b"nobody_has_it\0"):
            if kind == "symbol-that-is-none":
                struct.pack_into("I", made, call + 12, 0xFFFFFFF0)
            elif kind == "name-that-is-none":
                struct.pack_into("I", made, symbol, 0xFFFFFFF0)
    return bytes(made)


@pytest.fixture(scope="module")
def plugins(gpushare: GpushareBuilt, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, source = tmp_path_factory.mktemp("plugins"), NATIVE / "plugin.c"
    shared, driver = ["-shared", "-fPIC"], f"-L{gpushare.driver}"
    build_program(directory / "host", source, ["-rdynamic", "-ldl"])
    build_program(
        directory / "host-runpath", source, ["-rdynamic", "-ldl", f"-Wl,--enable-new-dtags,-rpath,{directory}"]
    )
    for name, flags in PLUGINS.items():
        build_program(directory / f"{name}.so", source, ["-DPLUGIN", *shared, driver, *flags, "-ldl"])
    (directory / "libanl.so.1").symlink_to("lazy.so")
    build_program(directory / "libown.so", source, ["-DDRIVER", *shared])
    lazy = build_program(
        directory / "lacks.so", source, ["-DPLUGIN", "-DLACKS", *shared, driver, "-Wl,-z,lazy", *LINKED]
    ).read_bytes()
    for kind in ("read-only-dynamic", "symbol-that-is-none", "name-that-is-none"):
        (directory / f"{kind}.so").write_bytes(changed(lazy, kind))
    own = ["-Wl,-z,lazy", f"-L{directory}", "-lown", f"-Wl,-rpath,{directory}"]
    build_program(directory / "own.so", source, ["-DPLUGIN", *shared, driver, *own, *LINKED])
    return directory


@pytest.fixture
def share(machine_with: MachineWith, plugins: Path) -> Container:
    share = machine_with().container(memory_mib=2560)
    for plugin in plugins.glob("*.so"):
        (share.directory / plugin.name).symlink_to(plugin)
    return share


def run(share: Container, host: Path, *steps: str, preload: list[Path] | None = None) -> Ended:
    ended = finish(share.start_command([str(host), *steps], preload=preload))
    assert ended.code == 0, ended
    return ended


def takes(share: Container, host: Path, *steps: str, preload: list[Path] | None = None) -> tuple[int, str]:
    step = run(share, host, *steps, "take", preload=preload).step("take")
    return step["blocks"], step["whose"]


@pytest.mark.smoke
@pytest.mark.parametrize("way", ["deep", "now", "base"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_of_rtld_deepbind_is_limited_and_bound_to_its_own(
    share: Container, plugins: Path, plugin: str, way: str
) -> None:
    """However it is bound: at its first call, at once into pages that are read-only then, by addresses in its data; or
    where it finds the functions itself, or opens another one."""
    assert takes(share, plugins / "host", f"{way}:./{plugin}.so") == (8, "plugin")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_so_is_a_plugin_where_the_image_s_ld_preload_has_the_driver(
    share: Container, plugins: Path, plugin: str
) -> None:
    """Whose libraries the loader puts before those of /etc/ld.so.preload."""
    built = share.machine.built
    preload = [built.driver / "libcuda.so.1", built.library]
    assert takes(share, plugins / "host", f"plain:./{plugin}.so", preload=preload)[0] == 8


@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_so_is_a_program_that_is_linked_to_it(share: Container, binding: str, tmp_path: Path) -> None:
    built = share.machine.built
    flags = [f"-Wl,-z,{binding}", *linked_to(built.driver)]
    program = build_program(tmp_path / "other_gpu", NATIVE / "other_gpu.c", flags)
    preload = [built.driver / "libcuda.so.1", built.library]
    ended = finish(share.start_command([str(program), "alloc", "0", "0"], preload=preload))
    assert [step["blocks"] for step in ended.steps] == [(2560 - 300) // 128, 2560 - 300] * 2, ended.error


@pytest.mark.parametrize("plugin", ["lacks", "read-only-dynamic", "symbol-that-is-none", "name-that-is-none"])
def test_a_plugin_whose_tables_the_loader_takes_is_limited(share: Container, plugins: Path, plugin: str) -> None:
    """It reads no more of them than it must: a function that is bound at its first call may be called never."""
    assert takes(share, plugins / "host", f"deep:./{plugin}.so") == (8, "plugin")


@pytest.mark.parametrize("plugin", FINDS)
def test_libc_s_dlsym_is_not_given_to_a_plugin_that_asks_for_it(share: Container, plugins: Path, plugin: str) -> None:
    assert takes(share, plugins / "host", f"plain:./{plugin}.so") == (8, "host")


@pytest.mark.parametrize("count", [1, 2])
def test_a_preloaded_library_s_dlsym_ends_at_the_limit(share: Container, tmp_path: Path, count: int) -> None:
    """It stands before ours, and finds what it calls libc's by the version."""
    flags = ["-shared", "-fPIC", "-ldl"]
    shims = [build_program(tmp_path / f"libshim{index}.so", NATIVE / "dlsym_shim.c", flags) for index in range(count)]
    ended = share.run("alloc:alloc:256:20", preload=[*shims, share.machine.built.library])
    assert (ended.step("alloc")["blocks"], ended.error) == (8, "")


@pytest.mark.parametrize(("is_first", "place"), [(True, "RTLD_NEXT"), (False, "RTLD_NEXT"), (False, "RTLD_DEFAULT")])
def test_another_library_s_dlopen_sees_what_is_opened(
    share: Container, plugins: Path, tmp_path: Path, is_first: bool, place: str
) -> None:
    """A sanitizer's, say, which stands before ours or behind it."""
    flags = ["-shared", "-fPIC", f"-DFROM={place}", "-ldl"]
    counts = build_program(tmp_path / "libcounts.so", NATIVE / "dlopen_counts.c", flags)
    preload = [counts, share.machine.built.library] if is_first else [share.machine.built.library, counts]
    ended = run(share, plugins / "host", "deep:./lazy.so", "take", preload=preload)
    assert ended.error.startswith("./lazy.so\n") and ended.step("take")["blocks"] == 8, ended


def test_a_plugin_may_be_closed_and_opened_again(share: Container, plugins: Path) -> None:
    steps = ("deep:./lazy.so", "close", "now:./without-plt.so", "close", "deep:./lazy.so")
    assert takes(share, plugins / "host", *steps) == (8, "plugin")


def test_a_plugin_that_was_there_without_the_flag_stays_bound_as_it_is(share: Container, plugins: Path) -> None:
    assert takes(share, plugins / "host", "plain:./lazy.so", "deep:./lazy.so") == (8, "host")


def test_plugins_that_threads_open_at_once_have_the_share_together(share: Container, plugins: Path) -> None:
    """Each is opened by two threads, so one is bound while others are led to the limit."""
    files = []
    for index in range(12):
        copy = share.directory / f"copy{index}.so"
        copy.write_bytes((plugins / ("lazy.so" if index % 2 else "without-plt.so")).read_bytes())
        files.append(f"./{copy.name}")
    assert run(share, plugins / "host", f"threads:{','.join(files)}").step("threads")["blocks"] == 8


def test_a_driver_of_the_plugin_s_own_is_left_to_it(share: Container, plugins: Path) -> None:
    """Its allocations come from another library that has the driver's names, and fail there."""
    assert takes(share, plugins / "host", "deep:./own.so") == (0, "plugin")


def test_pages_that_were_read_only_are_so_again(share: Container, plugins: Path) -> None:
    steps = (plugins / "host", "deep:./without-plt.so", "take")
    limited, bare = run(share, *steps), run(share, *steps, preload=[])
    assert limited.step("take")["writable_kib"] == bare.step("take")["writable_kib"] > 0


def test_where_the_caller_s_run_path_decides_the_plugin_is_found_there(share: Container, plugins: Path) -> None:
    """libgpushare cannot ask in the caller's name and act afterwards, so the flag is left out."""
    for file in ("lazy.so", "libanl.so.1"):  # libc's libanl.so.1 is everyone's
        assert takes(share, plugins / "host-runpath", f"deep:{file}") == (8, "host")
    assert takes(share, plugins / "host-runpath", "deep:./lazy.so") == (8, "plugin")


@pytest.mark.parametrize("file", ["./none.so", "none.so", "./host.c"])
def test_what_cannot_be_opened_fails_with_libc_s_words(share: Container, plugins: Path, file: str) -> None:
    (share.directory / "host.c").write_text("no library")
    command = [str(plugins / "host"), f"deep:{file}"]
    limited, bare = finish(share.start_command(command)), finish(share.start_command(command, preload=[]))
    assert (limited.code, limited.error) == (bare.code, bare.error) and limited.code == 3 and file in limited.error
