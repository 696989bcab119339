"""Programs that load no libgpushare, in containers with a share: they are seen, said, and ended where it is wanted."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.real_isolation.support_isolation import Built, IsolationNode, open_node

pytestmark = pytest.mark.isolation

PROGRAM = ("/opt/programs/gpu_program", "dlsym", "12080")
LIBRARIES = "/run/nvidia-driver:/usr/local/nvidia/lib64"
LOADER = Path("/lib64/ld-linux-x86-64.so.2")
PRELOADS = {"": "/etc/ld.so.preload", "nix": "/etc/ld-nix.so.preload", "foreign": "/opt/ld.so.preload"}
"""The file that a loader reads: the machine's own, nixpkgs', and one that no agent mounts. All fit where the first is."""
WAYS: dict[str, Sequence[str]] = {
    "by a foreign loader": ("/opt/programs/foreign", "--library-path", LIBRARIES, *PROGRAM),
    "in a chroot": (
        *("sh", "-c", 'mkdir /tmp/r && mount --rbind / /tmp/r && cd /tmp/r/etc && umount ld*.preload vcuda/usage vcuda'
        ' && exec chroot /tmp/r "$@"', "sh", *PROGRAM),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["warn", "end"])
def setting(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def opened(built: Built, setting: str) -> Iterator[IsolationNode]:
    content = LOADER.read_bytes() if LOADER.exists() else b""
    own, *others = (path.encode().ljust(24, b"\0") for path in PRELOADS.values())
    if own not in content:
        pytest.skip(f"no {LOADER} that reads {PRELOADS['']}, with room for a longer path")
    for name, other in zip([*PRELOADS][1:], others, strict=True):
        (built.programs / name).write_bytes(content.replace(own, other))
        (built.programs / name).chmod(0o755)
    with open_node(built, "gpushare", f"--libgpushare.unlimited={setting}") as node:
        yield node


@pytest.fixture
def node(opened: IsolationNode) -> Iterator[IsolationNode]:
    yield opened
    opened.delete_all()


def shown(node: IsolationNode, path: str) -> str:
    with urllib.request.urlopen(node.status()["node"]["addresses"]["web"] + path, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def is_limited(node: IsolationNode, pod: str) -> bool:
    """By the node's document, which must agree with itself and with the metrics."""
    [found] = [one for one in json.loads(shown(node, "/api/v1/node"))["containers"] if one["pod"] == pod]
    keeper = "nobody" if found["not_limited"] else "gpushare"
    assert (found["kept"]["memory_by"], found["kept"]["compute_by"]) == (keeper, keeper)
    return not found["not_limited"]


@pytest.mark.parametrize("way", WAYS)
def test_a_program_without_the_library_is_found_and_its_neighbour_is_not(
    node: IsolationNode, setting: str, way: str
) -> None:
    """It takes 30 blocks of 8."""
    for name in ("bare", "web"):
        node.apply(name, cores=30, blocks=10)
    before = node.log_lines("ShareNotLimited"), node.log_lines("UnlimitedProcessEnded")
    with (
        node.start("web", "alloc:alloc:256:20", "wait") as beside,
        node.start_command("bare", [*WAYS[way], "alloc:alloc:256:30", "wait"]) as bare,
    ):
        for program in (beside, bare):
            assert program.wait_for("wait"), program.error
        node.wait_until(lambda: node.log_lines("ShareNotLimited") > before[0], "an Event")
        if setting == "warn":
            node.wait_until(lambda: not is_limited(node, "bare"), "the node's document")
            assert "gpushare_container_not_limited{" in shown(node, "/metrics")
            bare.go_on()
        code = bare.outcome().code
        node.wait_until(lambda: is_limited(node, "bare"), "a container whose program has ended")
        assert is_limited(node, "web") and "gpushare_container_not_limited{" not in shown(node, "/metrics")
        beside.go_on()
        blocks = beside.outcome().step("alloc")["blocks"]
    ended = node.log_lines("UnlimitedProcessEnded") - before[1]
    assert (code != 0, ended, blocks) == (setting == "end", int(setting == "end"), 8)
    assert node.log_lines("ShareNotLimited") - before[0] == 1


def test_a_program_by_nixpkgs_loader_is_limited(node: IsolationNode) -> None:
    node.apply("nix", cores=30, blocks=10)
    command = ["/opt/programs/nix", "--library-path", LIBRARIES, *PROGRAM, "alloc:alloc:256:30", "wait"]
    with node.start_command("nix", command) as program:
        assert program.wait_for("wait"), program.error
        program.go_on()
        ended = program.outcome()
    assert (ended.step("alloc")["blocks"], ended.code, ended.error) == (8, 0, "")
