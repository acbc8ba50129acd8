"""A quantized KV cache and the attention over it, in plain PyTorch: no copy, no mask, cost by filled length.

Letters: B batch, T new tokens of this call, S slots of the cache, H key/value heads, G query heads per
key/value head, D head_dim.  What goes in and out is [B, H, T, D]; the storage order is the cache's own.

    CacheSpec   what a cache is (bits, scale axes, layout) and how many bytes it takes; holds nothing
    KVCache     write(start, k, v), then attend(q, start): attention sees what the cache stores, for every
                token including the ones just written, so the result does not depend on how a prompt was cut
    attach      puts a fresh cache into every layer of a model

Quantized values meet the query as integers: with one scale per token (and head), K's scale multiplies the
score after the dot product and V's scale multiplies the probability before the second product.

Compiled, write is traced and attend is one opaque op, so a decode step is one graph for all positions, and
prefill at most two (the chunk, and a dynamic one for the rest).  Needs torch only.
"""
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CAUSAL_MASKS = ("none", "linear", "full")
AXES = {"d": "d", "hd": "hd", "dkv": "d", "heads_and_dkv": "hd"}  # MaxText's names are the second pair
SCALE_DTYPE = BASIS_DTYPE = torch.bfloat16
SCALE_EPS = 1e-8  # keeps an all-zero row's scale above zero
BLOCK_SLOTS = 1024  # slots that plain attention holds in floating point at a time
KINDS = {None: "16,16", "none": "16,16", "int8": "8,8", "int4": "4,4", "k8v4": "8,4"}

# 4 bits: the levels that cost a Gaussian least squared error (Lloyd-Max: Max 1960, IRE Trans. IT-6), as int8.
LEVELS = (-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127)
SIGMA = 127 / 2.7326  # one standard deviation of that Gaussian, in levels
SCALE_TRIALS = (0.85, 0.92, 1.0, 1.08, 1.16)  # shares of the root mean square from which a scale is fitted
K_STRONG, V_STRONG = 16, 8  # coordinates of a 4-bit vector that keep 8 bits


def parse_layout(text: str) -> str:
    """An order, outermost axis first: letters "bhsd", or MaxText's digits "0213" (0 b, 1 s, 2 h, 3 d)."""
    letters = text.translate(str.maketrans("0123", "bshd"))
    if sorted(letters) != sorted("bhsd"):
        raise ValueError(f"cache layout {text!r} is no order of the axes b, s, h, d (such as bhsd, or 0213)")
    return letters


@dataclass(frozen=True)
class CacheSpec:
    """What a cache stores.  Bits of K and V: 16 (as `dtype`), 8 (integers with a scale of 2 bytes), or 4
    (the same in a rotated basis, whose first k_strong or v_strong coordinates, at most half, keep 8 bits).

    axis: what one scale spans, `d` (a token of one head) or `hd` (a token of all heads; not at 4 bits, where
    every head has a basis of its own).
    """
    k_bits: int = 16
    v_bits: int = 16
    axis: str = "d"
    k_layout: str = "bhsd"
    v_layout: str = "bhsd"
    dtype: torch.dtype = torch.bfloat16
    k_strong: int = K_STRONG
    v_strong: int = V_STRONG

    def __post_init__(self) -> None:
        for name, bits in (("K", self.k_bits), ("V", self.v_bits)):
            if bits not in (16, 8, 4):
                raise ValueError(f"{name} of {bits} bits is not supported; supported: 16, 8, 4")
        if self.axis not in AXES:
            raise ValueError(f"scale axis {self.axis!r} is not supported; supported: {', '.join(AXES)}")
        object.__setattr__(self, "axis", AXES[self.axis])
        if self.axis == "hd" and 4 in (self.k_bits, self.v_bits):
            raise ValueError("scale axis hd is not legal at 4 bits; give d, or 8 bits")
        for strong in (self.k_strong, self.v_strong):
            if strong < 0 or strong % 2:
                raise ValueError(f"{strong} strong coordinates: give an even number (0, 8, 16)")
        object.__setattr__(self, "k_layout", parse_layout(self.k_layout))
        object.__setattr__(self, "v_layout", parse_layout(self.v_layout))

    @classmethod
    def parse(cls, kind: str | None = None, axis: str = "d", layout: str = "bhsd",
              dtype: torch.dtype = torch.bfloat16, strong: str = f"{K_STRONG},{V_STRONG}") -> "CacheSpec":
        """From command-line words.  kind: one of KINDS, or "K,V" bits; layout: one for both, or "K,V";
        strong: "K,V" coordinates of 8 bits."""
        bits = KINDS.get(kind, kind).split(",")
        if len(bits) != 2 or not all(b.strip().isdigit() for b in bits):
            raise ValueError(f"kv cache quantization {kind!r} is not known; known: int8, int4, k8v4, or bits "
                             "of K,V such as 16,8")
        layouts = layout.split(",")
        if len(layouts) > 2:
            raise ValueError(f"cache layout {layout!r}: give one order, or two as K,V")
        counts = strong.split(",")
        if len(counts) != 2 or not all(n.strip().isdigit() for n in counts):
            raise ValueError(f"strong coordinates {strong!r}: give two numbers as K,V (such as 8,8)")
        return cls(int(bits[0]), int(bits[1]), axis, layouts[0], layouts[-1], dtype, *map(int, counts))

    def row_bytes(self, bits: int, strong: int, D: int) -> int:
        """Bytes of one stored vector, its scale apart."""
        return {16: D * self.dtype.itemsize, 8: D, 4: (D + min(strong, D // 2)) // 2}[bits]

    def value_bytes(self, B: int, H: int, S: int, D: int) -> int:
        """Bytes of the stored K and V values of one layer."""
        rows = self.row_bytes(self.k_bits, self.k_strong, D) + self.row_bytes(self.v_bits, self.v_strong, D)
        return B * H * S * rows

    def scale_bytes(self, B: int, H: int, S: int, D: int) -> int:
        """Bytes of the scales of one layer."""
        quantized = (self.k_bits != 16) + (self.v_bits != 16)
        return quantized * B * S * (H if self.axis == "d" else 1) * SCALE_DTYPE.itemsize

    def nbytes(self, B: int, H: int, S: int, D: int) -> int:
        """Bytes of one layer, scales included."""
        return self.value_bytes(B, H, S, D) + self.scale_bytes(B, H, S, D)


def quantize(x: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """Symmetric int8 of x [B, H, T, D]: values int8 [B, H, T, D] and scales bfloat16 [B, Hs, T].

    Hs is H for axis "d" and 1 for "hd".  The scale is rounded to bfloat16 first and that value divides, so
    the error stays within half a step; the clamp catches the maximum of a row whose scale was rounded down.
    """
    x = x.float()
    scale = (x.abs().amax(dim=(1, 3) if axis == "hd" else 3, keepdim=True) / 127).clamp_min(SCALE_EPS)
    scale = scale.to(SCALE_DTYPE)
    values = (x / scale.float()).round_().clamp_(-127, 127).to(torch.int8)
    return values, scale.squeeze(-1)


def quantize4(x: Tensor, strong: int) -> tuple[Tensor, Tensor]:
    """4-bit x [..., D], already in its basis: uint8 [..., (D + strong) / 2] and scales bfloat16 [...].

    A row of bytes: `strong` coordinates as int8, then the others as indices to LEVELS, the first half of
    them in the low nibbles and the second half in the high ones.  Both kinds times the scale are values.
    The scale is the best, by squared error, of least-squares fits from SCALE_TRIALS, and wide enough for
    the strong ones.
    """
    levels = torch.tensor(LEVELS, dtype=torch.float32).to(x.device)
    edges = (levels[1:] + levels[:-1]) / 2
    top, rest = x.float().split([strong, x.shape[-1] - strong], dim=-1)
    rms = rest.square().mean(-1, keepdim=True).sqrt().clamp_min(SCALE_EPS) / SIGMA
    best = scale = torch.zeros_like(rms)
    for trial in SCALE_TRIALS:
        fit = levels[torch.bucketize(rest / (rms * trial), edges)]
        along, norm = (rest * fit).sum(-1, keepdim=True), fit.square().sum(-1, keepdim=True)
        gain = along * along / norm  # |rest|^2 less the squared error at scale along / norm
        scale, best = torch.where(gain > best, along / norm, scale), torch.maximum(gain, best)
    if strong:
        scale = torch.maximum(scale, top.abs().amax(-1, keepdim=True) / 127)
    scale = scale.clamp_min(SCALE_EPS).to(SCALE_DTYPE)
    nibbles = torch.bucketize(rest / scale.float(), edges).to(torch.uint8)
    low, high = nibbles.chunk(2, dim=-1)
    top = (top / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([top.view(torch.uint8), low | high << 4], dim=-1), scale.squeeze(-1)


def integers(values: Tensor, D: int) -> Tensor:
    """Stored values as numbers that only lack their scale: 4-bit rows become int8 [..., D], others stay."""
    if values.dtype != torch.uint8:
        return values
    strong = 2 * values.shape[-1] - D
    top, pairs = values.split([strong, values.shape[-1] - strong], dim=-1)
    levels = torch.tensor(LEVELS, dtype=torch.int8).to(values.device)
    nibbles = torch.cat([pairs & 15, pairs >> 4], dim=-1)
    return torch.cat([top.contiguous().view(torch.int8), levels[nibbles.int()]], dim=-1)


def dequantize(values: Tensor, scales: Tensor | None, dtype: torch.dtype, D: int | None = None) -> Tensor:
    """What a cache holds as numbers [B, H, S, D] of `dtype` (4 bits need D).  For reference and tests."""
    numbers = integers(values, D or values.shape[-1])
    return numbers.to(dtype) if scales is None else (numbers.float() * scales[..., None].float()).to(dtype)


def mixing(n: int) -> Tensor:
    """An orthogonal matrix [n, n], float64, with entries of about equal size, which turns outliers into small
    changes everywhere: Hadamard's where n is a power of two, else a cosine transform with random signs."""
    if n & (n - 1) == 0:
        h = torch.ones(1, 1, dtype=torch.float64)
        while len(h) < n:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        return h * n ** -0.5
    i = torch.arange(n, dtype=torch.float64)
    cosines = torch.cos(torch.pi / n * (i + 0.5) * i[:, None]) * (2 / n) ** 0.5
    cosines[0] *= 0.5 ** 0.5
    return cosines * (torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0)) * 2 - 1)


def at_position(position: int, batch: int, device: torch.device | str | None = None) -> Tensor:
    """Start positions int64 [B], every row at `position`; host_range then need not ask the device.

    Not to be changed in place: what the host knows would no longer be true.
    """
    start = torch.full((batch,), position, dtype=torch.int64, device=device)
    start.host_range = (position, position)
    return start


def host_range(start: Tensor) -> tuple[int, int]:
    """The lowest and the highest of start [B]; waits for the device unless at_position made it."""
    known = getattr(start, "host_range", None)
    return known or (int(start.min()), int(start.max()))


def _matmul_dtype(q: Tensor) -> torch.dtype:
    """bfloat16 GEMMs pay on accelerators, and for many rows on CPUs that have them in hardware."""
    if q.device.type != "cpu":
        return q.dtype
    many = q.shape[-2] >= 32
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # what ATEN_CPU_CAPABILITY may deny
    fast = wide and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    return q.dtype if many and fast else torch.float32


def attend_blocks(q: Tensor, start: Tensor, k_values: Tensor, k_scales: Tensor | None, v_values: Tensor,
                  v_scales: Tensor | None, block: int = BLOCK_SLOTS) -> Tensor:
    """Causal attention over the filled slots of a cache, block by block with an online softmax.

    q: [B, Hq, T, D], query t of row b at position start[b] + t; values [B, H, S, D]; scales [B, H or 1, S].
    Returns [B, Hq, T, D] of q's dtype.  Softmax is float32 (Milakov and Gimelshein 2018, arXiv 1805.02867);
    blocks that every query sees whole need no comparison of positions.
    """
    B, Hq, T, D = q.shape
    H = k_values.shape[1]
    rows = q.reshape(B, H, -1, D)  # [B, H, G*T, D]: the query heads of a group share every read of K and V
    rows = rows.to(_matmul_dtype(rows))
    position = start[:, None] + torch.arange(T, device=q.device)  # [B, T]
    position = position.repeat(1, Hq // H)[:, None, :, None]  # [B, 1, G*T, 1]
    lowest, highest = host_range(start)
    first, filled = lowest + 1, highest + T
    top = torch.full((*rows.shape[:3], 1), -torch.inf, device=q.device)  # running maximum [B, H, G*T, 1]
    total = torch.zeros_like(top)
    y = torch.zeros(rows.shape, device=q.device)
    for lo in range(0, filled, block):
        hi = min(lo + block, filled)
        k, v = (integers(x[:, :, lo:hi], D).to(rows.dtype) for x in (k_values, v_values))  # [B, H, n, D]
        scores = (rows @ k.transpose(-1, -2)).float().mul_(D ** -0.5)  # [B, H, G*T, n]
        if k_scales is not None:
            scores *= k_scales[:, :, None, lo:hi]
        hidden = None
        if hi > first:
            slots = torch.arange(lo, hi, device=q.device)
            hidden = slots > position  # [B, 1, G*T, n]
            scores.masked_fill_(hidden, -torch.inf)
            v = v.masked_fill(slots[:, None] >= (start + T)[:, None, None, None], 0)  # may hold NaN
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        p = scores.sub_(new_top).exp_()
        shrink = (top - new_top).exp_()
        total = total * shrink + p.sum(-1, keepdim=True)
        if v_scales is not None:
            p *= v_scales[:, :, None, lo:hi]
            if hidden is not None:
                p.masked_fill_(hidden, 0)
        y = y.mul_(shrink).add_(p.to(rows.dtype) @ v)
        top = new_top
        del scores, p, k, v  # else they stand beside the next block's
    return y.div_(total).to(q.dtype).reshape(B, Hq, T, D)


def default_basis(D: int, strong: int) -> tuple[Tensor, Tensor]:
    """A rotation and its transposed inverse, float32 [D, D], with room for the strong coordinates' peaks."""
    into, back = mixing(D), mixing(D)
    room = 127 / SIGMA / 4  # 127 is four standard deviations of a strong coordinate
    into[:, :strong] *= room
    back[:, :strong] /= room
    return into.float(), back.float()


def per_group(x: Tensor, matrix: Tensor) -> Tensor:
    """x [B, Hq, T, D] times the matrix [H, D, D] of its key/value head, in float32; x's dtype back."""
    B, Hq, T, D = x.shape
    y = x.float().reshape(B, len(matrix), -1, D) @ matrix.float()
    return y.reshape(B, Hq, T, D).to(x.dtype)


@torch.library.custom_op("gpt_long::attend", mutates_args=())
def _attend_op(q: Tensor, start: Tensor, k_values: Tensor, k_scales: Tensor | None, v_values: Tensor,
               v_scales: Tensor | None) -> Tensor:
    return attend_blocks(q, start, k_values, k_scales, v_values, v_scales)


@_attend_op.register_fake
def _(q: Tensor, start: Tensor, k_values: Tensor, k_scales: Tensor | None, v_values: Tensor,
      v_scales: Tensor | None) -> Tensor:
    return q.new_empty(q.shape)


class KVCache(nn.Module):
    """K and V of one layer.

    `k_values`, `v_values`: [B, H, S, D] views whatever the storage order is; at 4 bits uint8, a row of bytes
    as quantize4 makes it.  `k_scales`, `v_scales`: bfloat16 [B, H or 1, S], None at 16 bits.
    `k_bases`, `v_bases`: bfloat16 [2, H, D, D] at 4 bits, else None.  They take keys and queries to the
    stored basis (q . k stays what it was), and values there and the result back.  They start as rotations
    that suit any model; kv_calibrate.py makes better ones.
    """

    def __init__(self, spec: CacheSpec, batch: int, n_kv_heads: int, length: int, head_dim: int,
                 device: torch.device | str = "cpu", causal_mask: str = "none",
                 mask_table: Tensor | None = None, zeros: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.spec, self.causal_mask, self.head_dim = spec, causal_mask, head_dim
        zeros = functools.partial(zeros or self.allocator(), device=device)
        sizes = {"b": batch, "h": n_kv_heads, "s": length}
        self._allocate("k", spec.k_bits, spec.k_strong, spec.k_layout, sizes, zeros)
        self._allocate("v", spec.v_bits, spec.v_strong, spec.v_layout, sizes, zeros)
        self.register_buffer("mask_table", mask_table, persistent=False)

    @staticmethod
    def allocator() -> Callable[..., Tensor]:
        """What makes the memory of caches, called as torch.zeros(shape, dtype=, device=)."""
        return torch.zeros

    def _allocate(self, name: str, bits: int, strong: int, layout: str, sizes: dict[str, int],
                  zeros: Callable[..., Tensor]) -> None:
        """Zeros for the values, scales and bases of K or V."""
        spec, D = self.spec, self.head_dim
        dtype = {16: spec.dtype, 8: torch.int8, 4: torch.uint8}[bits]
        sizes = sizes | {"d": spec.row_bytes(bits, strong, D) // dtype.itemsize}
        values = zeros([sizes[axis] for axis in layout], dtype=dtype)
        values = values.permute([layout.index(axis) for axis in "bhsd"])
        self.register_buffer(f"{name}_values", values, persistent=False)
        scales = bases = None
        if bits != 16:
            scale_sizes = sizes | ({"h": 1} if spec.axis == "hd" else {})
            order = layout.replace("d", "")
            scales = zeros([scale_sizes[axis] for axis in order], dtype=SCALE_DTYPE)
            scales = scales.permute([order.index(axis) for axis in "bhs"])
        if bits == 4:
            strong = 2 * sizes["d"] - D
            bases = zeros([2, sizes["h"], D, D], dtype=BASIS_DTYPE)
            into, back = default_basis(D, strong)
            bases.copy_(torch.stack([into, back if name == "k" else back.mT])[:, None])
        self.register_buffer(f"{name}_scales", scales, persistent=False)
        self.register_buffer(f"{name}_bases", bases, persistent=False)

    @property
    def nbytes(self) -> int:
        """Bytes held, scales included."""
        held = (self.k_values, self.v_values, self.k_scales, self.v_scales)
        return sum(x.nbytes for x in held if x is not None)

    def write(self, start: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [B, H, T, D] at slots start[b] .. start[b]+T-1, quantized once and for good."""
        self._store(start, k if self.k_bases is None else k.float() @ self.k_bases[0].float(),
                    v if self.v_bases is None else v.float() @ self.v_bases[0].float())

    def attend(self, q: Tensor, start: Tensor) -> Tensor:
        """Causal attention of q [B, Hq, T, D] at start[b] .. start[b]+T-1, written before; its shape back."""
        y = self._attend(q if self.k_bases is None else per_group(q, self.k_bases[1]), start)
        return y if self.v_bases is None else per_group(y, self.v_bases[1])

    def _store(self, start: Tensor, k: Tensor, v: Tensor) -> None:
        """`write` of what is in the stored basis.  A kernel overrides this one and _attend."""
        B, _, T, _ = k.shape
        slots = start[:, None] + torch.arange(T, device=start.device)  # [B, T]
        where = (torch.arange(B, device=start.device)[:, None], slots)
        for x, values, scales in ((k, self.k_values, self.k_scales), (v, self.v_values, self.v_scales)):
            if scales is not None:
                packed = values.dtype == torch.uint8
                x, scale = (quantize4(x, 2 * values.shape[-1] - self.head_dim) if packed
                            else quantize(x, self.spec.axis))
                scales.transpose(1, 2).index_put_(where, scale.transpose(1, 2))
            values.transpose(1, 2).index_put_(where, x.transpose(1, 2).to(values.dtype))

    def _attend(self, q: Tensor, start: Tensor) -> Tensor:
        """`attend` in the stored basis."""
        if self.causal_mask != "none":
            return self._attend_masked(q, start)
        cached = (self.k_values, self.k_scales, self.v_values, self.v_scales)
        op = torch.ops.gpt_long.attend if torch.compiler.is_compiling() else attend_blocks
        return op(q, start, *cached)

    def _attend_masked(self, q: Tensor, start: Tensor) -> Tensor:
        """The reference: dequantize all S slots, then scaled_dot_product_attention behind a [T, S] mask."""
        T, S = q.shape[2], self.k_values.shape[2]
        positions = start[:, None] + torch.arange(T, device=q.device)  # [B, T]
        if self.causal_mask == "full":
            mask = self.mask_table[positions]  # [B, T, S]
        else:
            mask = torch.arange(S, device=q.device) <= positions[:, :, None]
        group = q.shape[1] // self.k_values.shape[1]
        k, v = (dequantize(x, s, q.dtype, self.head_dim).repeat_interleave(group, dim=1)
                for x, s in ((self.k_values, self.k_scales), (self.v_values, self.v_scales)))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])


def attach(model: nn.Module, spec: CacheSpec, batch: int, length: int, causal_mask: str = "none",
           cls: type[KVCache] = KVCache) -> None:
    """Put a fresh cache of `length` slots into every layer of `model`, replacing what was there.

    model: has .config (n_kv_heads, head_dim), .norm.weight (for the device) and .layers[i].attention.cache.
    Mask mode `full` makes one length x length table that all layers share.
    """
    if causal_mask not in CAUSAL_MASKS:
        raise ValueError(f"causal mask {causal_mask!r} is not known; known: {', '.join(CAUSAL_MASKS)}")
    detach(model)
    device, config = model.norm.weight.device, model.config
    table = None
    if causal_mask == "full":
        table = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    zeros = cls.allocator()
    for layer in model.layers:
        layer.attention.cache = cls(spec, batch, config.n_kv_heads, length, config.head_dim, device,
                                    causal_mask, table, zeros)


def detach(model: nn.Module) -> None:
    """Free the caches of all layers; then any object with write and attend may take their place."""
    for layer in model.layers:
        del layer.attention.cache  # nn.Module lets no other kind of object replace a module
        layer.attention.cache = None
