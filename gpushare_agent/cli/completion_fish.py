"""The completion script for fish. Format: fish's manual, `complete`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpushare_agent.cli.completion import Option, Program, Value, Word, first_sentence

_HEAD = """\
# Completion for fish. Print it anew after an update:
#   gpushare-agent completion fish > ~/.config/fish/completions/gpushare-agent.fish
"""


def script(programs: Sequence[Program], settings: Sequence[Option]) -> str:
    lines = [line for program in programs for line in _program(program, settings)]
    return _HEAD + "\n".join(lines) + "\n"


def _program(program: Program, settings: Sequence[Option]) -> Iterator[str]:
    begin = f"complete -c {program.name}"
    yield f"{begin} -f"
    for word in program.words:
        yield f"{begin} -n __fish_use_subcommand -a {word.name} -d {_quoted(first_sentence(word.about))}"
    for word in program.words:
        yield from _word(begin, word, f"__fish_seen_subcommand_from {word.name}")
    takers = " ".join(word.name for word in program.words if word.takes_settings)
    for option in settings:
        yield _option(begin, option, f"__fish_seen_subcommand_from {takers}")


def _word(begin: str, word: Word, condition: str) -> Iterator[str]:
    inner = " ".join(inner.name for inner in word.words)
    before = f"{condition}; and not __fish_seen_subcommand_from {inner}" if inner else condition
    for option in word.options:
        yield _option(begin, option, before)
    for choice in word.choices:
        yield f"{begin} -n {_quoted(before)} -a {_quoted(choice)}"
    for nested in word.words:
        yield f"{begin} -n {_quoted(before)} -a {nested.name} -d {_quoted(first_sentence(nested.about))}"
        yield from _word(begin, nested, f"{condition}; and __fish_seen_subcommand_from {nested.name}")


def _option(begin: str, option: Option, condition: str) -> str:
    parts = [begin, "-n", _quoted(condition)]
    for name in option.names:
        parts += ["-l", name[2:]] if name.startswith("--") else ["-s", name[1:]]
    if option.value is Value.PATH:
        parts.append("-rF")
    elif option.value is Value.TEXT:
        parts.append("-x")
    if option.choices:
        parts += ["-a", _quoted(" ".join(option.choices))]
    return " ".join([*parts, "-d", _quoted(first_sentence(option.about))])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
