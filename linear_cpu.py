"""Linear layers in C++ for x86: quantize.py's by integer dot products, and 16-bit ones widened in registers.

    load()            builds the extension once (about 10 s of compiler) and loads it; "" when it can be used,
                      else the reason in one line
    LinearFactory()   makes the layers, as quantize.linear does
    CpuInt4Linear, CpuInt8Linear, CpuLinear; widen(model) makes nn.Linear layers of 16 bits CpuLinear

Activations of quantized layers become 16-bit integers with a step per row and group of inputs, an error far
below bfloat16's own; products and their sums over a group are exact.  Weights of these layers are kept in an
order of their own: linear_cpu.h says which.  With AVX-512 VNNI or AVX2.  Copy it out with quantize.py,
cpu_extension.py, linear_cpu.h, linear_cpu.cpp, linear_cpu_kernels.cpp, cpu_vector.h and cpu_operators.h.
"""
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantize
from cpu_extension import X86, X86_FLAGS, HugePages, Unit, build_and_load
from quantize import Int4Linear, Int8Linear, _quantize_rows, _slabs

UNITS = (*(Unit(name, "linear_cpu_kernels.cpp", ("-O3", *flags, f"-DGPT_LONG_KERNELS=gpt_long_linear_{name}"))
           for name, flags in X86_FLAGS.items()),
         Unit("operators", "linear_cpu.cpp", ("-O1",), torch=True))
FEW_ROWS = 16  # up to which CpuLinear takes the kernels for few rows


def _int4_fake(x: Tensor, weight: Tensor, scales_and_zeros: Tensor, group: int, n_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n_outputs)


def _int8_fake(x: Tensor, weight: Tensor, scales: Tensor, n_inputs: int, n_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n_outputs)


def _dense_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@functools.cache
def load() -> str:
    """Build the extension if need be and load it, once a process.  "" if it can be used, else why not."""
    if not X86 or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "the C++ linear layers need a processor with AVX2, so PyTorch's own are used"
    headers = ("linear_cpu.h", "cpu_vector.h", "cpu_operators.h")
    if reason := build_and_load("linear_cpu", UNITS, headers):
        return f"{reason}, so linear layers take PyTorch's own kernels"
    torch.library.register_fake("gpt_long_cpu_linear::int4_mm", _int4_fake)
    torch.library.register_fake("gpt_long_cpu_linear::int8_mm", _int8_fake)
    torch.library.register_fake("gpt_long_cpu_linear::dense_mm", _dense_fake)
    return ""


def best_panel(n_inputs: int) -> int:
    """P, the outputs that the best kernels for so many inputs compute side by side: 16 or 8."""
    panel = torch.ops.gpt_long_cpu_linear.panel()
    return panel if n_inputs % panel == 0 else 8


def _padded(n: int, panel: int) -> int:
    """The next multiple of a panel's size."""
    return n + -n % panel


def int4_panels(packed: Tensor, panel: int, out: Tensor | None = None) -> Tensor:
    """uint8 [N, K/2], even inputs in the low nibble, into panels: uint8 [N up to a multiple of P, K/2].

    P outputs, 8 inputs at a time, 4 bytes an output: inputs 0 2, 4 6, 1 3, 5 7, the first in the low nibble.
    """
    N, half = packed.shape
    out = torch.empty(_padded(N, panel), half, dtype=torch.uint8) if out is None else out
    for lo, hi in _slabs(N, 2 * half):
        rows = F.pad(packed[lo:hi], (0, 0, 0, -hi % panel))
        four = rows.view(-1, panel, half // 4, 4).transpose(1, 2)  # [panels, K/8, P, 4]
        even, odd = ((x[..., ::2] | x[..., 1::2] << 4) for x in (four & 15, four >> 4))
        out[lo:_padded(hi, panel)] = torch.cat([even, odd], dim=-1).view(-1, half)
    return out


def int8_panels(weight: Tensor, panel: int, out: Tensor | None = None) -> Tensor:
    """int8 [N, K] into panels: int8 [N, K], both up to multiples of P.

    P outputs, 4 inputs at a time: 0 2 1 3.
    """
    N, K = weight.shape
    wide = _padded(K, panel)
    out = torch.empty(_padded(N, panel), wide, dtype=torch.int8) if out is None else out
    for lo, hi in _slabs(N, K):
        rows = F.pad(weight[lo:hi], (0, wide - K, 0, -hi % panel))
        four = rows.view(-1, panel, wide // 4, 2, 2)  # [panels, P, K/4, pair, in pair]
        out[lo:_padded(hi, panel)] = four.permute(0, 2, 1, 4, 3).reshape(-1, wide)
    return out


class CpuInt4Linear(Int4Linear):
    """Int4Linear over panels: the same arguments, the weight in plain order.  Call load() first.

    panel: P, by default the best; panels: uint8 [N up to a multiple of P, K/2] to be filled, by default new.
    """

    def __init__(self, weight: Tensor, scales_and_zeros: Tensor, bias: Tensor | None = None,
                 panel: int | None = None, panels: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.n_outputs, self.n_inputs = weight.shape[0], 2 * weight.shape[1]
        self.group = self.n_inputs // len(scales_and_zeros)
        panel = panel or best_panel(self.n_inputs)
        both = F.pad(scales_and_zeros, (0, 0, 0, -self.n_outputs % panel))
        both = both.view(len(both), -1, panel, 2)
        self.register_buffer("weight", int4_panels(weight, panel, panels))
        self.register_buffer("scales_and_zeros", both.transpose(0, 1).contiguous())  # [panels, K/G, P, 2]
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        both, multiply = self.scales_and_zeros, torch.ops.gpt_long_cpu_linear.int4_mm
        y = multiply(x, self.weight, both, self.group, self.n_outputs)
        return y if self.bias is None else y + self.bias


class CpuInt8Linear(Int8Linear):
    """Int8Linear over panels: the same arguments.  Call load() first."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None,
                 dynamic: bool = False, panel: int | None = None, panels: Tensor | None = None) -> None:
        N, K = weight.shape
        panel = panel or best_panel(K)
        scales = F.pad(scales, (0, -N % panel)).view(-1, panel)
        super().__init__(int8_panels(weight, panel, panels), scales, bias, dynamic)
        self.n_inputs, self.n_outputs = K, N

    def forward(self, x: Tensor) -> Tensor:
        rows, step = _quantize_rows(x) if self.dynamic else (x, None)
        multiply = torch.ops.gpt_long_cpu_linear.int8_mm
        y = multiply(rows, self.weight, self.scales, self.n_inputs, self.n_outputs)
        y = y if step is None else (y.float() * step).to(x.dtype)
        return y if self.bias is None else y + self.bias


class CpuLinear(nn.Linear):
    """An nn.Linear of 16 bits.  Few rows read its weight once, widened in registers.  Many are a GEMM, in
    float32, a slab of the weight at a time, where the processor has no arithmetic of these 16 bits: what
    stands in for it is many times slower."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() <= FEW_ROWS * self.in_features:
            y = torch.ops.gpt_long_cpu_linear.dense_mm(x, self.weight)
            return y if self.bias is None else y + self.bias
        if quantize.gemm_dtype("cpu", x.dtype) == x.dtype:
            return super().forward(x)
        step = max((1 << 20) // self.in_features, 1)
        y = torch.cat([F.linear(x.float(), rows.float()) for rows in self.weight.split(step)], dim=-1)
        y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias


class LinearFactory:
    """Makes layers over panels.  Their weights lie in large pages, one layer behind the other."""

    def __init__(self) -> None:
        self.memory = HugePages()

    def __call__(self, tensors: dict[str, Tensor], scheme: str, bias: Tensor | None = None) -> nn.Module:
        """As quantize.linear, which itself serves where the kernels do not."""
        weight, int8 = tensors["weight"], scheme.startswith("int8")
        if weight.device.type != "cpu":
            return quantize.linear(tensors, scheme, bias)
        N, K = len(weight), weight.shape[1] * (1 if int8 else 2)
        panel = best_panel(K)
        shape = _padded(N, panel), _padded(K, panel) if int8 else K // 2
        panels = self.memory.empty(shape, weight.dtype)
        if int8:
            return CpuInt8Linear(weight, tensors["scales"], bias, scheme == "int8dq", panels=panels)
        return CpuInt4Linear(weight, tensors["scales_and_zeros"], bias, panels=panels)


def widen(model: nn.Module) -> None:
    """Make the 16-bit nn.Linear layers of `model` CpuLinear, over the same weights."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.dtype in (torch.bfloat16, torch.float16):
            layer.__class__ = CpuLinear
