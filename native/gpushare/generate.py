"""Makes what libgpushare knows of the driver's functions, from hooks.in and NVIDIA's headers: table.h, table.c, exports.map.

    python native/gpushare/generate.py INCLUDE OUTPUT [--compiler COMMAND...]

INCLUDE has cuda.h, cudaTypedefs.h and nvml.h. Fails on a name of theirs that hooks.in does not have, as nothing may take or
give back the GPU's memory unnoticed, and on one of hooks.in that no header declares. Standard library alone.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

HOOKS = Path(__file__).with_name("hooks.in")
_SPELLINGS = ((), ("-D__CUDA_API_VERSION_INTERNAL",), ("-DCUDA_API_PER_THREAD_DEFAULT_STREAM",))
"""cuda.h declares other names under each."""
_BY_NAME_ALONE = re.compile(
    r"cu.*(Alloc|Creat|Free|Destroy|Retain|Releas|Reserv|Trim|Pool|Map|Bind|Attach|Detach|Import|Export|Open|Clos|Launch|Upload"
    r"|Instan|Load|Reset|Restor|Prefetch|Lock|Own|Heap|Arena|Space|MemGet|ExecGet"
    r"|(Set|Add|Copy|New|Make|Acquire|Or)(?![a-z]))|nvml.*(Mem|Proc|Usage|Vram|Fb|Frame|Apps)"
)
"""No pattern of hooks.in has such a name, because it takes, gives, or tells of memory."""


class HooksError(Exception):
    """What hooks.in and the headers disagree about."""


def read_hooks(text: str) -> dict[str, str]:
    """The kind of each name, and of each pattern."""
    kinds: dict[str, str] = {}
    for line in re.sub(r"\n +", " ", text).splitlines():
        if not line or line.startswith("#"):
            continue
        heading, _, names = line.partition(":")
        kind = heading.split()[0]
        for name in names.split():
            if kind not in ("hook", "call", "pass", "read") or name in kinds or (kind == "read") != ("*" in name):
                raise HooksError(f"hooks.in: {name} twice, or of the unknown kind {kind}")
            kinds[name] = kind
    return kinds


def declared(include: Path, compiler: Sequence[str]) -> set[str]:
    """Every function of cuda.h and nvml.h."""
    found: set[str] = set()
    for spelling in _SPELLINGS:
        command = [*compiler, "-E", *spelling, f"-I{include}", "-include", "cuda.h", "-xc", "/dev/null"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found |= set(re.findall(r"\bCUresult\s+(cu\w+)\s*\(", text))
    nvml = (include / "nvml.h").read_text(encoding="utf-8")
    return found | set(re.findall(r"\bDECLDIR\s+(nvml\w+)\s*\(", nvml))


def check(kinds: Mapping[str, str], names: set[str]) -> None:
    """Raises HooksError."""
    patterns = {name for name, kind in kinds.items() if kind == "read"}
    if missing := sorted(set(kinds) - patterns - names):
        raise HooksError(f"hooks.in: no header declares {', '.join(missing)}")

    def is_known(name: str) -> bool:
        name = re.sub("_pt[sd][zs]$", "", name)
        only_tells = not _BY_NAME_ALONE.match(name) and any(fnmatch.fnmatchcase(name, one) for one in patterns)
        return only_tells or kinds.get(name) == "pass"

    if unknown := sorted(name for name in names - set(kinds) if not is_known(name)):
        raise HooksError(f"hooks.in says nothing of {', '.join(unknown)}")


def versions(kinds: Mapping[str, str], typedefs: str) -> dict[str, tuple[str, int, bool]]:
    """(base, since, is per thread) of each name: `PFN_cuMemAlloc_v3020` is the type of cuMemAlloc since CUDA 3.2, which is
    the symbol cuMemAlloc_v2."""
    since: defaultdict[tuple[str, bool], set[int]] = defaultdict(set)
    for base, version, suffix in re.findall(r"\bPFN_(cu\w+?)_v(\d{4,5})((?:_ptsz|_ptds)?)\)", typedefs):
        since[base, bool(suffix)].add(int(version))
    variants: defaultdict[tuple[str, bool], list[tuple[int, str]]] = defaultdict(list)
    for name in (name for name, kind in kinds.items() if kind != "read"):
        [(base, number, suffix)] = re.findall(r"^(\w+?)(?:_v(\d))?(_ptsz|_ptds)?$", name)
        variants[base, bool(suffix)].append((int(number or 1), name))
    known: dict[str, tuple[str, int, bool]] = {}
    for (base, is_per_thread), ordered in variants.items():
        # Headers drop the oldest, and have no types for the one of a thread where it has the same.
        numbers = sorted(since[base, is_per_thread] or since[base, False])[-len(ordered) :]
        padded = [0] * (len(ordered) - len(numbers)) + numbers
        known |= {name: (base, one, is_per_thread) for (_, name), one in zip(sorted(ordered), padded, strict=True)}
    return known


def generate(include: Path, output: Path, compiler: Sequence[str] = ("cc",)) -> None:
    """Writes the three files. Raises HooksError."""
    kinds = read_hooks(HOOKS.read_text(encoding="utf-8"))
    check(kinds, declared(include, compiler))
    used = sorted(name for name, kind in kinds.items() if kind in ("hook", "call"))
    known = versions(kinds, (include / "cudaTypedefs.h").read_text(encoding="utf-8"))
    hooked = [name for name in used if kinds[name] == "hook"]
    slots = ",\n".join(f"    SLOT_{name}" for name in used)
    first_nvml = next(name for name in used if name.startswith("nvml"))
    is_hook = ",\n".join(f"    IS_HOOK_{name}" for name in hooked)
    (output / "table.h").write_text(
        f"enum slot {{\n{slots},\n    SLOTS,\n    FIRST_OF_NVML = SLOT_{first_nvml}\n}};\nenum {{\n{is_hook}\n}};\n",
        encoding="utf-8",
    )
    (output / "table.c").write_text("\n".join(_table(used, hooked, known)) + "\n", encoding="utf-8")
    exported = "".join(
        f" {name};" for name in ("dlmopen", "dlopen", "dlsym", "dlvsym", "__asan_default_options", *hooked)
    )
    (output / "exports.map").write_text(f"{{ global:{exported} local: *; }};\n", encoding="utf-8")


def _table(used: Iterable[str], hooked: Sequence[str], known: Mapping[str, tuple[str, int, bool]]) -> Iterable[str]:
    yield '#include "library.h"'
    for name in hooked:
        yield f"extern char gpushare_{name}[];"
    yield "const struct table_entry table[SLOTS] = {"
    for name in used:
        base, since, is_per_thread = known[name]
        hook = f"gpushare_{name}" if name in hooked else "NULL"
        yield f'    {{"{name}", "{base}", {since}, {str(is_per_thread).lower()}, {hook}}},'
    yield "};"


def main() -> int:
    parser = argparse.ArgumentParser(description="Make libgpushare's table of functions.")
    parser.add_argument("include", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--compiler", nargs="+", default=["cc"])
    arguments = parser.parse_args()
    try:
        generate(arguments.include, arguments.output, arguments.compiler)
    except (HooksError, OSError, subprocess.CalledProcessError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
