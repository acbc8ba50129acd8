"""A picture of allocated bytes over time, stacked by part, and on CUDA the allocator's own snapshot.

    with recording(Path("out.png"), device) as watch:      # watch is None without a path
        with phase(watch, "load"): ...
        for token in follow(watch, tokens): ...             # prefill up to the first token, then decode
        name_parts(watch, model)                            # while the model is still there
"""
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from memory_tracker import Tracker, name_tensors

STACK = {  # parts of the tracker in each band of the picture, from below, and its colour
    "weights": (("linears", "embedding"), "#4c72b0"),
    "cache": (("cache values", "cache scales"), "#55a868"),
    "mask": (("mask",), "#c44e52"),
    "activations": (("activations",), "#ccb974"),
    "other": (("other", "file"), "#8c8c8c"),
}
COLUMNS = 2000  # points in time that are drawn; each is the highest of its stretch


class Recorder(Tracker):
    """A tracker that keeps every change: (seconds, bytes, Storage), and when each phase began and ended."""

    def __init__(self, device_type: str) -> None:
        self.changes, self.phases = [], []
        super().__init__(device_type, lambda *change: self.changes.append(change))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self.now()
        with super().phase(name):
            yield
        if self.phases and self.phases[-1][0] == name:  # a decode step after another
            began = self.phases.pop()[1]
        self.phases.append((name, began, self.now()))


@contextlib.contextmanager
def recording(path: Path | None, device: torch.device) -> Iterator[Recorder | None]:
    """Record what happens inside and draw it to `path`; nothing without one.

    On CUDA also path with .pickle, for pytorch.org/memory_viz.  ValueError when matplotlib is missing.
    """
    if path is None:
        yield None
        return
    _pyplot()  # before hours of work
    recorder = Recorder(device.type)
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    with recorder:
        yield recorder
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
        torch.cuda.memory._record_memory_history(enabled=None)
    draw(recorder, path)


def phase(watch: Tracker | None, name: str) -> contextlib.AbstractContextManager:
    """A phase of the tracker, or nothing without one."""
    return watch.phase(name) if watch else contextlib.nullcontext()


def follow(watch: Tracker | None, tokens: Iterable[int]) -> Iterator[int]:
    """Pass tokens on; what is done for the first is prefill, for the others decode."""
    tokens, name = iter(tokens), "prefill"
    while True:
        with phase(watch, name):
            token = next(tokens, None)
        if token is None:
            return
        yield token
        name = "decode"


def name_parts(watch: Tracker | None, model: nn.Module) -> None:
    """Name the tensors of a model and its caches, so that their past is drawn in their colour."""
    if watch:
        name_tensors(watch, model)


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--memory_profile draws with matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def columns(recorder: Recorder, count: int = COLUMNS) -> tuple[list[float], dict[str, list[int]]]:
    """Times, and the bytes of each band of STACK at the highest moment of each of `count` stretches."""
    band_of = {part: band for band, (parts, _) in STACK.items() for part in parts}
    end = max(recorder.changes[-1][0], recorder.phases[-1][2]) if recorder.changes else 1.0
    live = dict.fromkeys(STACK, 0)
    highest: dict[int, dict[str, int]] = {}
    column = 0
    for seconds, change, storage in recorder.changes:
        now = min(int(seconds / end * count), count - 1)
        if now != column:  # what was live goes on until something changes
            for missed in range(column + 1, now + 1):
                highest[missed] = dict(live)
            column = now
        live[band_of.get(storage.part, "other")] += change
        if column not in highest or sum(live.values()) > sum(highest[column].values()):
            highest[column] = dict(live)
    for missed in range(column + 1, count):
        highest[missed] = dict(live)
    empty = dict.fromkeys(STACK, 0)
    rows = [highest.get(i, empty) for i in range(count)]
    return [i * end / count for i in range(count)], {band: [row[band] for row in rows] for band in STACK}


def draw(recorder: Recorder, path: Path) -> None:
    """Draw what was recorded: bands stacked, phases marked, the peak named."""
    pyplot = _pyplot()
    times, bands = columns(recorder)
    unit, name = (1e9, "GB") if recorder.peak_bytes >= 1e9 else (1e6, "MB")
    figure, axes = pyplot.subplots(figsize=(10, 5), dpi=110, layout="constrained")
    shown = [band for band in STACK if any(bands[band])]
    axes.stackplot(times, [[n / unit for n in bands[band]] for band in shown],
                   labels=[f"{band}, up to {max(bands[band]) / unit:,.1f} {name}" for band in shown],
                   colors=[STACK[band][1] for band in shown], linewidth=0, step="post")
    totals = [sum(row) for row in zip(*bands.values(), strict=True)]
    top = max(totals)
    at = totals.index(top)
    large = {part: n for part, n in recorder.peak_parts().items() if n >= 0.01 * top}
    parts = ", ".join(f"{part} {n / unit:,.1f}" for part, n in large.items())
    axes.plot([times[at]], [top / unit], "k.", markersize=6)
    axes.set_title(f"peak {top / unit:,.1f} {name}: {parts}", fontsize=10, loc="left")
    axes.set_ylim(0, top / unit * 1.28)
    axes.set_xlim(0, times[-1])
    for i, (phase_name, began, ended) in enumerate(recorder.phases):
        axes.axvspan(began, ended, ymin=0.86, color="#eeeeee" if i % 2 else "#dddddd", linewidth=0)
        if ended - began > 0.04 * times[-1]:
            axes.text((began + ended) / 2, top / unit * 1.19, phase_name, ha="center", va="center")
    axes.set_xlabel("seconds (each operator is followed, so slower than an ordinary run)")
    axes.set_ylabel(f"{name} of tensors")
    axes.legend(loc="lower right", framealpha=0.9, reverse=True, fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)
