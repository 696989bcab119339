"""core/formats/vdevice.py and isolation/vdevice/files.py: what a C program reads, and what lies where."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.core.formats.vdevice import (
    CONFIG_BYTES,
    VDeviceConfig,
    decode_config,
    decode_pids,
    encode_config,
    encode_pids,
    split_container_name,
)
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.directory_names import is_container_name, is_pod_uid
from gpushare_agent.core.model.errors import Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.names import PodUid, is_container_id
from tests.isolation.support_vdevice import ID, KEY, MIB, OTHER, OTHER_ID, POD, plant, share_config

SOURCE = Path(__file__).parent.parent / "native" / "vcuda_config.c"
INT32 = st.integers(min_value=0, max_value=2**31 - 1)
POD_UIDS = st.uuids().map(str) | st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
CONTAINERS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled C program."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) on this machine: the layout cannot be checked against one")
    program = tmp_path_factory.mktemp("native") / "vcuda_config"
    subprocess.run([compiler, "-Wall", "-Werror", "-o", str(program), str(SOURCE)], check=True, timeout=60)
    return program


@pytest.fixture
def files(short_dir: Path) -> VDeviceFiles:
    return VDeviceFiles(short_dir / "vm")


def read(reader: Path, *arguments: str) -> dict[str, str]:
    done = subprocess.run([str(reader), *arguments], check=True, capture_output=True, text=True, timeout=30)
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def tree(root: Path) -> dict[str, str]:
    """Every path below `root` with its kind and mode."""
    return {str(p.relative_to(root)): stat.filemode(p.lstat().st_mode) for p in sorted(root.rglob("*"))}


@pytest.mark.parametrize(
    ("limit", "memory_bytes", "utilization", "hard_limit", "enable"),
    [
        pytest.param(0, 2048 * MIB, 20, True, True, id="share"),
        pytest.param(60, 256 * MIB, 1, False, True, id="elastic"),
        pytest.param(0, 160 << 30, 200, True, False, id="whole GPUs"),
    ],
)
def test_a_c_program_reads_every_field_of_vcuda_config(
    reader: Path, files: VDeviceFiles, limit: int, memory_bytes: int, utilization: int, hard_limit: bool, enable: bool
) -> None:
    """A struct that the compiler lays out from the documented fields holds what was asked for, and has 8,240 bytes."""
    key, bus_id = ContainerKey(POD, "a" * 63), "0000:3b:00.0"
    config = VDeviceConfig(
        pod_uid=POD, container=key.container, limit=limit, memory_bytes=memory_bytes, utilization=utilization,
        hard_limit=hard_limit, driver=(535, 161), enable=enable, bus_id=bus_id,
    )  # fmt: skip
    files.prepare(key, config=encode_config(config))
    found = read(reader, "config", str(files.path(key) / "vcuda.config"))
    assert found == {
        "size": "8240", "pod_uid": POD, "container_name": key.container, "bus_id": bus_id, "driver": "535.161",
        "limit": str(limit), "gpu_memory": str(memory_bytes), "utilization": str(utilization),
        "hard_limit": str(int(hard_limit)), "enable": str(int(enable)),
    }  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 2, 1023, 1024, 1500])
def test_a_c_program_finds_every_pid_by_bisection(reader: Path, files: VDeviceFiles, count: int) -> None:
    """Given in falling order and twice, the PIDs are found; those between them and beyond the lowest 1,024 are not."""
    files.prepare(KEY)
    pids = [7 + 3 * n for n in range(count)]
    files.write(KEY, pids=[*reversed(pids), *pids])
    absent = [pid + 1 for pid in pids[:1024]] + pids[1024:] + [1]
    found = read(reader, "pids", str(files.path(KEY) / "pids.config"), *map(str, [*pids[:1024], *absent]))
    kept = {str(pid): "found" for pid in pids[:1024]}
    assert found == {"count": str(min(count, 1024)), **kept, **{str(pid): "absent" for pid in absent}}


@given(
    config=st.builds(
        VDeviceConfig,
        pod_uid=POD_UIDS,
        container=CONTAINERS,
        limit=INT32,
        memory_bytes=st.integers(min_value=0, max_value=2**64 - 1),
        utilization=INT32,
        hard_limit=st.booleans(),
        driver=st.tuples(INT32, INT32),
        enable=st.booleans(),
        bus_id=st.from_regex(r"[0-9A-Fa-f:.]{0,15}", fullmatch=True),
    )
)
def test_a_config_comes_back_as_it_was_written(config: VDeviceConfig) -> None:
    """Decoding undoes encoding for every value, and the size never differs."""
    content = encode_config(config)
    assert len(content) == 8240
    assert decode_config(content) == config


@given(st.sets(st.integers(min_value=-5, max_value=2**31 + 5), max_size=2000))
def test_pids_are_the_lowest_1024_in_order(pids: set[int]) -> None:
    """What is no PID is left out; the rest is written in order, or counted as dropped."""
    content, dropped = encode_pids(pids)
    real = sorted(pid for pid in pids if 0 < pid < 2**31)
    assert decode_pids(content) == tuple(real[:1024])
    assert dropped == max(0, len(real) - 1024)


@given(
    st.binary(max_size=64)
    # Repeated to the file's size: Hypothesis draws no more than 8,192 bytes for one example.
    | st.binary(min_size=1, max_size=512).map(lambda part: (part * CONFIG_BYTES)[:CONFIG_BYTES])
)
def test_foreign_bytes_are_corrupt_or_a_config(content: bytes) -> None:
    """No bytes raise anything but Corrupt."""
    for decode in (decode_config, decode_pids):
        try:
            decode(content)
        except Corrupt:
            continue


@pytest.mark.parametrize(
    "wrong",
    [
        {"pod_uid": "x" * 48},
        {"pod_uid": "a\0b"},
        {"pod_uid": ".."},
        {"pod_uid": ""},
        {"container": "a/b"},
        {"container": "x" * 64},
        {"bus_id": "0" * 16},
        {"limit": -1},
        {"utilization": 2**31},
        {"driver": (535, -1)},
        {"memory_bytes": 2**64},
    ],
)
def test_what_does_not_fit_the_struct_is_refused(wrong: dict[str, object]) -> None:
    """Nothing is cut off or wraps around."""
    fields: dict[str, object] = {"pod_uid": POD, "container": "c", "limit": 0, "memory_bytes": 0, "utilization": 10}
    fields |= {"hard_limit": True, "driver": (535, 1), "enable": True, **wrong}
    with pytest.raises(ValueError, match=r"vcuda[.]config"):
        encode_config(VDeviceConfig(**fields))  # type: ignore[arg-type]


@given(st.text(max_size=80))
def test_no_name_that_is_accepted_leaves_its_directory(text: str) -> None:
    """Accepted pod UIDs, container names and IDs hold no slash, no NUL, no dot, and are not empty."""
    for accepts in (is_pod_uid, is_container_name, is_container_id):
        if accepts(text):
            assert text
            assert text.isascii()
            assert not set(text) & set("/\0.\n ")


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("cuda", ("cuda", None)),
        (f"/k8s_cuda_my-pod.x_default_{POD}_0", ("cuda", POD)),
        (f"k8s_cuda_my-pod_default_{POD}_12", ("cuda", POD)),
        (f"/k8s_cuda_my-pod_default_{POD}", ("cuda", POD)),
        ("/k8s_cuda", None),
        (f"/k8s_-cuda_p_n_{POD}_0", None),
        (f"/k8s_cu_da_p_n_{POD}_0", None),
        (f"/k8s_cuda_{'p' * 600}_n_{POD}_0", None),
        ("/cuda", None),
        ("Cuda", None),
        ("cuda\n", None),
        ("", None),
    ],
)
def test_a_container_name_is_plain_or_of_dockershims_form(text: str, split: tuple[str, str | None] | None) -> None:
    """Of the long form name and pod UID are taken, of anything else nothing."""
    assert split_container_name(text) == split


def test_the_tree_has_the_documented_modes_under_any_umask(files: VDeviceFiles) -> None:
    """Directories 0755, a pod's 0700, files 0644, socket 0666, with the strictest umask too; nothing else is left."""
    before = os.umask(0o077)
    try:
        files.prepare(KEY, pids=[1, 2], config=share_config())
        files.copy_for_id(KEY, ID)
        sock, _ = files.bind_socket(KEY)
        sock.close()
    finally:
        os.umask(before)
    at = f"{POD}/cuda"
    assert tree(files.root) == {
        POD: "drwx------",
        at: "drwxr-xr-x",
        f"{at}/vcuda.config": "-rw-r--r--",
        f"{at}/pids.config": "-rw-r--r--",
        f"{at}/vcuda.sock": "srw-rw-rw-",
        f"{at}/{ID}": "drwxr-xr-x",
        f"{at}/{ID}/vcuda.config": "-rw-r--r--",
        f"{at}/{ID}/pids.config": "-rw-r--r--",
    }


def test_a_file_that_is_right_is_left_alone(files: VDeviceFiles) -> None:
    """The same content is not written again; other content, another mode or a missing file is."""
    files.prepare(KEY)
    path = files.path(KEY) / "pids.config"
    files.write(KEY, pids=[3, 5])
    first = path.stat()
    files.write(KEY, pids=[5, 3])
    files.prepare(KEY)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    path.chmod(0o666)
    files.write(KEY, pids=[3, 5])
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.unlink()
    files.write(KEY, pids=[3, 5])
    assert path.exists()
    files.write(KEY, pids=[3])
    assert decode_pids(path.read_bytes()) == (3,)


def test_readers_see_whole_files_while_writers_race(files: VDeviceFiles) -> None:
    """Four threads write different PIDs of one container: whoever reads meanwhile reads one of the four."""
    files.prepare(KEY)
    versions = [tuple(range(n, n + 300)) for n in (1, 1000, 2000, 3000)]
    files.write(KEY, pids=versions[0])
    threads = [threading.Thread(target=lambda v=v: [files.write(KEY, pids=v) for _ in range(50)]) for v in versions]
    for thread in threads:
        thread.start()
    path = files.path(KEY) / "pids.config"
    seen = {decode_pids(path.read_bytes()) for _ in range(300)}
    for thread in threads:
        thread.join()
    assert seen <= set(versions)
    assert sorted(p.name for p in path.parent.iterdir()) == ["pids.config"]


def test_the_copies_for_an_id_are_kept_up_and_replaced_by_the_next_id(files: VDeviceFiles) -> None:
    """Later writes reach `<container id>/`; a restarted container's new ID takes the place of the old one."""
    files.prepare(KEY, pids=[1], config=share_config())
    files.copy_for_id(KEY, ID)
    files.write(KEY, pids=[1, 2])
    files.write(KEY, config=share_config(limit=50))
    copy = files.path(KEY) / ID
    assert decode_pids((copy / "pids.config").read_bytes()) == (1, 2)
    assert decode_config((copy / "vcuda.config").read_bytes()).limit == 50
    files.copy_for_id(KEY, OTHER_ID)
    assert not copy.exists()
    assert (files.path(KEY) / OTHER_ID / "vcuda.config").read_bytes() == share_config(limit=50)


def test_what_a_killed_writer_left_is_cleared(files: VDeviceFiles) -> None:
    """Half-written files under their first names go when the container is prepared again, in its copy by ID too."""
    files.prepare(KEY, pids=[1], config=share_config())
    files.copy_for_id(KEY, ID)
    own = files.path(KEY)
    for directory in (own, own / ID):
        (directory / ".new-0123").write_bytes(b"half")
    files.prepare(KEY)
    assert sorted(p.name for p in own.iterdir()) == sorted([ID, "pids.config", "vcuda.config"])
    assert sorted(p.name for p in (own / ID).iterdir()) == ["pids.config", "vcuda.config"]


def test_preparing_writes_both_files_and_their_copies_and_lists_each_directory_once(
    files: VDeviceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given is in the container's directory and in its copy by ID; what is not given stays as it is."""
    listed = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda directory: listed.append(directory) or listdir(directory))
    files.prepare(KEY, pids=[1, 2], config=share_config())
    assert len(listed) == 1
    files.copy_for_id(KEY, ID)
    listed.clear()
    files.prepare(KEY, pids=[3], config=share_config(limit=50))
    assert len(listed) == 2
    for directory in (files.path(KEY), files.path(KEY) / ID):
        assert decode_pids((directory / "pids.config").read_bytes()) == (3,)
        assert (directory / "vcuda.config").read_bytes() == share_config(limit=50)
    files.prepare(KEY)
    assert (files.read_pids(KEY), files.read_config(KEY)) == ((3,), share_config(limit=50))


@pytest.mark.parametrize("planted", ["", "link", "file"])
def test_nothing_is_read_where_no_directory_is(files: VDeviceFiles, planted: str) -> None:
    """Before the container is prepared, and through a link to a directory that has both files."""
    files.prepare(OTHER, pids=[1], config=share_config())
    if planted:
        plant(planted, files.root / KEY.pod_uid, files.root / OTHER.pod_uid)
    assert (files.read_pids(KEY), files.read_config(KEY)) == (None, None)


@pytest.mark.parametrize("expected", [POD, f"{POD}/cuda", f"{POD}/cuda/{ID}"])
@pytest.mark.parametrize("planted", ["link", "file", "fifo", "dangling"])
def test_what_lies_where_a_directory_is_expected_is_replaced_and_never_followed(
    files: VDeviceFiles, short_dir: Path, expected: str, planted: str
) -> None:
    """A link's target keeps its content; the directory is real afterwards, and the log names what was done."""
    outside = short_dir / "outside"
    outside.mkdir()
    (outside / "vcuda.config").write_text("theirs")
    place = files.root / expected
    place.parent.mkdir(parents=True)
    plant(planted, place, outside)
    with structlog.testing.capture_logs() as logs:
        files.prepare(KEY, pids=[1], config=share_config())
        files.copy_for_id(KEY, ID)
    assert place.is_dir()
    assert not place.is_symlink()
    assert (files.root / POD / "cuda" / ID / "vcuda.config").read_bytes() == share_config()
    assert [(p.name, p.read_text()) for p in outside.iterdir()] == [("vcuda.config", "theirs")]
    assert not (short_dir / "nowhere").exists()
    assert [(entry["event"], entry["name"]) for entry in logs] == [("path_replaced", place.name)]


@pytest.mark.parametrize("planted", ["link", "directory", "fifo", "dangling", "socket"])
@pytest.mark.parametrize("name", ["vcuda.config", "pids.config", "vcuda.sock"])
def test_what_lies_where_a_file_is_expected_is_replaced_and_never_followed(
    files: VDeviceFiles, short_dir: Path, name: str, planted: str
) -> None:
    """A link to a victim, even one of the right content, is removed; the victim keeps its content and its mode."""
    victim = short_dir / "victim"
    victim.write_bytes(share_config())
    victim.chmod(0o600)
    files.prepare(KEY)
    place = files.path(KEY) / name
    plant(planted, place, victim)
    files.write(KEY, config=share_config())
    files.write(KEY, pids=[4])
    sock, _ = files.bind_socket(KEY)
    sock.close()
    kinds = {p.name: stat.filemode(p.lstat().st_mode) for p in files.path(KEY).iterdir()}
    assert kinds == {"vcuda.config": "-rw-r--r--", "pids.config": "-rw-r--r--", "vcuda.sock": "srw-rw-rw-"}
    assert victim.read_bytes() == share_config()
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert not (short_dir / "nowhere").exists()


@pytest.mark.parametrize("level", [POD, f"{POD}/cuda"])
def test_a_directory_that_became_a_link_after_preparing_is_not_written_through(
    files: VDeviceFiles, short_dir: Path, level: str
) -> None:
    """Writing and binding say that the container must be prepared again; nothing appears at the link's target."""
    files.prepare(KEY)
    moved = short_dir / "moved"
    (files.root / level).rename(moved)
    (files.root / level).symlink_to(moved)
    for step in (
        lambda: files.write(KEY, pids=[1]),
        lambda: files.write(KEY, config=share_config()),
        lambda: files.copy_for_id(KEY, ID),
        lambda: files.bind_socket(KEY),
    ):
        with pytest.raises(NotFound, match="must be prepared"):
            step()
    assert [p for p in moved.rglob("*") if not p.is_dir()] == []


@pytest.mark.parametrize(
    "key",
    [
        *(ContainerKey(PodUid(uid), "cuda") for uid in ("..", "../..", "", "a/b", "a" * 48)),
        *(ContainerKey(POD, name) for name in ("..", "", "a\0b", "vcuda.sock", "x" * 2**20)),
    ],
)
def test_names_that_are_no_names_never_reach_the_file_system(files: VDeviceFiles, key: ContainerKey) -> None:
    """Rejected before anything is made, by every method that takes a key."""
    for step in (
        lambda: files.prepare(key),
        lambda: files.write(key, pids=[]),
        lambda: files.write(key, config=b""),
        lambda: files.copy_for_id(key, ID),
        lambda: files.bind_socket(key),
    ):
        with pytest.raises(Rejected):
            step()
    assert not files.root.exists()


@pytest.mark.parametrize("container_id", ["..", "../" + "a" * 61, "A" * 64, "a" * 63, "", "a" * 65])
def test_only_64_hexadecimal_digits_name_a_copy(files: VDeviceFiles, container_id: str) -> None:
    """Anything else is Rejected and makes nothing."""
    files.prepare(KEY, pids=[], config=share_config())
    with pytest.raises(Rejected):
        files.copy_for_id(KEY, container_id)
    assert sorted(p.name for p in files.path(KEY).iterdir()) == ["pids.config", "vcuda.config"]


def test_removing_a_pod_removes_links_but_not_what_they_lead_to(files: VDeviceFiles, short_dir: Path) -> None:
    """Everything of the pod goes, another pod and the targets of planted links stay."""
    outside = short_dir / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    for key in (KEY, OTHER):
        files.prepare(key, pids=[1])
    (files.path(KEY) / ID).symlink_to(outside)
    (files.root / POD / "other-link").symlink_to(outside / "precious")
    assert files.remove_pod(POD)
    assert not files.remove_pod(POD)
    assert files.pod_names() == (OTHER.pod_uid,)
    assert (outside / "precious").read_text() == "kept"
    (files.root / POD).symlink_to(outside)
    assert set(files.pod_names()) == {POD, OTHER.pod_uid}
    assert files.remove_pod(POD)
    assert [p.name for p in outside.iterdir()] == ["precious"]


def test_the_list_holds_what_the_agent_makes_and_nothing_else(files: VDeviceFiles) -> None:
    """Foreign names at the root are neither listed nor, therefore, ever collected; no root means no pods."""
    assert files.pod_names() == ()
    for name in ("a", "b"):
        files.prepare(ContainerKey(POD, name))
    (files.root / "lost+found").mkdir()
    (files.root / "notes.txt").write_text("x")
    assert files.pod_names() == (POD,)


def test_a_directory_nested_too_deep_is_left_for_a_person(files: VDeviceFiles) -> None:
    """Removal stops at a depth that the agent never builds, and reports it."""
    files.prepare(KEY)
    (files.path(KEY) / ID / "/".join("abcdefghijkl")).mkdir(parents=True)
    assert files.remove_pod(POD)
    (name,) = files.list_aside()
    with pytest.raises(Unavailable, match="nested deeper"):
        files.remove_aside(name)


@pytest.mark.parametrize("name", ["hostkey", "volumes/data", "cuda/libcuda.so", "cuda/.ssh"])
def test_a_directory_with_something_that_the_agent_never_makes_is_not_removed(files: VDeviceFiles, name: str) -> None:
    """Whoever sets virtual_manager.path to the kubelet's pods, say, loses nothing: what lies there is no pod's of ours."""
    files.prepare(KEY)
    there = files.root / POD / name
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_text("precious")
    with pytest.raises(Rejected, match="nothing that the agent makes"):
        files.remove_pod(POD)
    assert there.read_text() == "precious"


@pytest.mark.parametrize("name", ["ssh", "vdriver", "12345678", "0F9C4F0E-5A0B-4B8E-9D38-0D4A3F7B6C11", f"{POD}0"])
def test_only_what_a_kubelet_names_its_pods_is_taken_for_a_pod(files: VDeviceFiles, name: str) -> None:
    """A name is no UID: nothing of it is listed, made or removed."""
    (files.root / name / "cuda").mkdir(parents=True)
    assert files.pod_names() == ()
    with pytest.raises(Rejected):
        files.remove_pod(PodUid(name))


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """No file of this process may grow beyond 4 KiB: the kernel refuses as a full disk does, in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_is_cut_short_leaves_the_old_file_and_nothing_else(
    files: VDeviceFiles, file_size_limit: int
) -> None:
    """Unavailable names the file and the cure; the half-written one is gone."""
    files.prepare(KEY, pids=[1])
    config = files.path(KEY) / "vcuda.config"
    config.write_bytes(b"old")
    with pytest.raises(Unavailable, match=rf"writing {config.parent} failed: .*free space"):
        files.write(KEY, config=share_config())
    assert config.read_bytes() == b"old"
    assert sorted(p.name for p in config.parent.iterdir()) == ["pids.config", "vcuda.config"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EMFILE, "raise LimitNOFILE"),
        (errno.ENFILE, "fs.file-max"),
        (errno.ENOSPC, "free space or inodes"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "mounted read-only"),
        (errno.EIO, "kernel's log"),
        (errno.EACCES, "may write there (setting virtual_manager.path)"),
    ],
)
def test_the_remedy_is_the_errors_own(
    files: VDeviceFiles, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """Whoever has used up the open files cannot cure that by permissions, and the other way round."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Unavailable) as raised:
        files.prepare(KEY)
    assert remedy in str(raised.value)
    assert ("may write" in str(raised.value)) == (number == errno.EACCES)


def test_a_root_that_cannot_be_written_is_unavailable_with_the_setting(short_dir: Path) -> None:
    """A file where the root should be: the message names the path and the setting."""
    (short_dir / "vm").write_text("")
    with pytest.raises(Unavailable, match=r"preparing .*virtual_manager\.path"):
        VDeviceFiles(short_dir / "vm").prepare(KEY)


def test_more_than_1024_pids_are_reported_once_per_change(files: VDeviceFiles) -> None:
    """The warning has the number that was dropped, and comes with a write only."""
    files.prepare(KEY)
    with structlog.testing.capture_logs() as logs:
        files.write(KEY, pids=range(1, 1501))
        files.write(KEY, pids=range(1, 1501))
    assert [(entry["event"], entry["dropped"]) for entry in logs] == [("vdevice_pids_dropped", 476)]


def test_the_socket_is_known_again_and_removed_only_while_it_is_ours(files: VDeviceFiles) -> None:
    """Another socket at the same name is neither taken for ours nor removed."""
    files.prepare(KEY)
    first, mine = files.bind_socket(KEY)
    assert files.has_socket(KEY, mine)
    second, theirs = files.bind_socket(KEY)
    first.close()
    second.close()
    assert not files.has_socket(KEY, mine)
    files.remove_socket(KEY, mine)
    assert files.has_socket(KEY, theirs)
    files.remove_socket(KEY, theirs)
    assert not (files.path(KEY) / "vcuda.sock").exists()
    files.remove_pod(POD)
    files.remove_socket(KEY, theirs)
    assert not files.has_socket(KEY, theirs)
