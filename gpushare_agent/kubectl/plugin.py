"""`kubectl gpushare`: the commands that show nodes, for a person with a kubeconfig. kubectl finds the program by its name.

The entry point is kubectl-gpushare; kubectl passes on everything behind `gpushare`. For completion behind `kubectl gpushare`
it calls kubectl_complete-gpushare, and reads from it one word a line and last a number for the kind of the words.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpushare_agent.core.cli.command_line import KUBECTL, CommandLine, print_version
from gpushare_agent.kubectl.view_commands import view_commands

_NO_FILES = ":4"
"""Last line of an answer to kubectl: nothing else, no names of files."""


def complete(argv: Sequence[str] | None = None) -> int:
    """Answers kubectl's completion of the words after `kubectl gpushare`; the last is unfinished, perhaps empty."""
    from gpushare_agent.core.cli.completion import completions

    words = list(sys.argv[1:] if argv is None else argv)
    # One word a line; kubectl passes the last line on to cobra's script as its directive.
    print("\n".join([*completions(PLUGIN_LINE, words), _NO_FILES]))
    return 0


PLUGIN_LINE = CommandLine(
    program=KUBECTL,
    purpose="shows which pod has which share of which GPU, on every node of a cluster.",
    commands=(*view_commands(is_plugin=True), print_version("kubectl-gpushare")),
    more=f"`{KUBECTL} COMMAND --help` explains one; docs/reference/cli.md lists the rights that you need.",
)

main = PLUGIN_LINE.main
