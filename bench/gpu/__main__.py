"""`python3 -m bench.gpu`: measures on a real GPU what the isolations keep; docs/how-to/measure-on-a-gpu.md.

    python3 -m bench.gpu --pack build/gpu      where there is a network: gathers what the run needs
    python3 -m bench.gpu --from build/gpu      on the machine with the GPU: measures and writes the report
    python3 -m bench.gpu --part 1 --out 1      one of two parts, each in three and a half minutes
    python3 -m bench.gpu --merge 1 2           one report of both

Exit code 0, also where a step failed: the report says which. 1 where nothing could be packed or measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - here nothing has checked it
        sys.stderr.write(f"gpu: this is Python {sys.version.split()[0]}; the agent needs 3.11 or newer\n")
        return 1
    from bench.gpu.pack import CannotPack, pack
    from bench.gpu.run import COMBINED, ISOLATIONS, PART_S, PARTS, CannotRun, Options, merge, run, say

    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--pack", type=Path, metavar="DIR", help="gather what the run needs there, and measure nothing")
    add("--no-wheels", action="store_true", help="pack no wheels: the Python there has the agent's dependencies")
    packed = Path("build/gpu")
    add("--from", type=Path, dest="package", default=packed, metavar="DIR", help="what was packed (%(default)s)")
    add("--out", type=Path, default=Path("build/gpu-report"), metavar="DIR", help="where the report goes (%(default)s)")
    add("--quick", action="store_true", help="a fraction of the seconds: to try the command, the numbers mean little")
    add(
        "--part", type=int, choices=PARTS, help="only this part: 1 shares next to each other and the driver, 2 all else"
    )
    add(
        "--merge",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="make one report of the folders of parts, and measure nothing",
    )
    add(
        "--limit-s",
        type=float,
        default=PART_S,
        help="seconds of a part after which none of its steps begins (%(default)s)",
    )
    add("--isolations", default=",".join(ISOLATIONS), help="comma list (%(default)s)")
    add(
        "--driver-libraries",
        type=Path,
        metavar="DIR",
        help="where libcuda.so.1 and libnvidia-ml.so.1 are, if not found",
    )
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="for every program, in containers too")
    add("--no-fault", action="store_true", help="leave out the steps that cause an Xid error in a program on purpose")
    options = parser.parse_args()
    if unknown := set(options.isolations.split(",")) - {*ISOLATIONS, *COMBINED}:
        parser.error(f"--isolations: {', '.join(sorted(unknown))}: there are {', '.join((*ISOLATIONS, *COMBINED))}")
    try:
        if options.pack is not None:
            pack(options.pack, say, has_wheels=not options.no_wheels)
            return 0
        if options.merge is not None:
            merge(options.merge, options.out)
            return 0
        run(
            Options(
                package=options.package, out=options.out, limit_s=options.limit_s,
                isolations=tuple(options.isolations.split(",")), driver_libraries=options.driver_libraries,
                passed=dict(text.split("=", 1) for text in options.env), has_faults=not options.no_fault,
                is_quick=options.quick, parts=PARTS if options.part is None else (options.part,),
            )
        )  # fmt: skip
    except (CannotPack, CannotRun) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
