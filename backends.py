"""Which kernels a device has: the cache class and the linear layers to use, or why the plain ones stay."""
import torch
from torch import nn

import attention_cpu
import attention_cuda
import linear_cpu
from kv_cache import KVCache


def fastest_cache(device: torch.device) -> tuple[type[KVCache], str]:
    """The cache class with the fastest attention on `device`; a line of reason when that is the plain one."""
    if device.type == "cpu":
        reason = attention_cpu.load()
        return (KVCache, reason) if reason else (attention_cpu.CpuKVCache, "")
    if device.type == "cuda":
        reason = attention_cuda.available(device)
        return (KVCache, reason) if reason else (attention_cuda.TritonKVCache, "")
    return KVCache, f"no attention kernels for {device.type}: the plain path"


def use_fastest_linears(model: nn.Module) -> str:
    """Replace quantized layers of `model` where this processor has faster ones; a line of reason when not."""
    return linear_cpu.use_cpu_kernels(model) if model.norm.weight.device.type == "cpu" else ""
