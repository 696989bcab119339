"""kit/sockets.py on a real file system."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from gpushare_agent.core.kit.sockets import bind_unix_socket, connectable_path, file_identity, remove_socket


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client, connectable_path(path) as address:
        try:
            client.connect(address)
        except ConnectionRefusedError:
            return False
        return True


@pytest.mark.parametrize("depth", [0, 1])
def test_a_socket_is_bound_and_reached_at_short_and_long_paths(depth: int, short_dir: Path) -> None:
    """A path of more than 107 bytes works like any other."""
    directory = short_dir / ("d" * 150) if depth else short_dir
    directory.mkdir(exist_ok=True)
    with bind_unix_socket(directory / "s.sock", mode=0o600) as sock:
        sock.listen()
        assert connects(directory / "s.sock")
        assert sock.getblocking() is False


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_file_has_the_mode_asked_for_whatever_the_umask(mode: int, short_dir: Path) -> None:
    """Neither more nor less."""
    old = os.umask(0o077)
    try:
        with bind_unix_socket(short_dir / "s.sock", mode=mode):
            assert stat.S_IMODE((short_dir / "s.sock").stat().st_mode) == mode
    finally:
        os.umask(old)


def test_a_stale_socket_is_replaced(short_dir: Path) -> None:
    """What a killed process left behind does not block the next one."""
    bind_unix_socket(short_dir / "s.sock", mode=0o600).close()
    assert not connects(short_dir / "s.sock")
    with bind_unix_socket(short_dir / "s.sock", mode=0o600) as sock:
        sock.listen()
        assert connects(short_dir / "s.sock")


def test_a_file_a_directory_and_a_link_are_left_alone(short_dir: Path) -> None:
    """Only a socket is replaced; the text names the path."""
    bind_unix_socket(short_dir / "target", mode=0o600).close()
    (short_dir / "file").write_text("precious")
    (short_dir / "sub").mkdir()
    (short_dir / "link").symlink_to("target")
    for name in ("file", "sub", "link"):
        with pytest.raises(FileExistsError, match=f"{name} exists and is not a socket"):
            bind_unix_socket(short_dir / name, mode=0o600)
    assert (short_dir / "file").read_text() == "precious"
    assert (short_dir / "link").is_symlink()
    assert (short_dir / "target").is_socket()


def test_a_missing_directory_is_file_not_found(short_dir: Path) -> None:
    """The caller can distinguish it from other faults."""
    with pytest.raises(FileNotFoundError):
        bind_unix_socket(short_dir / "missing" / "s.sock", mode=0o600)


def test_only_our_own_socket_is_removed(short_dir: Path) -> None:
    """A successor's socket at the same path stays."""
    path = short_dir / "s.sock"
    bind_unix_socket(path, mode=0o600).close()
    own = file_identity(path)
    bind_unix_socket(path, mode=0o600).close()
    assert remove_socket(path, own) is False
    assert remove_socket(path, None) is False
    assert path.is_socket()
    own = file_identity(path)
    assert remove_socket(path, own) is True
    assert file_identity(path) is None
    assert remove_socket(path, own) is False
    path.write_text("a file")
    assert remove_socket(path, file_identity(path)) is False
    assert remove_socket(path / "below", own) is False


def test_the_identity_changes_when_a_file_is_made_anew(short_dir: Path) -> None:
    """The inode number may be the same again; the identity is not."""
    path = short_dir / "s.sock"
    seen = set()
    for mode in (0o600, 0o600, 0o600):
        bind_unix_socket(path, mode=mode).close()
        identity = file_identity(path)
        assert identity is not None
        seen.add(identity)
        while file_identity(_touch(short_dir / "clock"))[2] == identity[2]:  # type: ignore[index]
            pass  # until the file system's clock has ticked: a few milliseconds
        path.unlink()
    assert len(seen) == 3


def _touch(path: Path) -> Path:
    path.unlink(missing_ok=True)
    path.touch()
    return path
