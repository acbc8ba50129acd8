"""A run on fake tensors: the project's own loading, prefill and decode step, and what they would allocate.

Nothing is allocated and no device is needed: fake tensors have shapes, dtypes and a device, and no bytes.
"""
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from inference import Engine
from kv_cache import at_position
from memory import Plan
from memory_tracker import Tracker, name_tensors


def dry_run(load: Callable[[], object], make_engine: Callable[[object], Engine], device: torch.device,
            prompt_tokens: int, start: int = 0) -> Tracker:
    """Load a model, fill its cache by the first and the last chunk of a prompt, decode a step: all on fake
    tensors, which have shapes and no bytes.  The tracker has the peaks.

    make_engine takes what load returns; not compiled.  start: tokens assumed to be in the cache before.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second of imports, needed here only
    tracker, fake = Tracker(device.type), FakeTensorMode()
    with fake, tracker, _PlainOperators(), torch.inference_mode():
        with tracker.phase("load"):
            fake.cache_enabled = False  # its keys would keep the file's storages
            loaded = load()
            fake.cache_enabled = True
        with tracker.phase("cache"):
            engine = make_engine(loaded)
        name_tensors(tracker, engine.model)
        with tracker.phase("prefill"):
            logits = None
            for lo in sorted({0, max(prompt_tokens - engine.prefill_chunk, 0)}):
                length = min(engine.prefill_chunk, prompt_tokens)
                tokens = torch.zeros(engine.batch, length, dtype=torch.int64, device=device)
                logits = engine.prefill(tokens, start + lo)
            token = engine.sampler(logits)
        del logits
        with tracker.phase("decode"):
            last = min(start + prompt_tokens, engine.cache_size - 1)
            engine.decode(token, at_position(last, engine.batch, device))
    return tracker


def result(tracker: Tracker, planned: Plan) -> dict:
    """The figures for a JSON object, of tensors alone."""
    return {"peak_memory_bytes": tracker.peak_bytes, "peak_memory_how": "dry run",
            "planned_bytes": planned.tensor_bytes, "parts": tracker.peak_parts(),
            "phases": tracker.phase_peaks, "lines": tracker.peak_lines()}


def summary(tracker: Tracker, planned: Plan) -> str:
    """The peak by part and by line, and the formula beside it, for a person."""
    peak, formula = tracker.peak_bytes, planned.tensor_bytes
    phase = max(tracker.phase_peaks, key=tracker.phase_peaks.get)
    rows = [f"Dry run, nothing was allocated: peak {peak / 1e9:.3f} GB, in {phase}; "
            f"by the formula {formula / 1e9:.3f} GB ({100 * (formula / peak - 1):+.1f} %)"]
    rows += ["", "GB at the peak"]
    rows += [f"{n / 1e9:10.3f}  {part}" for part, n in tracker.peak_parts().items()]
    rows += ["", "made by"] + [f"{n / 1e9:10.3f}  {line}" for line, n in tracker.peak_lines().items()]
    phases = {name: n for name, n in tracker.phase_peaks.items() if n}
    rows += ["", "peak of each phase"] + [f"{n / 1e9:10.3f}  {name}" for name, n in phases.items()]
    if more := planned.total_bytes - formula:
        rows += ["", f"On top of that come about {more / 1e6:.0f} MB of libraries and of holes in the heap."]
    return "\n".join(rows)


class _PlainOperators(TorchFunctionMode):
    """What Python or the dispatcher would ask a CUDA device for, as plain operators, which need none:
    indexing, x.to(device), x.copy_(y), x.contiguous(), and which attention kernel to take."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        if func == Tensor.to and len(args) == 2 and not kwargs and isinstance(args[1], torch.device):
            moves = args[0].device != args[1]
            return torch.ops.aten._to_copy(args[0], device=args[1]) if moves else args[0]
        if func == Tensor.contiguous and args[0].device.type == "cuda" and not args[0].is_contiguous():
            return torch.ops.aten.clone(args[0], memory_format=torch.contiguous_format)
        if func is Tensor.copy_ and args[0].device.type == "cuda":
            return torch.ops.aten.copy_(*args)
        if func is F.scaled_dot_product_attention and args[0].device.type == "cuda":
            return _masked_attention(*args, **kwargs)
        indexing = func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device.type == "cuda"
        if not indexing:
            return func(*args, **kwargs)
        x, index, *value = args
        part = _index(x, index if isinstance(index, tuple) else (index,))
        if not value:
            return part
        aten = torch.ops.aten
        return (aten.copy_ if isinstance(value[0], Tensor) else aten.fill_.Scalar)(part, value[0])


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
                      is_causal: bool = False) -> Tensor:
    """What CUDA devices take behind a mask: the memory-efficient kernel, the mask made numbers."""
    if attn_mask is not None:
        numbers = torch.where(attn_mask, q.new_zeros(()), q.new_full((), -torch.inf))
        attn_mask = numbers.expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, False, is_causal=is_causal)[0]


def _index(x: Tensor, index: tuple) -> Tensor:
    """x[index] for slices, integers, None, Ellipsis, and one index tensor."""
    aten = torch.ops.aten
    given = sum(i is not None and i is not Ellipsis for i in index)
    at = index.index(Ellipsis) if any(i is Ellipsis for i in index) else len(index)
    index = index[:at] + (slice(None),) * (x.ndim - given) + index[at + 1:]
    dim, tensors = 0, [None] * len(index)
    for i in index:
        if isinstance(i, int):
            x = aten.select(x, dim, i)
            continue
        if i is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(i, Tensor):
            tensors[dim] = i
        elif i != slice(None):
            x = aten.slice(x, dim, i.start, i.stop, i.step or 1)
        dim += 1
    return aten.index(x, tensors[:x.ndim]) if any(i is not None for i in tensors) else x
