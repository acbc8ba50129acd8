"""Which kernels a device has: the cache class and the linear layers to use, or why the plain ones stay."""
from collections.abc import Callable

import torch

import attention_cpu
import attention_cuda
import linear_cpu
import quantize
from kv_cache import KVCache
from load import MakeLinear
from model import Transformer


def fastest_cache(device: torch.device) -> tuple[type[KVCache], str]:
    """The cache class with the fastest attention on `device`; a line of reason when that is the plain one."""
    if device.type == "cpu":
        reason = attention_cpu.load()
        return (KVCache, reason) if reason else (attention_cpu.CpuKVCache, "")
    if device.type == "cuda":
        reason = attention_cuda.available(device)
        return (KVCache, reason) if reason else (attention_cuda.TritonKVCache, "")
    return KVCache, f"no attention kernels for {device.type}: the plain path"


def fastest_linear(device: torch.device) -> tuple[MakeLinear, str]:
    """What makes the fastest quantized layers of `device`; a line of reason when PyTorch's own stay."""
    reason = linear_cpu.load() if device.type == "cpu" else ""
    return (quantize.linear, reason) if reason or device.type != "cpu" else (linear_cpu.LinearFactory(), "")


def load_fastest(load: Callable[[MakeLinear], Transformer], device: torch.device,
                 ) -> tuple[Transformer, type[KVCache], list[str]]:
    """A model with the fastest layers of `device`, the cache class to use, and why some are the plain ones.

    load: gets what makes quantized layers, returns the model.
    """
    (cache_class, no_attention), (make_linear, no_linear) = fastest_cache(device), fastest_linear(device)
    model = load(make_linear)
    if device.type == "cpu" and not no_linear:
        linear_cpu.widen(model)
    return model, cache_class, [reason for reason in (no_attention, no_linear) if reason]
