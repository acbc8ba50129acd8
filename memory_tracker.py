"""Follow the bytes of every tensor, real or fake: what is live, the peak, and the lines of code that made it.

    with Tracker("cpu") as tracker:
        ...                                     # phases: with tracker.phase("prefill"): ...
    tracker.peak_bytes, tracker.peak_parts(), tracker.peak_lines()

A storage counts from the operator that makes it until it is freed.  A tensor that no operator made (mapped
from a checkpoint) counts from its first use: that is when its pages come into memory.  What operators use
inside themselves and free before they return is not seen.
"""
import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

HERE = str(Path(__file__).resolve().parent)


@dataclass
class Storage:
    """One allocation.  line: "file.py:123 function" of this project, and the operator; part: settled last."""
    nbytes: int
    line: str
    phase: str
    part: str


class Tracker(TorchDispatchMode):
    """Counts the storages of one device type while it is active.  on_change, if given, is called with
    (seconds since the start, +bytes or -bytes, Storage) for each allocation and each release."""

    def __init__(self, device_type: str = "cpu", on_change: Callable | None = None) -> None:
        super().__init__()
        self.device_type, self.on_change = device_type, on_change
        self.live: dict[int, Storage] = {}
        self.live_bytes = self.peak_bytes = 0
        self.at_peak: list[Storage] = []
        self.phase_peaks: dict[str, int] = {}
        self.current_phase = "start"
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Allocations made inside belong to this phase."""
        before, self.current_phase = self.current_phase, name
        self._note_peak()
        try:
            yield
        finally:
            self.current_phase = before

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def name(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Say what tensors are: they count under `part`, from their birth on."""
        for tensor in tensors:
            held = tensor is not None and self.live.get(tensor.untyped_storage()._cdata)
            if held:
                held.part = part

    def peak_parts(self) -> dict[str, int]:
        """Bytes of each part at the peak, the largest first."""
        return _sums((s.part, s.nbytes) for s in self.at_peak)

    def peak_lines(self, least: float = 0.002) -> dict[str, int]:
        """Bytes by line of code at the peak: those of at least the share `least` of it, the largest first."""
        lines = _sums((s.line, s.nbytes) for s in self.at_peak)
        return {line: n for line, n in lines.items() if n >= least * self.peak_bytes}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        self._see((args, kwargs), None)
        out = func(*args, **kwargs)
        if func is not torch.ops.aten.set_.source_Storage_storage_offset:  # torch.load: nothing is read yet
            self._see(out, func)
        return out

    def _see(self, values: object, func: OpOverload | None) -> None:
        """Start to count the storages that are new: results of an operator, or arguments used first."""
        for tensor in _tensors(values):
            if tensor.device.type != self.device_type:
                continue
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self.live or nbytes == 0:
                continue
            line, file = _line_of_project()
            operator = str(func).removesuffix(".default") if func else ""
            from_file = not operator and self.current_phase == "load"
            part = "file" if from_file else _part(tensor, line, file, operator)
            held = Storage(nbytes, f"{line} ({operator or 'first use'})", self.current_phase, part)
            self.live[key] = held
            weakref.finalize(storage, self._free, key).atexit = False
            self._count(nbytes, held)

    def _free(self, key: int) -> None:
        held = self.live.pop(key)
        self._count(-held.nbytes, held)

    def _count(self, change: int, held: Storage) -> None:
        self.live_bytes += change
        if self.on_change:
            self.on_change(self.now(), change, held)
        if change > 0:
            self._note_peak()

    def _note_peak(self) -> None:
        phase = self.current_phase
        self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), self.live_bytes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.at_peak = list(self.live.values())


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    """Whether an operator is made of others, which then can be seen one by one."""
    if func.namespace == "prim":
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _tensors(values: object) -> Iterator[Tensor]:
    """The tensors in an operator's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Totals by name, the largest first."""
    totals: dict[str, int] = {}
    for name, n in pairs:
        totals[name] = totals.get(name, 0) + n
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _line_of_project() -> tuple[str, str]:
    """("kv_cache.py:166 attend_blocks", "kv_cache.py"): the innermost frame of ours, memory*.py apart."""
    frame = sys._getframe(1)
    while frame is not None:
        folder, _, name = frame.f_code.co_filename.rpartition("/")
        if folder == HERE and not name.startswith("memory"):
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}", name
        frame = frame.f_back
    return "elsewhere", ""


def _part(tensor: Tensor, line: str, file: str, operator: str) -> str:
    """What a tensor is by where it was made; weights and caches are named later, by Tracker.name."""
    in_attention = file.startswith(("kv_cache", "attention"))
    is_mask = tensor.dtype == torch.bool or operator.startswith("aten.where")  # SDPA turns it into numbers
    if in_attention and is_mask and tensor.ndim >= 2:
        return "mask"
    return "other" if file in ("load.py", "quantize.py", "") and line else "activations"


def name_tensors(tracker: Tracker, model: nn.Module) -> None:
    """Name a model's tensors and those of its caches, whatever these register; tied: the embedding."""
    tracker.name("linears", [*model.parameters(), *model.buffers()])
    tracker.name("embedding", [model.embed.weight])
    for layer in model.layers:
        for name, tensor in layer.attention.cache.named_buffers():
            part = "mask" if "mask" in name else "cache scales" if "scale" in name else "cache values"
            tracker.name(part, [tensor])
