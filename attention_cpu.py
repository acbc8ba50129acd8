"""Attention on the CPU in C++: integer dot products over the cache of kv_cache.py, by all threads.

    load()       builds the extension once (about 15 s of compiler) and loads it; "" when it can be used, else
                 the reason in one line
    available()  whether it can be used
    CpuKVCache   a KVCache whose write and attend are one C++ operator each, and one both at once; what the
                 kernels do not serve (storage orders whose head_dim is not innermost, float16 storage,
                 mask tables) takes the plain path

The start positions are read inside the operators, so a compiled step is one graph for all positions.  Copy it
out with kv_cache.py, cpu_extension.py, attention_cpu*.cpp, attention_cpu*.h, cpu_vector.h and
cpu_operators.h.
"""
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from cpu_extension import X86, X86_FLAGS, HugePages, Unit, build_and_load
from kv_cache import KVCache

LEVELS = ("portable C++", "AVX2", "AVX-512 VNNI")  # instruction sets that the kernels are compiled for
MAX_HEAD_DIM, MAX_PACKED_HEAD_DIM = 512, 256  # kMaxHeadDim of the kernels; the same at 4 bits


def _kernels(name: str, flags: tuple[str, ...] = ()) -> Unit:
    return Unit(name, "attention_cpu_kernels.cpp", ("-O3", *flags, f"-DGPT_LONG_KERNELS=gpt_long_{name}"))


def _units() -> tuple[Unit, ...]:
    flags = ("-O1", "-DGPT_LONG_X86") if X86 else ("-O1",)
    operators = Unit("operators", "attention_cpu.cpp", flags, torch=True)
    return operators, _kernels("portable"), *(_kernels(*pair) for pair in X86_FLAGS.items() if X86)


def _attend_fake(start: Tensor, q: Tensor, *rest: object) -> Tensor:
    B, Hq, T, D = q.shape
    return q.new_empty(B, T, Hq, D).transpose(1, 2)


@functools.cache
def load() -> str:
    """Build the extension if need be and load it, once a process.  "" if it can be used, else why not."""
    headers = ("attention_cpu.h", "cpu_vector.h", "attention_cpu_packed.h", "attention_cpu_int8.h",
               "attention_cpu_avx2.h", "attention_cpu_tile.h", "cpu_operators.h")
    if reason := build_and_load("attention_cpu", _units(), headers):
        return f"{reason}, so attention takes the plain PyTorch path"
    torch.library.register_fake("gpt_long_cpu::write", lambda *_: None)
    torch.library.register_fake("gpt_long_cpu::attend", _attend_fake)
    torch.library.register_fake("gpt_long_cpu::write_and_attend", _attend_fake)
    return ""


def available() -> bool:
    """Whether the C++ kernels can be used; builds them if need be."""
    return load() == ""


def _wide(x: Tensor) -> Tensor:
    """What the kernels take: float16 becomes float32."""
    return x.float() if x.dtype == torch.float16 else x


class CpuKVCache(KVCache):
    """KVCache with C++ write and attend; without a compiler, all of it takes the plain path.

    level: the best instruction set to use, an index into LEVELS; what the processor has caps it.
    """
    level: int = 2

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.has_kernels = available() and self.k_values.device.type == "cpu"

    @staticmethod
    def allocator() -> Callable[..., Tensor]:
        return HugePages().zeros

    def _serves(self, x: Tensor) -> bool:
        """Whether the kernels take this cache and an input x [B, H or Hq, T, D]."""
        stored = (torch.int8, torch.uint8, torch.bfloat16, torch.float32)
        most = MAX_HEAD_DIM if self.k_bases is None and self.v_bases is None else MAX_PACKED_HEAD_DIM
        return (self.has_kernels and x.shape[3] % 16 == 0 and x.shape[3] <= most
                and x.dtype in (*stored[2:], torch.float16)
                and self.k_values.dtype in stored and self.v_values.dtype in stored)

    @property
    def operands(self) -> tuple[Tensor | int | None, ...]:
        """What the operators want besides start and their inputs."""
        return (self.k_values, self.k_scales, self.v_values, self.v_scales, self.k_bases, self.v_bases,
                self.level)

    def _serves_attend(self, q: Tensor) -> bool:
        rows_whole = self.k_values.stride(3) == 1 and self.v_values.stride(3) == 1
        return rows_whole and self.causal_mask == "none" and self._serves(q)

    def write(self, start: Tensor, k: Tensor, v: Tensor) -> None:
        if not self._serves(k):
            return super().write(start, k, v)
        torch.ops.gpt_long_cpu.write(start, _wide(k), _wide(v), *self.operands)

    def attend(self, q: Tensor, start: Tensor) -> Tensor:
        if not self._serves_attend(q):
            return super().attend(q, start)
        return torch.ops.gpt_long_cpu.attend(start, _wide(q), *self.operands).to(q.dtype)

    def write_and_attend(self, start: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`write`, then `attend`: one operator costs less than two."""
        if not self._serves_attend(q):
            self.write(start, k, v)
            return self.attend(q, start)
        both = torch.ops.gpt_long_cpu.write_and_attend
        return both(start, _wide(q), _wide(k), _wide(v), *self.operands).to(q.dtype)
