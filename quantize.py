"""Weight-only (and dynamic) quantized linear layers, and a script that saves a quantized checkpoint.

    int8wo      int8 weights, one scale per output row; activations stay as they are
    int8dq      the same weights, activations quantized to int8 per token when used
    int4wo-G    4-bit weights, a scale and a zero per group of G inputs (G = 32, 64, 128, 256)

    python quantize.py --checkpoint_path checkpoints/NAME/model.pth --quantization int4wo-64

A packed layer packs, unpacks, sizes and multiplies by itself; nobody outside knows its bits.  Few rows
(decode) go through torch's own kernels, many rows (prefill) through floating-point GEMMs over a slab of the
same weights at a time.  Letters: N outputs, K inputs, G group, M rows.  Needs torch only.
"""
import argparse
import functools
import os
import pickle
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

GROUPS = (256, 128, 64, 32)
SCHEMES = ("int8wo", "int8dq", *(f"int4wo-{g}" for g in sorted(GROUPS)))
SCHEME_KEY = "quantization"  # where a saved state dict names its scheme
MANY_ROWS = 32  # from here on a GEMM over unpacked weights beats the kernels made for few rows
SLAB_VALUES = 1 << 22  # weights unpacked at a time
PACK_VALUES = 3 << 20  # weights rounded at a time, which takes up to 16 bytes for each
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of a group's range that rounding tries


def check_scheme(scheme: str | None) -> None:
    """ValueError, with the legal names, unless `scheme` is None or one of SCHEMES."""
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(f"quantization {scheme!r} is not known; known: {', '.join(SCHEMES)}")


def legal_group(n_inputs: int, group: int) -> int:
    """The largest of GROUPS that is at most `group` and divides `n_inputs`; ValueError when none does."""
    for g in GROUPS:
        if g <= group and n_inputs % g == 0:
            return g
    raise ValueError(f"int4 needs layers whose input size is a multiple of 32, not {n_inputs}; use int8wo")


def gemm_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a device multiplies matrices fastest without losing any of `dtype`'s precision."""
    if device_type != "cpu" or dtype == torch.float32:
        return dtype
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # what ATEN_CPU_CAPABILITY may deny
    fast = {torch.bfloat16: torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported(),
            torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported()}
    return dtype if wide and fast.get(dtype) else torch.float32


def _slabs(n_rows: int, n_columns: int, values: int = SLAB_VALUES) -> list[tuple[int, int]]:
    """Ranges of rows of about `values` values each, all but the last a multiple of 64 long."""
    step = max(values // n_columns // 64, 1) * 64
    return [(lo, min(lo + step, n_rows)) for lo in range(0, n_rows, step)]


class Int8Linear(nn.Module):
    """int8 weights [N, K] with a scale per row; `dynamic` quantizes activations to int8 per token, too."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None,
                 dynamic: bool = False) -> None:
        super().__init__()
        self.dynamic = dynamic
        self.register_buffer("weight", weight)  # int8 [N, K]
        self.register_buffer("scales", scales)  # bfloat16 [N]
        self.register_buffer("bias", bias)

    @classmethod
    def pack(cls, weight: Tensor) -> dict[str, Tensor]:
        """Quantize weight [N, K] symmetrically: {"weight": int8 [N, K], "scales": bfloat16 [N]}."""
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(len(weight), dtype=torch.bfloat16, device=weight.device)
        for lo, hi in _slabs(*weight.shape, PACK_VALUES):
            w = weight[lo:hi].float()
            scales[lo:hi] = (w.abs().amax(1) / 127).clamp_min(1e-8)
            values[lo:hi] = (w / scales[lo:hi, None].float()).round_().clamp_(-127, 127)
        return {"weight": values, "scales": scales}

    @classmethod
    def random(cls, n_outputs: int, n_inputs: int, device: torch.device | str) -> dict[str, Tensor]:
        """What `pack` would make of a random weight, without ever holding that weight."""
        weight = _random_bytes(n_outputs * n_inputs, device).view(torch.int8).view(n_outputs, n_inputs)
        scales = torch.full((n_outputs,), 0.014 * n_inputs ** -0.5, dtype=torch.bfloat16, device=device)
        return {"weight": weight, "scales": scales}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        step = None
        if self.dynamic:
            rows, step = _quantize_rows(rows)
        whole = rows.shape[1] % 64 == 0  # the kernel reads past the end of other rows
        if rows.dtype == torch.bfloat16 and len(rows) < MANY_ROWS and x.device.type == "cpu" and whole:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        elif x.device.type == "cuda" and self.dynamic and len(rows) > 16:  # _int_mm takes more than 16 rows
            y = torch._int_mm(rows.to(torch.int8), self.weight.t()) * self.scales.float()
        elif x.device.type == "cuda":
            y = F.linear(rows, self.weight.to(rows.dtype)) * self.scales  # one fused kernel when compiled
        else:
            half = rows.dtype == torch.float16  # where sums of integers overflow
            rows = rows.to(torch.float32 if half else gemm_dtype(rows.device.type, rows.dtype))
            slabs = _slabs(*self.weight.shape)
            y = torch.cat([F.linear(rows, self.weight[lo:hi].to(rows.dtype)) for lo, hi in slabs], dim=-1)
            y = y * self.scales
        if step is not None:
            y = y.float() * step
        y = y.to(x.dtype).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class Int4Linear(nn.Module):
    """4-bit weights of N x K with a scale and a zero per group of inputs: w = (nibble - 8) * scale + zero.

    `weight` is uint8 [N, K/2] in the order that this device's kernel reads, or plain where it has none;
    `scales_and_zeros` is bfloat16 [K/G, N, 2].
    """

    def __init__(self, weight: Tensor, scales_and_zeros: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.n_outputs, self.n_inputs = weight.shape[0], 2 * weight.shape[1]
        self.group = self.n_inputs // len(scales_and_zeros)
        self.block = 0  # rows that the CPU kernel interleaves; 0 when `weight` is in plain order
        self.kernel = None
        if weight.device.type == "cpu" and self.n_outputs % 16 == 0:
            self.block = _cpu_block_rows()
            self.kernel = torch.ops.aten._weight_int4pack_mm_for_cpu if self.block else None
            weight = _cpu_pack(weight) if self.block else weight
        elif weight.device.type == "cuda" and self.n_outputs % 8 == 0:
            self.kernel = torch.ops.aten._weight_int4pack_mm
            weight = _cuda_pack(weight)
        self.register_buffer("weight", weight)
        self.register_buffer("scales_and_zeros", scales_and_zeros)
        self.register_buffer("bias", bias)

    @classmethod
    def pack(cls, weight: Tensor, group: int) -> dict[str, Tensor]:
        """Quantize weight [N, K] by groups: {"weight": uint8 [N, K/2], even inputs in the low nibble,
        "scales_and_zeros": bfloat16 [K/G, N, 2]}, on any device the same."""
        N, K = weight.shape
        packed = torch.empty(N, K // 2, dtype=torch.uint8, device=weight.device)
        both = torch.empty(K // group, N, 2, dtype=torch.bfloat16, device=weight.device)
        for lo, hi in _slabs(N, K, PACK_VALUES):
            nibbles, scale, zero = round_groups(weight[lo:hi].float().view(hi - lo, -1, group))
            packed[lo:hi] = _pair(nibbles.view(hi - lo, K))
            both[:, lo:hi, 0], both[:, lo:hi, 1] = scale.t(), zero.t()
        return {"weight": packed, "scales_and_zeros": both}

    @classmethod
    def random(cls, n_outputs: int, n_inputs: int, group: int,
               device: torch.device | str) -> dict[str, Tensor]:
        """What `pack` would make of a random weight, without ever holding that weight."""
        weight = _random_bytes(n_outputs * n_inputs // 2, device).view(n_outputs, n_inputs // 2)
        both = torch.zeros(n_inputs // group, n_outputs, 2, dtype=torch.bfloat16, device=device)
        both[..., 0] = 0.2 * n_inputs ** -0.5
        return {"weight": weight, "scales_and_zeros": both}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.n_inputs)
        few = len(rows) < MANY_ROWS or x.device.type != "cpu"
        if few and self.kernel is not None and x.dtype == torch.bfloat16:
            y = self.kernel(rows, self.weight, self.group, self.scales_and_zeros)
        elif x.device.type == "cuda" and self.kernel is not None:  # float16, float32 on tinygemm's layout
            y = self.kernel(rows.bfloat16(), self.weight, self.group, self.scales_and_zeros).to(x.dtype)
        else:
            y = self._gemm(rows)
        y = y.view(*x.shape[:-1], self.n_outputs)
        return y if self.bias is None else y + self.bias

    def _gemm(self, rows: Tensor) -> Tensor:
        """Many rows: a GEMM with a slab of dequantized weights at a time."""
        x = rows.to(gemm_dtype(rows.device.type, rows.dtype))
        out = rows.new_empty(len(rows), self.n_outputs)
        for lo, hi in _slabs(self.n_outputs, self.n_inputs):
            out[:, lo:hi] = x @ self._dense(lo, hi, x.dtype)
        return out

    def _dense(self, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        """The weights of rows lo .. hi-1, transposed: [K, hi - lo]."""
        scale, zero = self.scales_and_zeros[:, None, lo:hi].to(dtype).unbind(-1)  # [K/G, 1, n]
        weight = self._nibbles(lo, hi).to(dtype).view(-1, self.group, hi - lo)
        return weight.sub_(8).mul_(scale).add_(zero).view(self.n_inputs, hi - lo)

    def _nibbles(self, lo: int, hi: int) -> Tensor:
        """Rows lo .. hi-1 unpacked and transposed: uint8 [K, hi - lo]."""
        packed = self.weight[lo:hi]
        if not self.block:
            return torch.stack([packed & 15, packed >> 4], dim=-1).view(hi - lo, -1).t()
        whole = (hi - lo) // self.block * self.block
        parts = [_cpu_unpack(packed[:whole], self.block)] if whole else []
        if whole < hi - lo:  # a last block that is not whole pairs neighbouring rows
            tail = packed[whole:].reshape(self.n_inputs, -1)
            parts.append(torch.stack([tail & 15, tail >> 4], dim=-1).view(self.n_inputs, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def round_groups(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit w [N, K/G, G], float32: nibbles uint8, scale and zero [N, K/G] already rounded to bfloat16.

    For several shares of the range: round, fit scale and zero to the nibbles by least squares, keep the
    smallest squared error; then round once more with the winner.
    """
    lo, hi = w.aminmax(dim=-1, keepdim=True)
    middle, mean = (lo + hi) / 2, w.mean(-1, keepdim=True)
    best = scale = zero = None
    for clip in CLIPS:
        step = ((hi - lo) * (clip / 15)).clamp_min(1e-8)
        q = (w - middle).div_(step).add_(7.5).round_().clamp_(0, 15).sub_(8)
        q_mean = q.mean(-1, keepdim=True)
        centred = q - q_mean
        fitted = (centred * w).sum(-1, keepdim=True) / centred.square_().sum(-1, keepdim=True)
        a = torch.where(fitted > 0, fitted, step).bfloat16().float()  # not finite when all values are equal
        b = (mean - a * q_mean).bfloat16().float()
        error = q.mul_(a).add_(b).sub_(w).square_().sum(-1, keepdim=True)
        if best is None:
            best, scale, zero = error, a, b
        else:
            better = error < best
            best, scale, zero = (torch.where(better, n, o) for n, o in ((error, best), (a, scale), (b, zero)))
    nibbles = (w - zero).div_(scale).add_(8).round_().clamp_(0, 15).to(torch.uint8)
    return nibbles, scale.squeeze(-1), zero.squeeze(-1)


def _random_bytes(count: int, device: torch.device | str) -> Tensor:
    """uint8 [count], uniform (drawn as 64-bit integers: eight bytes a draw)."""
    words = torch.empty((count + 7) // 8, dtype=torch.int64, device=device)
    return words.random_(-2 ** 63, 2 ** 63 - 1).view(torch.uint8)[:count]


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers -127 .. 127 (bfloat16 like x, else float32) and the step [M, 1], float32, of each row."""
    step = (x.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-8)
    rows = (x.float() / step).round().clamp(-127, 127)
    return rows.to(x.dtype) if x.dtype == torch.bfloat16 else rows, step


def _pair(nibbles: Tensor) -> Tensor:
    """uint8 [N, K/2] with even inputs in the low nibble, from uint8 [N, K]."""
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def _unpair(packed: Tensor) -> Tensor:
    """The inverse of _pair."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).view(len(packed), -1)


def _cpu_pack(packed: Tensor) -> Tensor:
    """Into _weight_int4pack_mm_for_cpu's order, a slab at a time (its converter takes 4 bytes a weight)."""
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    N, half = packed.shape
    out = torch.empty_like(packed)
    for lo, hi in _slabs(N, 2 * half, PACK_VALUES):
        out[lo:hi] = convert(_unpair(packed[lo:hi]).int(), 1)
    return out


def _cpu_unpack(packed: Tensor, block: int) -> Tensor:
    """uint8 [K, N] from whole blocks of the CPU kernel's order: for each block of rows and each input, the
    first half of the rows in low nibbles and the second half in high ones."""
    N, half = packed.shape
    packed = packed.reshape(N // block, 2 * half, block // 2)  # [blocks, K, block/2]
    out = packed.new_empty(2 * half, N // block, 2, block // 2)
    torch.bitwise_and(packed.transpose(0, 1), 15, out=out[:, :, 0])
    torch.bitwise_right_shift(packed.transpose(0, 1), 4, out=out[:, :, 1])
    return out.view(2 * half, N)


@functools.cache
def _cpu_block_rows() -> int:
    """How many rows the int4 kernel of this processor interleaves (64 with AVX-512, 32 with AVX2), found by
    packing a probe; 0 when it does something else."""
    with _disable_current_modes():  # fake tensors hold nothing that could be compared
        probe = torch.randint(0, 16, (128, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(probe, 1)
        return next((b for b in (64, 32) if torch.equal(_cpu_unpack(packed, b).t().int(), probe)), 0)


def _cuda_pack(packed: Tensor) -> Tensor:
    """Into the tiles of _weight_int4pack_mm, which wants even inputs in the high nibble."""
    tiles = next(t for t in (8, 4, 2) if packed.shape[1] % (8 * t) == 0)
    return torch.ops.aten._convert_weight_to_int4pack((packed << 4 | packed >> 4).contiguous(), tiles)


def pack(weight: Tensor, scheme: str) -> dict[str, Tensor]:
    """The tensors that store weight [N, K] under `scheme`, the same on every device."""
    check_scheme(scheme)
    if scheme.startswith("int8"):
        return Int8Linear.pack(weight)
    return Int4Linear.pack(weight, legal_group(weight.shape[1], int(scheme.split("-")[1])))


def pack_random(n_outputs: int, n_inputs: int, scheme: str,
                device: torch.device | str) -> dict[str, Tensor]:
    """Random tensors of the form that `pack` makes."""
    check_scheme(scheme)
    if scheme.startswith("int8"):
        return Int8Linear.random(n_outputs, n_inputs, device)
    return Int4Linear.random(n_outputs, n_inputs, legal_group(n_inputs, int(scheme.split("-")[1])), device)


def packed_bytes(n_outputs: int, n_inputs: int, scheme: str) -> int:
    """Bytes of what `pack` makes of a weight."""
    if scheme.startswith("int8"):
        return n_outputs * (n_inputs + 2)
    group = legal_group(n_inputs, int(scheme.split("-")[1]))
    return n_outputs * (n_inputs // 2 + n_inputs // group * 4)


def linear(tensors: dict[str, Tensor], scheme: str, bias: Tensor | None = None) -> nn.Module:
    """The layer over what `pack` or a saved checkpoint holds, on the tensors' device."""
    if scheme.startswith("int8"):
        return Int8Linear(tensors["weight"], tensors["scales"], bias, dynamic=scheme == "int8dq")
    return Int4Linear(tensors["weight"], tensors["scales_and_zeros"], bias)


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a state dict's entry is the weight of a layer that quantization packs."""
    return name.endswith(".weight") and tensor.ndim == 2 and not name.startswith("embed")


def quantize_state(state: dict[str, Tensor], scheme: str) -> dict:
    """A whole state dict packed, layer by layer; tied embeddings get an output layer of their own."""
    check_scheme(scheme)
    if SCHEME_KEY in state:
        raise ValueError(f"already quantized as {state[SCHEME_KEY]}; start from the full-precision file")
    out = {SCHEME_KEY: scheme}
    sources = list(state.items())
    if "lm_head.weight" not in state:
        sources.append(("lm_head.weight", state["embed.weight"]))
    for name, tensor in sources:
        if is_linear(name, tensor):
            prefix = name.removesuffix("weight")
            out.update({prefix + part: value for part, value in pack(tensor, scheme).items()})
        else:
            out[name] = tensor
    return out


def read_checkpoint(path: Path) -> dict:
    """The state dict of a model.pth, mapped.  ValueError when it holds anything else."""
    try:
        state = torch.load(path, mmap=True, weights_only=True)
    except (RuntimeError, OSError, pickle.UnpicklingError) as e:
        raise ValueError(f"{path} is no checkpoint that torch can read; convert it again") from e
    if not isinstance(state, dict) or "embed.weight" not in state:
        raise ValueError(f"{path} holds no model of this project; convert one first (see README.md)")
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint_path", type=Path, required=True, help="a full-precision model.pth")
    parser.add_argument("-q", "--quantization", required=True, help=", ".join(SCHEMES))
    parser.add_argument("--output", type=Path, help="default: model_SCHEME.pth beside the checkpoint")
    args = parser.parse_args()
    try:
        check_scheme(args.quantization)
        if not args.checkpoint_path.is_file():
            raise ValueError(f"no checkpoint at {args.checkpoint_path}; convert one first (see README.md)")
        output = args.output or args.checkpoint_path.with_name(f"model_{args.quantization}.pth")
        state = read_checkpoint(args.checkpoint_path)
        partial = output.with_name(output.name + ".partial")
        torch.save(quantize_state(state, args.quantization), partial)
        os.replace(partial, output)
    except ValueError as e:
        print(f"quantize.py: {e}", file=sys.stderr)
        sys.exit(2)
    before, after = (path.stat().st_size / 1e9 for path in (args.checkpoint_path, output))
    print(f"{output}: {after:.2f} GB, was {before:.2f}", file=sys.stderr)


if __name__ == "__main__":
    main()
