"""Makes the rest of the fake driver's two libraries: a weak stub for each function that cuda.c and nvml.c do not
define, and the table for cuGetProcAddress.

The names are those that NVIDIA's headers declare (cuda.h, nvml.h), and those that the isolation libraries look for,
which know functions that newer headers have dropped. Versions are from cudaTypedefs.h: `PFN_cuMemAlloc_v3020` is the
type of cuMemAlloc since CUDA 3.2, which is the symbol cuMemAlloc_v2. Standard library alone.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

_UNSUPPORTED = {"cu": 801, "nvml": 3}  # CUDA_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_SUPPORTED
_SPELLINGS = ((), ("-D__CUDA_API_VERSION_INTERNAL",), ("-DCUDA_API_PER_THREAD_DEFAULT_STREAM",))
"""cuda.h declares other names under each."""

_LATER = "cuMemAlloc_v3"
"""No header has it: what a later CUDA may have under the name cuMemAlloc."""
_DOES_NOTHING = re.compile(
    r"cu(Memcpy|MemsetD|Event(Record|Synchronize|Query|Destroy)|Stream(Query|WaitEvent)|Profiler|MemAdvise|MemPrefetch"
    r"|MemPool(Destroy|TrimTo|Set)|MemHost(Unr|R)egister|Mem(Map|Unmap|SetAccess|AddressFree)|CtxSet(CacheConfig|SharedMem)"
    r"|DevicePrimaryCtxSetFlags|Func(Set|Load)|DeviceSetMemPool|CtxResetPersisting|CheckpointProcess)"
)
"""Copies and the like: nothing is behind a pointer, so there is nothing to do, and they succeed."""


def generate(include: Path, output: Path, library_sources: Sequence[Path] = ()) -> None:
    """Writes cuda_rest.c and nvml_rest.c into `output`. `library_sources` are directories of C sources with tables of
    names.
    """
    known = set(_names_in_tables(library_sources))
    cuda = _declared_by_cuda(include) | {name for name in known if name.startswith("cu")}
    nvml = set(re.findall(r"\bDECLDIR\s+(nvml\w+)\s*\(", (include / "nvml.h").read_text(encoding="utf-8")))
    nvml |= {name for name in known if name.startswith("nvml")}
    typedefs = (include / "cudaTypedefs.h").read_text(encoding="utf-8")
    symbols = list(_symbols(cuda | {_LATER}, typedefs + "PFN_cuMemAlloc_v14000)"))
    (output / "cuda_rest.c").write_text(_stubs(cuda | {_LATER}, "cu") + _table(symbols), encoding="utf-8")
    (output / "nvml_rest.c").write_text(_stubs(nvml, "nvml"), encoding="utf-8")


def _declared_by_cuda(include: Path) -> set[str]:
    found: set[str] = set()
    for spelling in _SPELLINGS:
        command = ["cc", "-E", *spelling, f"-I{include}", "-include", "cuda.h", "-xc", "/dev/null"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found |= set(re.findall(r"\bCUresult\s+(cu\w+)\s*\(", text))
    return found


def _names_in_tables(sources: Iterable[Path]) -> Iterable[str]:
    for directory in sources:
        for path in sorted(directory.rglob("*.c")):
            yield from re.findall(
                r'\.name\s*=\s*"((?:cu|nvml)\w+)"', path.read_text(encoding="utf-8", errors="replace")
            )


def _stubs(names: Iterable[str], prefix: str) -> str:
    lines = ['#include "symbols.h"']
    for name in sorted(names):
        code = 0 if _DOES_NOTHING.match(name) else _UNSUPPORTED[prefix]
        lines.append(f'__attribute__((weak)) int {name}(void) {{ return answer_unsupported("{name}", {code}); }}')
    return "\n".join(lines) + "\n"


def _symbols(names: set[str], typedefs: str) -> Iterable[tuple[str, int, bool, str]]:
    """(base, since, is per thread, symbol) of each name."""
    since: defaultdict[tuple[str, bool], set[int]] = defaultdict(set)
    for base, version, suffix in re.findall(r"\bPFN_(cu\w+?)_v(\d{4,5})((?:_ptsz|_ptds)?)\)", typedefs):
        since[base, bool(suffix)].add(int(version))
    variants: defaultdict[tuple[str, bool], list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        stem, per_thread, _ = re.fullmatch(r"(\w+?)((_ptsz|_ptds)?)", name).groups()  # type: ignore[union-attr]
        numbered = re.fullmatch(r"(\w+?)_v(\d)", stem)
        base, number = (numbered[1], int(numbered[2])) if numbered else (stem, 1)
        variants[base, bool(per_thread)].append((number, name))
    for (base, is_per_thread), found in sorted(variants.items()):
        versions = sorted(since[base, is_per_thread] or since[base, False])
        oldest_first = sorted(found)
        # Headers drop old variants: the newest symbol has the newest version, and so on backwards.
        padded = [0] * (len(oldest_first) - len(versions)) + versions[max(0, len(versions) - len(oldest_first)) :]
        for (_, name), version in zip(oldest_first, padded, strict=True):
            yield base, version, is_per_thread, name


def _table(symbols: Sequence[tuple[str, int, bool, str]]) -> str:
    rows = [
        f'    {{"{base}", {since}, {int(is_per_thread)}, (void *){name}}},'
        for base, since, is_per_thread, name in symbols
    ]
    return "\n".join(["const driver_symbol driver_symbols[] = {", *rows, "    {0, 0, 0, 0},", "};"]) + "\n"
