"""The quantized linear layers of quantize.py in C++ for x86: integer dot products, any number of rows.

    load()                   builds the extension once (about 10 s of compiler) and loads it; "" when it can
                             be used, else the reason in one line
    use_cpu_kernels(model)   replaces the Int4Linear and Int8Linear layers of a model by the classes below
    CpuInt4Linear, CpuInt8Linear

Activations become 16-bit integers with a step per row and group of inputs, an error far below bfloat16's
own; products and their sums over a group are exact.  Weights are kept in an order of their own: linear_cpu.h
says which.  With AVX-512 VNNI or AVX2.  Copy it out with quantize.py, cpu_extension.py, linear_cpu.h,
linear_cpu.cpp, linear_cpu_kernels.cpp and cpu_vector.h.
"""
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpu_extension import X86, X86_FLAGS, HugePages, Unit, build_and_load, separate_allocations
from quantize import PACK_VALUES, Int4Linear, Int8Linear, _pair, _quantize_rows, _slabs, gemm_dtype

UNITS = (*(Unit(name, "linear_cpu_kernels.cpp", ("-O3", *flags, f"-DGPT_LONG_KERNELS=gpt_long_linear_{name}"))
           for name, flags in X86_FLAGS.items()),
         Unit("operators", "linear_cpu.cpp", ("-O1",), torch=True))


def _int4_fake(x: Tensor, weight: Tensor, scales_and_zeros: Tensor, group: int, n_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n_outputs)


def _int8_fake(x: Tensor, weight: Tensor, scales: Tensor, n_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n_outputs)


@functools.cache
def load() -> str:
    """Build the extension if need be and load it, once a process.  "" if it can be used, else why not."""
    if not X86 or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "the C++ linear layers need a processor with AVX2, so PyTorch's own are used"
    if reason := build_and_load("linear_cpu", UNITS, headers=("linear_cpu.h", "cpu_vector.h")):
        return f"{reason}, so linear layers take PyTorch's own kernels"
    torch.library.register_fake("gpt_long_cpu_linear::int4_mm", _int4_fake)
    torch.library.register_fake("gpt_long_cpu_linear::int8_mm", _int8_fake)
    return ""


def best_panel(n_inputs: int) -> int:
    """P, the outputs that the best kernels for so many inputs compute side by side: 16 or 8."""
    panel = torch.ops.gpt_long_cpu_linear.panel()
    return panel if n_inputs % panel == 0 else 8


def _padding(n_outputs: int, panel: int) -> int:
    """Rows that fill the last panel."""
    return -n_outputs % panel


def int4_panels(packed: Tensor, panel: int) -> Tensor:
    """uint8 [N, K/2], even inputs in the low nibble, into panels: uint8 [N up to a multiple of P, K/2].

    P outputs, 8 inputs at a time, 4 bytes an output: inputs 0 2, 4 6, 1 3, 5 7, the first in the low nibble.
    """
    N, half = packed.shape
    padded = F.pad(packed, (0, 0, 0, _padding(N, panel)))
    four = padded.view(-1, panel, half // 4, 4).transpose(1, 2)  # [panels, K/8, P, 4]
    even, odd = four & 15, four >> 4
    pairs = torch.cat([even[..., ::2] | even[..., 1::2] << 4, odd[..., ::2] | odd[..., 1::2] << 4], dim=-1)
    return pairs.view(-1, half)


def int8_panels(weight: Tensor, panel: int) -> Tensor:
    """int8 [N, K] into panels: int8 [N up to a multiple of P, K]; P outputs, 4 inputs 0 2 1 3 at a time."""
    N, K = weight.shape
    padded = F.pad(weight, (0, 0, 0, _padding(N, panel)))
    four = padded.view(-1, panel, K // 4, 2, 2)  # [panels, P, K/4, pair, in pair]
    return four.permute(0, 2, 1, 4, 3).reshape(-1, K)


class CpuInt4Linear(Int4Linear):
    """Int4Linear over panels: the same arguments, the weight in plain order.  Call load() first."""

    def __init__(self, weight: Tensor, scales_and_zeros: Tensor, bias: Tensor | None = None,
                 panel: int | None = None) -> None:
        nn.Module.__init__(self)
        (N, half), panel = weight.shape, panel or best_panel(2 * weight.shape[1])
        self._set(int4_panels(weight, panel), scales_and_zeros, bias, (N, 2 * half), panel)

    def _set(self, panels: Tensor, both: Tensor, bias: Tensor | None, size: tuple[int, int],
             panel: int) -> None:
        self.n_outputs, self.n_inputs = size
        self.group = self.n_inputs // len(both)
        both = F.pad(both, (0, 0, 0, _padding(size[0], panel))).view(len(both), -1, panel, 2)
        self.register_buffer("weight", panels)
        self.register_buffer("scales_and_zeros", both.transpose(0, 1).contiguous())  # [panels, K/G, P, 2]
        self.register_buffer("bias", bias)

    @classmethod
    def from_layer(cls, layer: Int4Linear) -> "CpuInt4Linear":
        """The same layer from one in any order, a slab at a time."""
        new, (N, K) = cls.__new__(cls), (layer.n_outputs, layer.n_inputs)
        nn.Module.__init__(new)
        panel = best_panel(K)
        panels = torch.empty(N + _padding(N, panel), K // 2, dtype=torch.uint8)
        for lo, hi in _slabs(N, K, PACK_VALUES):
            panels[lo:hi + _padding(hi, panel)] = int4_panels(_pair(layer._nibbles(lo, hi).t()), panel)
        new._set(panels, layer.scales_and_zeros, layer.bias, (N, K), panel)
        return new

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            return self(x.float()).half()
        both, multiply = self.scales_and_zeros, torch.ops.gpt_long_cpu_linear.int4_mm
        y = multiply(x, self.weight, both, self.group, self.n_outputs)
        return y if self.bias is None else y + self.bias


class CpuInt8Linear(Int8Linear):
    """Int8Linear over panels: the same arguments, K a multiple of 8.  Call load() first."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None,
                 dynamic: bool = False, panel: int | None = None) -> None:
        N, panel = len(weight), panel or best_panel(weight.shape[1])
        scales = F.pad(scales, (0, _padding(N, panel))).view(-1, panel)
        super().__init__(int8_panels(weight, panel), scales, bias, dynamic)
        self.n_outputs = N

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            return self(x.float()).half()
        rows, step = _quantize_rows(x) if self.dynamic else (x, None)
        y = torch.ops.gpt_long_cpu_linear.int8_mm(rows, self.weight, self.scales, self.n_outputs)
        y = y if step is None else (y.float() * step).to(x.dtype)
        return y if self.bias is None else y + self.bias


class WideLinear(nn.Linear):
    """A bfloat16 nn.Linear that multiplies in float32, a slab of its weight at a time: AVX2 has no bfloat16
    arithmetic, and what stands in for it is many times slower."""

    def forward(self, x: Tensor) -> Tensor:
        step = max((1 << 20) // self.in_features, 1)
        y = torch.cat([F.linear(x.float(), rows.float()) for rows in self.weight.split(step)], dim=-1)
        y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias


def _converted(layer: nn.Module) -> nn.Module | None:
    """The layer over panels that does the same, or None when there is none."""
    if type(layer) is Int4Linear and layer.weight.device.type == "cpu":
        return CpuInt4Linear.from_layer(layer)
    if type(layer) is Int8Linear and layer.weight.device.type == "cpu" and layer.weight.shape[1] % 8 == 0:
        return CpuInt8Linear(layer.weight, layer.scales, layer.bias, layer.dynamic)
    return None


def use_cpu_kernels(model: nn.Module) -> str:
    """Replace the linear layers of `model`, one by one.  "" when done, else why PyTorch's stay.

    The weights move into large pages, one layer behind the other.
    """
    if reason := load():
        return reason
    with separate_allocations():
        _use_cpu_kernels(model)
    return ""


def _use_cpu_kernels(model: nn.Module) -> None:
    memory, wide = HugePages(), gemm_dtype("cpu", torch.bfloat16) != torch.bfloat16
    parents = [m for m in model.modules() if any(m.children())]  # a list of all would keep every old layer
    for parent in parents:
        for name, child in parent.named_children():
            if type(child) is nn.Linear and wide and child.weight.dtype == torch.bfloat16:
                child.__class__ = WideLinear  # the same weight, which the embedding may share
            elif new := _converted(child):
                for buffer, tensor in new.named_buffers():
                    setattr(new, buffer, memory.place(tensor))
                setattr(parent, name, new)
