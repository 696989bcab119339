"""Builds what the embedded kubelet asks its container runtime to run, from a pod's manifest and the plugins' answers.

The environment: a few variables of our own, the manifest's literal `env`, then what the Allocate answers set, then what
their CDI devices set. Because there is no mount namespace, GPUSHARE_VDEVICE is the path of the vDevice socket that would
be at /etc/vcuda/vcuda.sock, and SANDBOX_DEVICE_NODES lists the device nodes that would be there. `valueFrom`, `envFrom`
and `$(VAR)` are not followed, and the shell that becomes the command passes on no variable with a name that is not valid
in a shell. Pure, except for the CDI specs.

No image is run. A command is run if it would do the same in any image and changes nothing: examples and Jobs have loops
that print and sleep, but `rm -rf /data` was not written for this machine. A command that is not run sleeps, and says so.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpushare_agent.core.formats.vdevice import SOCKET_NAME
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse
from gpushare_agent.sandbox import pod_manifest
from gpushare_agent.sandbox.pod_manifest import RawObject
from gpushare_agent.sandbox.runtime.cdi_resolver import requested_names, resolve_cdi
from gpushare_agent.sandbox.runtime.containers import ContainerConfig

HOST_IMAGE = "sandbox/host"
"""A container of this image runs its command, whatever that is."""
JOB_S = 10.0
"""How long a container of a Job sleeps if its command is not run, because Jobs end."""
_PROGRAMS = frozenset({"echo", "false", "printenv", "printf", "seq", "sleep", "test", "true"})
_BUILT_IN = _PROGRAMS | {"[", ":", "exit"}
_BEFORE_A_COMMAND = frozenset({"do", "done", "elif", "else", "fi", "if", "then", "until", "while", "!"})
_SHELLS = frozenset({"bash", "sh"})
_UNREAD = re.compile(r"[`<>#]|\\\n|\$(?![A-Za-z_?]|\{[A-Za-z_][A-Za-z0-9_]*\})")
"""Parts of a script that write files, run unseen code, or mean something else to the shell than to the reader here: a
comment's quotation marks, a line that goes on, and what bash does in `$'…'`, `$[…]` and `${…@P}`."""
_PLACES = frozenset({"", "/bin", "/usr/bin", "/usr/local/bin"})
_STEERS = re.compile(r"PATH|ENV|BASH.*|SHELLOPTS|PS4|IFS|LD_.*|GCONV_PATH|LOCPATH")
"""Variables by which a harmless command does something else."""
_SHOWN_CHARS = 200
VDEVICE_VARIABLE = "GPUSHARE_VDEVICE"
DEVICE_NODES_VARIABLE = "SANDBOX_DEVICE_NODES"
"""Comma list of paths in the container: the answers' own device nodes, then those of their CDI devices."""
_VCUDA_DIRECTORY = "/etc/vcuda"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def container_config(
    raw: RawObject, spec: ContainerSpec, answers: Sequence[bytes], cdi: Path, claimed: Sequence[str] = ()
) -> ContainerConfig:
    """`answers` are the plugins' ContainerAllocateResponse messages for it, `claimed` the CDI devices of its claims; `cdi`
    is the directory of CDI specs.

    Raises Rejected: an image that is run has no command; an answer names a CDI device that no spec has.
    """
    container = container_of(raw, spec.name)
    metadata, run_s, parsed = raw["metadata"], _run_s(raw, spec.kind), [parsed_answer(answer) for answer in answers]
    command = _command(container, is_timed=run_s is not None and spec.kind is ContainerKind.MAIN)
    if not command and run_s is None and spec.kind is ContainerKind.MAIN and _is_of_job(raw):
        run_s = JOB_S
    return ContainerConfig(
        pod_uid=metadata["uid"],
        pod_namespace=metadata["namespace"],
        pod_name=metadata["name"],
        name=spec.name,
        command=command,
        # A program of sandbox/host is the person's own, who may want large files; others are run for what they print.
        has_bounded_log=container.get("image") != HOST_IMAGE,
        note="" if command else _note(container, run_s),
        env=_environment(container, parsed, cdi, claimed),
        run_s=run_s,
        ignore_term_s=pod_manifest.annotation_number(raw, pod_manifest.IGNORE_TERM_ANNOTATION) or 0.0,
    )


@lru_cache(maxsize=2048)
def parsed_answer(answer: bytes) -> ContainerAllocateResponse:
    """Read only. The same answers are shown again and again."""
    return ContainerAllocateResponse.parse(answer)


def _environment(
    container: Mapping[str, Any], answers: Sequence[ContainerAllocateResponse], cdi: Path, claimed: Sequence[str]
) -> dict[str, str]:
    """The variables, later ones win: our own, the manifest's, the plugins', those of CDI; and where things would be that
    nobody mounts here. Raises Rejected."""
    # The agent's commands first: a container's command may be `gpushare-agent vdevice`.
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{_PATH}", "HOME": "/", "LANG": "C.UTF-8"}
    # A variable without a value is empty, as in Kubernetes.
    env |= {v["name"]: str(v.get("value") or "") for v in container.get("env") or () if "valueFrom" not in v}
    names, nodes, mounts = list(claimed), list[str](), list[tuple[str, str]]()
    for answer in answers:
        env |= answer.envs
        nodes += [device.container_path for device in answer.devices]
        mounts += [(mount.host_path, mount.container_path) for mount in answer.mounts]
        # Older plugins name CDI devices by annotation, newer ones by the field: both count.
        names += requested_names([device.name for device in answer.cdi_devices], answer.annotations.items())
    edits = resolve_cdi([cdi], names)
    env |= dict(edits.env)
    if nodes := [*nodes, *edits.device_nodes]:
        env[DEVICE_NODES_VARIABLE] = ",".join(dict.fromkeys(nodes))
    for host, inner in (*mounts, *edits.mounts):
        # No mount is made here, so the directory on the host is named instead.
        if inner.rstrip("/") == _VCUDA_DIRECTORY:
            env[VDEVICE_VARIABLE] = f"{host}/{SOCKET_NAME}"
    return env


def _run_s(raw: RawObject, kind: ContainerKind) -> float | None:
    """How long a container without a command runs: an init container ends at once, a sidecar never."""
    if kind is ContainerKind.MAIN:
        return pod_manifest.annotation_number(raw, pod_manifest.RUN_SECONDS_ANNOTATION)
    # A pod of sleeping containers should start by itself, because nobody would end its init containers.
    return 0.0 if kind is ContainerKind.INIT else None


def _command(container: Mapping[str, Any], *, is_timed: bool) -> tuple[str, ...]:
    """The command to run; empty if the container sleeps. Raises Rejected."""
    command = tuple(map(str, (*(container.get("command") or ()), *(container.get("args") or ()))))
    if container.get("image") == HOST_IMAGE:
        if not command:
            raise Rejected(
                f"no command specified: image {HOST_IMAGE} has none of its own, so the manifest must give it"
            )
        return command
    # Arguments alone are for a program that only the image knows; a time is given where nothing is to run.
    is_steered = any(_STEERS.fullmatch(str(v["name"])) for v in container.get("env") or ())
    is_run = container.get("command") and not is_timed and not is_steered and is_harmless(command)
    return command if is_run else ()


def is_harmless(command: Sequence[str]) -> bool:
    """Whether it does the same in any image and changes nothing. What cannot be read counts as not."""
    place, _, program = command[0].rpartition("/")
    if place not in _PLACES:  # a path of the image, which may be anything here
        return False
    if program not in _SHELLS:
        return program in _PROGRAMS
    if len(command) != 3 or command[1] != "-c" or _UNREAD.search(command[2]):
        return False
    words = shlex.shlex(command[2].replace("\n", ";"), posix=True, punctuation_chars=True)
    words.whitespace_split, words.commenters = True, ""
    is_first = True
    try:
        for word in words:
            if word in (";", "&&", "||"):
                is_first = True
            # `test -v` and `printf -v` of bash evaluate what a variable holds.
            elif (
                set(word) <= set("();&|")
                or word.startswith("-v")
                or (is_first and word not in (*_BUILT_IN, *_BEFORE_A_COMMAND, "for"))
            ):
                return False
            elif word not in _BEFORE_A_COMMAND:
                is_first = False
    except ValueError:  # an open quotation mark
        return False
    return True


def _is_of_job(raw: RawObject) -> bool:
    return any(owner.get("kind") == "Job" for owner in raw["metadata"].get("ownerReferences") or ())


def _note(container: Mapping[str, Any], run_s: float | None) -> str:
    """The sentence on what happens instead of the command."""
    command = shlex.join(map(str, (*(container.get("command") or ()), *(container.get("args") or ()))))
    what = (
        f"`{command:.{_SHOWN_CHARS}}` of {container.get('image')}" if command else f"what {container.get('image')} has"
    )
    end = "until it is deleted" if run_s is None else f"{run_s:g} s and ends well"
    return f"The sandbox runs no image: instead of {what} this container sleeps {end}"


def container_of(raw: RawObject, name: str) -> Mapping[str, Any]:
    return next(container for container in pod_manifest.raw_containers(raw) if container["name"] == name)
