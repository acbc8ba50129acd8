"""What a run took: bytes by part, peak memory and how it was taken, speeds; one JSON object a run."""
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from inference import Engine, Timing
from shell import size


def processor() -> str:
    """The name of this machine's processor, and what of its vector units torch uses."""
    name = "CPU"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def device_name(device: torch.device) -> str:
    """The name of a CUDA device, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def resident_bytes(kind: str = "VmRSS") -> int:
    """What this process holds in memory (Linux; elsewhere 0, and the peak in all): a line of
    /proc/self/status, VmRSS all of it now, VmHWM at its peak, RssFile what of it are pages of files now."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))
    except (OSError, StopIteration):
        import resource
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit if kind == "VmHWM" else 0


@dataclass(frozen=True)
class Resident:
    """What this process held in memory at a time, in bytes: all, and what of it were pages of files."""
    total: int
    files: int

    @classmethod
    def now(cls) -> "Resident":
        return cls(resident_bytes(), resident_bytes("RssFile"))


def peak_memory(device: torch.device, before: Resident) -> dict:
    """Peak bytes of this process and how they were taken; `before`: what Python and torch took.

    The last figure leaves out pages of files, which are the system's to drop and of which it maps as many at
    a time as it likes: of libraries as they come to use, and of a checkpoint while it is read.
    """
    if device.type == "cuda":
        return {"peak_memory_bytes": torch.cuda.max_memory_reserved(device),
                "peak_memory_how": "cuda max reserved",
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(device)}
    peak = resident_bytes("VmHWM")
    above, more_files = peak - before.total, resident_bytes("RssFile") - before.files
    return {"peak_memory_bytes": peak, "peak_memory_how": "peak resident size of the process",
            "peak_above_start_bytes": above, "peak_anonymous_above_start_bytes": above - more_files}


def model_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of the parts of a model with caches attached; tied weights count once, as the embedding."""
    caches = [layer.attention.cache for layer in model.layers]
    scales = sum(x.nbytes for c in caches for x in (c.k_scales, c.v_scales) if x is not None)
    kv = sum(c.nbytes for c in caches)
    mask = caches[0].mask_table
    in_cache = {id(x) for c in caches for x in c.buffers()}
    seen = {id(model.embed.weight)}
    weights = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in seen and id(tensor) not in in_cache:
            seen.add(id(tensor))
            weights += tensor.nbytes
    return {"weights": weights, "embedding": model.embed.weight.nbytes, "kv_cache": kv - scales,
            "kv_scales": scales, "mask": 0 if mask is None else mask.nbytes}


def decode_rate(timing: Timing) -> float | None:
    """Tokens per second of the decode steps; None when there was none."""
    return timing.decode_steps / timing.decode_s if timing.decode_steps else None


def speeds(engine: Engine, timings: list[Timing], parts: dict[str, int]) -> dict:
    """Tokens and bytes per second, medians over samples.  A step reads all weights (of the embedding one row,
    unless it is the output layer too) and the filled share of the cache."""
    middle = sorted(timings, key=lambda t: t.decode_s / max(t.decode_steps, 1))[len(timings) // 2]
    per_step = parts["weights"]
    if engine.model.lm_head.weight is engine.model.embed.weight:
        per_step += parts["embedding"]
    filled = middle.depth + middle.decode_steps / 2
    per_step += (parts["kv_cache"] + parts["kv_scales"]) * filled / engine.cache_size
    rate = decode_rate(middle)
    return {
        "prefill_tokens_per_s": middle.fed / middle.prefill_s,
        "time_to_first_token_s": middle.time_to_first_token_s,
        "decode_tokens_per_s": rate, "depth": middle.depth,
        "bandwidth_bytes_per_s": per_step * rate if rate else None}


def append_json(path: Path, row: dict) -> None:
    """One more line of a .jsonl file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def summary(row: dict) -> str:
    """A few lines of a result row for a person."""
    parts = ", ".join(f"{name.replace('_', ' ')} {size(n)}" for name, n in row["bytes"].items() if n)
    rate = row["decode_tokens_per_s"]
    decode = "no decode step" if rate is None else (
        f"decode {rate:.1f} tokens/s from depth {row['depth']} "
        f"({row['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s)")
    compiled = f"compile {row['compile_s']:.1f} s | " if row["compile_s"] > 0.05 else ""
    above = row.get("peak_above_start_bytes")
    more = "" if above is None else f", {size(above)} above Python and torch"
    return "\n".join([
        f"{row['prompt_tokens']} prompt + {row['new_tokens']} new tokens | load {row['load_s']:.1f} s | "
        f"{compiled}first token after {row['time_to_first_token_s']:.2f} s",
        f"prefill {row['prefill_tokens_per_s']:.1f} tokens/s | {decode}",
        f"{parts} | peak {size(row['peak_memory_bytes'])}{more}"])
