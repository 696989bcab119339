"""Reads the variables of gpu-manager's image: LOG_LEVEL, EXTRA_FLAGS, LIBCUDA.

Source: gpu-manager 1.1.5, its DaemonSet and start.sh: EXTRA_FLAGS end the command line, and klog gets LOG_LEVEL.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from gpushare_agent.settings.sources import ForeignKey, Layer, RawSetting, flag_words, read_flags

_DEBUG_FROM = 5
"""klog's verbosity from which gpu-manager logs each step; 4 is its manifest's."""
_LEVELS = ("debug", "info", "warning", "error")
_KLOG = {
    "log-dir": "logs go to standard error",
    "logtostderr": "logs go to standard error",
    "alsologtostderr": "logs go to standard error",
    "stderrthreshold": "log.level counts",
    "vmodule": "log.level counts",
}
_LIBCUDA = "the driver directory is described by the file of volume_config"


def read_gpu_manager(environ: Mapping[str, str]) -> Layer:
    """A layer below our own variables."""
    layer = Layer()
    if words := environ.get("EXTRA_FLAGS"):
        _read_extra_flags(words, layer)
    if level := environ.get("LOG_LEVEL"):
        _set_level(level, "LOG_LEVEL", "variable LOG_LEVEL", layer)
    if value := environ.get("LIBCUDA"):
        layer.foreign.append(
            ForeignKey(name="LIBCUDA", value=value[:200], source="variable LIBCUDA", reason=_LIBCUDA, is_lost=True)
        )
    return layer


def _set_level(value: str, name: str, source: str, layer: Layer) -> None:
    """A number of klog's, or one of our words."""
    is_number = value.isascii() and value.isdigit() and len(value) < 4
    if not is_number and value.lower() not in _LEVELS:
        layer.problems.append(
            f"{source}: {value[:80]!r} is no log level; write klog's number, or debug, info, warning, error"
        )
        return
    level = ("debug" if int(value) >= _DEBUG_FROM else "info") if is_number else value.lower()
    layer.values.setdefault("log.level", RawSetting(value=level, source=source))
    layer.foreign.append(ForeignKey(name=name, value=value, source=source, settings={"log.level": level}))


def _read_extra_flags(text: str, layer: Layer) -> None:
    try:
        argv = shlex.split(text)
    except ValueError as error:
        layer.problems.append(f"variable EXTRA_FLAGS: {text[:80]!r} cannot be parted into words: {error}")
        return
    ours: list[str] = []
    for words, name, value in flag_words(argv):
        source = f"variable EXTRA_FLAGS, {words[0].partition('=')[0]}"
        if name == "v" and value:
            _set_level(value, "EXTRA_FLAGS --v", source, layer)
        elif name in _KLOG:
            layer.foreign.append(
                ForeignKey(
                    name=f"EXTRA_FLAGS --{name}", value=value or "", source=source, reason=_KLOG[name], is_lost=True
                )
            )
        else:
            ours += words
    read = read_flags(ours)
    layer.problems += [f"variable EXTRA_FLAGS: {problem}" for problem in read.problems]
    layer.theirs |= read.theirs
    for name, raw in read.values.items():
        source = f"variable EXTRA_FLAGS, {raw.source}"
        layer.put(name, raw.value, source)
        shown = ForeignKey(name=f"EXTRA_FLAGS {raw.source.removeprefix('flag ')}", value=str(raw.value)[:200], source=source,
                           settings={name: str(raw.value)[:200]})  # fmt: skip
        layer.foreign.append(shown)
