"""A container's directory, `<pod uid>/<container>/`, in the directory that an isolation has for all of them.

Every step is relative to a descriptor and follows no link, so nothing is written or removed elsewhere, whatever a tenant
placed there. Only names of Kubernetes (core/model/directory_names.py) reach a path. No state.

A tenant can make its file so long, and of so many pieces, that the kernel takes half a minute to free it; the kubelet does
not count it. So where anyone waits, what a tenant has written is only renamed, into `removed/` next to the pods'
directories (`put_aside`), and `remove_aside` removes it there.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpushare_agent.core.kit.directories import DIRECTORY, made_directory, names_in, opened, remove_tree
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.directory_names import is_pod_uid, require_nameable
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.model.names import PodUid

CLOSED_MODE = 0o700
"""It has files that any user in a container may write; a user of the host, who is in no container, must not."""
ASIDE_NAME = "removed"
"""No pod UID."""
REMOVAL_TIMEOUT_S = 600.0
"""The time to remove or shorten one file of a tenant: 300,000 pieces of 4 KiB took 25 s on a busy disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def container_path(root: Path, key: ContainerKey) -> Path:
    """Raises Rejected for a name that cannot be part of a path."""
    require_nameable(key)
    return root / key.pod_uid / key.container


@contextmanager
def opened_root(root: Path) -> Iterator[int]:
    """The operator's own choice: it may be a link. Raises OSError."""
    # Everything below is opened with O_NOFOLLOW.
    with opened(root, None, DIRECTORY & ~os.O_NOFOLLOW) as directory:
        yield directory


@contextmanager
def opened_container(root: int, key: ContainerKey) -> Iterator[int]:
    """Opens a directory that must be there. Raises OSError."""
    with opened(key.pod_uid, root, DIRECTORY) as pod, opened(key.container, pod, DIRECTORY) as directory:
        yield directory


@contextmanager
def made_container(root: int, key: ContainerKey) -> Iterator[int]:
    """Opens a directory, made if it is missing or something else is there. Raises OSError."""
    with made_directory(root, key.pod_uid, CLOSED_MODE) as pod, made_directory(pod, key.container) as directory:
        yield directory


def pods_in(root: int) -> tuple[PodUid, ...]:
    """The pods that have an entry, sorted; other names are not listed. Raises OSError."""
    return tuple(sorted(PodUid(name) for name in names_in(root) if is_pod_uid(name)))


def put_aside(root: int, directory: int, name: str) -> None:
    """Renames an entry into `removed/`, for `remove_aside`. Raises OSError."""
    with made_directory(root, ASIDE_NAME, CLOSED_MODE) as aside:
        # A random name: what two containers leave never meets, and no name that a tenant chose is used again.
        os.rename(name, secrets.token_hex(8), src_dir_fd=directory, dst_dir_fd=aside)


def list_aside(root: int) -> tuple[str, ...]:
    """The entries to remove. Raises OSError."""
    # Nothing has been put aside yet.
    with suppress(FileNotFoundError), opened(ASIDE_NAME, root, DIRECTORY) as aside:
        return tuple(names_in(aside))
    return ()


def remove_aside(root: int, name: str) -> None:
    """Removes one of these; of a link not its target. May take half a minute. Raises OSError."""
    with suppress(FileNotFoundError), opened(ASIDE_NAME, root, DIRECTORY) as aside:
        remove_tree(aside, name)


@contextmanager
def step(verb: str, path: Path | str, setting: str) -> Iterator[None]:
    """Puts errors into the words of those who can repair them; `setting` names the directory. Raises NotFound if nothing is
    there, Unavailable."""
    try:
        yield
    except OSError as e:
        remedy = (
            "free space or inodes on its file system"
            if e.errno in _FULL
            else f"check that the agent may write there (setting {setting})"
        )
        kind = NotFound if isinstance(e, FileNotFoundError) else Unavailable
        raise kind(f"{verb} {path} failed: {e.strerror or e}; it is tried again: {remedy}") from e
