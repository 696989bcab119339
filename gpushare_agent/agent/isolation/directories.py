"""A container's directory, `<pod uid>/<container>/`, in the directory that an isolation has for all of them.

Every step is relative to a descriptor and follows no link, so nothing is written or removed elsewhere, whatever a tenant
placed there. Only names of Kubernetes (core/model/directory_names.py) reach a path. What a tenant can write in them is
tenant_files.py's. No state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from gpushare_agent.core.kit.directories import DIRECTORY, made_directory, names_in, opened
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.directory_names import is_pod_uid, require_nameable
from gpushare_agent.core.model.errors import NotFound, Unavailable, file_remedy
from gpushare_agent.core.model.names import PodUid

T = TypeVar("T")

CLOSED_MODE = 0o700
"""It has files that any user in a container may write; a user of the host, who is in no container, must not."""


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


def has_file(root: int, uid: PodUid, name: str) -> bool:
    """Whether a container of the pod has that file."""
    # The start looks through a full node before it registers: a glob takes twice as long.
    with suppress(OSError), opened(uid, root, DIRECTORY) as pod:
        return any(os.access(f"{container}/{name}", os.F_OK, dir_fd=pod) for container in names_in(pod))
    return False


def listed(root: Path, read: Callable[[int], tuple[T, ...]]) -> tuple[T, ...]:
    """What `read` finds in the opened `root`; nothing where there is none. Raises Unavailable."""
    with suppress(NotFound), step("listing", root), opened_root(root) as directory:
        return read(directory)
    return ()


@contextmanager
def step(verb: str, path: Path | str, setting: str = "virtual_manager.path") -> Iterator[None]:
    """Puts errors into the words of those who can repair them; `setting` names the directory. Raises NotFound if nothing is
    there, Unavailable."""
    try:
        yield
    except OSError as e:
        remedy = file_remedy(e, f"check that the agent may write there (setting {setting})")
        kind = NotFound if isinstance(e, FileNotFoundError) else Unavailable
        raise kind(f"{verb} {path} failed: {e.strerror or e}; it is tried again: {remedy}") from e
