"""Attention over the quantized KV cache on CUDA: Triton kernels for decode, flash attention for prefill.

Adds to kv_cache.py: TritonKVCache, whose write quantizes in one kernel and whose attend reads every filled
slot once, as stored, for all G query heads of a kv head (flash-decoding, pytorch.org/blog/flash-decoding):

    write     one kernel quantizes K and V of the new tokens and stores them at slots start[b] + t
    decode    grid (B*H, n_splits): each split reads an equal share of the filled slots and leaves a partial
              result with its log-sum-exp; a second kernel combines them
    prefill   blocks of dequantized past slots through flash attention, merged by log-sum-exp with the
              chunk's own causal block

Decode never looks at the start positions on the host and its grid does not depend on them, so one compiled
graph or one CUDA graph serves all positions.  What the kernels do not serve (a D stride other than 1, the
mask modes `linear` and `full`) takes the plain path.  Triton is optional: available() says what is missing.
"""
import functools
import math

import torch
from torch import Tensor

from attention_cuda_kernels import _combine_kernel, _split_kernel, _write_kernel, lookup_asm, tl, triton
from kv_cache import LEVELS, KVCache, integers

MAX_DECODE_ROWS = 64  # query rows (G * T) of one kv head that a decode program holds
PREFILL_BLOCK = 4096  # past slots dequantized at a time
PROGRAMS_PER_MULTIPROCESSOR = 4  # as many as fit by registers and shared memory: loads in flight hide latency
MAX_REGISTERS = 65536 // (PROGRAMS_PER_MULTIPROCESSOR * 128)  # per thread; sm_90 would take 142 at 4 bits
MAX_SPLITS = 128
STAGE_BYTES = 8192  # of one K or V tile; a program keeps two of each in flight
WRITE_TILE = 4096  # values that a program of the write kernel quantizes at a time
MIN_CAPABILITY = (8, 0)  # bfloat16 tensor cores and flash attention
CACHED = ("k_values", "k_scales", "v_values", "v_scales")  # a cache's buffers, in the order of arguments


def available(device: torch.device | str = "cuda") -> str | None:
    """None when the kernels can run on `device`, otherwise the reason, one line with the remedy."""
    if triton is None:
        return "triton is not installed (pip install triton)"
    if _is_interpreted():
        return None
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return "the Triton kernels need a CUDA device (--device cuda)"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return "the Triton kernels need compute capability 8.0 or newer; this is {}.{}".format(*capability)
    return None


def _is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the import): on the CPU."""
    return triton is not None and triton.knobs.runtime.interpret


# ---- launches ----


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def n_splits_for(multiprocessors: int, heads: int, length: int, block_n: int) -> int:
    """Shares of the slots for each of B * H = `heads` kv heads, so that all multiprocessors have work.

    Depends on the allocated length only: the grid is one for all positions.
    """
    wanted = multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // heads
    return max(1, min(wanted, MAX_SPLITS, -(-length // block_n)))


def _block(n: int) -> int:
    """Columns of a tile of n: tensor cores take 16 or more."""
    return triton.next_power_of_2(max(n, 16))


def _format(values: Tensor, D: int) -> tuple[int, int]:
    """Bits and strong coordinates of stored values [B, H, S, row]."""
    if values.dtype == torch.uint8:
        return 4, 2 * values.shape[-1] - D
    return 8 if values.dtype == torch.int8 else 16, 0


def _lookup(bits: int, dtype: torch.dtype) -> str | None:
    """How a kernel turns 4-bit codes into `dtype`: PTX, or None for arithmetic (float32, the interpreter)."""
    if bits != 4 or dtype == torch.float32:
        return None
    return lookup_asm(torch.tensor(LEVELS[8:], dtype=dtype).view(torch.int16).tolist())


def decode_config(n_rows: int, head_dim: int, k_values: Tensor, v_values: Tensor,
                  q_dtype: torch.dtype) -> dict:
    """Constants of _split_kernel for G * T = `n_rows`: tile sizes, operand types, warps, pipeline stages.

    Integers meet the query as bfloat16 or float16 (exact).  float32 queries are multiplied in float32, and so
    is everything in Triton's interpreter, which has no bfloat16 products.
    """
    k_dtype, v_dtype = k_values.dtype, v_values.dtype
    (k_bits, k_strong), (v_bits, v_strong) = (_format(x, head_dim) for x in (k_values, v_values))
    is_packed = 4 in (k_bits, v_bits)
    is_wide = _is_interpreted() or torch.float32 in (q_dtype, k_dtype, v_dtype)
    itemsize = 4 if is_wide else max(k_dtype.itemsize, v_dtype.itemsize)
    block_k, block_v = _block(head_dim - k_strong), _block(head_dim - v_strong)
    pv_dtype = torch.bfloat16 if v_bits < 16 else v_dtype  # float16 loses small probability * scale
    qk_dtype = q_dtype if k_bits < 16 or k_dtype == q_dtype else torch.float32
    if is_wide:
        qk_dtype = pv_dtype = torch.float32
    return {
        "D": head_dim,
        "BLOCK_M": triton.next_power_of_2(max(n_rows, 16)),  # tensor cores take 16 rows or more
        "BLOCK_N": min(32 if is_packed else 64,  # unpacking and its addresses take registers
                       max(16, STAGE_BYTES // (max(block_k, block_v) * itemsize))),
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "K_BITS": k_bits,
        "V_BITS": v_bits,
        "K_STRONG": k_strong,
        "V_STRONG": v_strong,
        "BLOCK_K_STRONG": _block(k_strong),
        "BLOCK_V_STRONG": _block(v_strong),
        "K_ALIGN": math.gcd(16, *_strides(k_values)) if k_bits == 4 else 1,
        "V_ALIGN": math.gcd(16, *_strides(v_values)) if v_bits == 4 else 1,
        "QK_DTYPE": getattr(tl, str(qk_dtype).removeprefix("torch.")),
        "PV_DTYPE": getattr(tl, str(pv_dtype).removeprefix("torch.")),
        "K_LOOKUP": _lookup(k_bits, qk_dtype),
        "V_LOOKUP": _lookup(v_bits, pv_dtype),
        "num_warps": 4,
        "maxnreg": MAX_REGISTERS if is_packed and n_rows <= 16 else None,
        "num_stages": 1 if is_wide else 3,
    }


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    """Strides of (b, h, s or t).  A head stride of 0 lets all heads read the scales of axis "hd"."""
    if x is None:
        return 0, 0, 0
    return x.stride(0), 0 if x.shape[1] == 1 else x.stride(1), x.stride(2)


def _pointers(k_values: Tensor, k_scales: Tensor | None, v_values: Tensor, v_scales: Tensor | None) -> tuple:
    """Values and scales; in place of absent scales something that is never read (None has no address)."""
    return (k_values, v_values, k_values if k_scales is None else k_scales,
            v_values if v_scales is None else v_scales)


def write(k_values: Tensor, k_scales: Tensor | None, v_values: Tensor, v_scales: Tensor | None, start: Tensor,
          k: Tensor, v: Tensor) -> None:
    """Stores k, v [B, H, T, D] at slots start[b] + t of a cache whose D stride is 1, quantized where it has
    scales.  Never reads `start` on the host; tokens past the last slot are dropped."""
    B, H, T, D = k.shape
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    (k_bits, k_strong), (v_bits, v_strong) = _format(k_values, D), _format(v_values, D)
    is_shared = H > 1 and any(x is not None and x.shape[1] == 1 for x in (k_scales, v_scales))
    block_h, block_d = triton.next_power_of_2(H), triton.next_power_of_2(D)
    tile = WRITE_TILE // 4 if 4 in (k_bits, v_bits) else WRITE_TILE  # the fit is long and unrolled
    block_t = min(triton.next_power_of_2(T), max(1, tile // (block_h * block_d)))
    with torch.cuda.device_of(k):
        _write_kernel[(B, triton.cdiv(T, block_t))](
            k, v, *_pointers(k_values, k_scales, v_values, v_scales), start, *_strides(k), *_strides(v),
            *_strides(k_values), *_strides(v_values), *_strides(k_scales), *_strides(v_scales),
            T, H, k_values.shape[2], D=D, BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_D=block_d,
            K_BITS=k_bits, V_BITS=v_bits, K_STRONG=k_strong, V_STRONG=v_strong, IS_SHARED=is_shared,
            num_warps=4)


def decode(q: Tensor, start: Tensor, k_values: Tensor, k_scales: Tensor | None, v_values: Tensor,
           v_scales: Tensor | None) -> Tensor:
    """Attention of q [B, Hq, T, D] at start[b] .. start[b]+T-1 over a cache that holds those tokens already.

    values [B, H, S, D] with D stride 1: int8 with bfloat16 scales [B, H or 1, S], 4-bit rows (uint8) with
    scales [B, H, S] in their basis, as q is, or floating point without scales;
    G * T <= MAX_DECODE_ROWS.  Returns [B, Hq, T, D].  Never reads `start` on the host.
    """
    B, Hq, T, D = q.shape
    H, S = k_values.shape[1:3]
    rows = Hq // H * T
    config = decode_config(rows, D, k_values, v_values, q.dtype)
    n_splits = n_splits_for(_multiprocessors(q.device), B * H, S, config["BLOCK_N"])
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    part = torch.empty((B * H, n_splits, rows, D), dtype=torch.float32, device=q.device)
    lse = torch.empty((B * H, n_splits, rows), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        _split_kernel[(B * H, n_splits)](
            q, *_pointers(k_values, k_scales, v_values, v_scales), start, part, lse, *q.stride()[:3],
            *(n // config["K_ALIGN"] for n in _strides(k_values)),
            *(n // config["V_ALIGN"] for n in _strides(v_values)), *_strides(k_scales), *_strides(v_scales),
            H, S, D**-0.5 * math.log2(math.e), T=T, G=Hq // H, **config)
        _combine_kernel[(B * H * rows,)](
            part, lse, start, out, H, S, n_splits, T=T, G=Hq // H, D=D, BLOCK_N=config["BLOCK_N"],
            BLOCK_D=_block(D), BLOCK_SPLITS=16, num_warps=4)
    return out


# ---- prefill ----


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v and the natural log-sum-exp [B, H, rows, 1] of the scores, both float32."""
    if q.device.type == "cuda":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    return out.float(), lse.float()[..., None]


def _dequantize(values: Tensor, scales: Tensor | None, first: int, out: Tensor) -> Tensor:
    """Slots first .. first+n of a cache into out [B, H, n, D], rounded once; at 8 and 16 bits on CUDA without
    a temporary."""
    values = integers(values[:, :, first : first + out.shape[2]], out.shape[3])
    if scales is None:
        return out.copy_(values)
    scales = scales[:, :, first : first + out.shape[2], None]
    if out.dtype == scales.dtype:  # then this is one pass
        return torch.mul(values, scales, out=out)
    return out.copy_(values).mul_(scales)


def _prefill_rows(q: Tensor, start: int, k_values: Tensor, k_scales: Tensor | None, v_values: Tensor,
                  v_scales: Tensor | None, block: int) -> Tensor:
    """Attention of rows that stand at `start`: the chunk's own slots causally, then the past by blocks."""
    B, Hq, T, D = q.shape
    H = k_values.shape[1]
    k = q.new_empty(B, H, max(T, min(block, start)), D)
    v = torch.empty_like(k)
    own = (_dequantize(k_values, k_scales, start, k[:, :, :T]),
           _dequantize(v_values, v_scales, start, v[:, :, :T]))
    own = (x[:, :, None].expand(B, H, Hq // H, T, D).reshape(B, Hq, T, D) for x in own)
    out, lse = _flash(q, *own, is_causal=True)
    rows, out, lse = (x.reshape(B, H, -1, x.shape[-1]) for x in (q, out, lse))  # [B, H, G*T, .]
    for first in range(0, start, block):
        n = min(block, start - first)
        past = (_dequantize(k_values, k_scales, first, k[:, :, :n]),
                _dequantize(v_values, v_scales, first, v[:, :, :n]))
        past_out, past_lse = _flash(rows, *past, is_causal=False)
        out.lerp_(past_out, torch.sigmoid(past_lse - lse))
        lse = torch.logaddexp(lse, past_lse)
    return out.to(q.dtype).reshape(q.shape)


def prefill(q: Tensor, start: Tensor, k_values: Tensor, k_scales: Tensor | None, v_values: Tensor,
            v_scales: Tensor | None, block: int = PREFILL_BLOCK) -> Tensor:
    """The same attention as decode, for many rows and any storage order.

    Reads `start` on the host, once a call: the number of past blocks decides what is launched.  Batch rows at
    one position go together, others one by one.  Holds `block` dequantized slots (shared among the rows of
    the batch), the chunk's own K and V for every query head, and the chunk's results in float32.
    """
    starts = start.tolist()
    cached = (k_values, k_scales, v_values, v_scales)
    if len(set(starts)) == 1:
        return _prefill_rows(q, starts[0], *cached, max(1, block // len(starts))).contiguous()
    rows = ([x if x is None else x[b : b + 1] for x in cached] for b in range(len(starts)))
    return torch.cat([_prefill_rows(q[b : b + 1], starts[b], *row, block) for b, row in enumerate(rows)])


# Opaque to torch.compile: a graph holds each as one node, for all positions.
triton_write = torch.library.custom_op("gpt_long::triton_write", write, mutates_args=CACHED)
triton_decode = torch.library.custom_op("gpt_long::triton_decode", decode, mutates_args=())
flash_prefill = torch.library.custom_op("gpt_long::flash_prefill", prefill, mutates_args=())


@triton_decode.register_fake
def _(q: Tensor, *cached) -> Tensor:
    return q.new_empty(q.shape)


@flash_prefill.register_fake
def _(q: Tensor, *cached, block: int = PREFILL_BLOCK) -> Tensor:
    return q.new_empty(q.shape)


class TritonKVCache(KVCache):
    """KVCache whose write and attend run as kernels where these serve, and as the plain path elsewhere.

    Decode (G * T <= MAX_DECODE_ROWS) never waits for the device; prefill reads the start positions once.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.has_kernels = available(self.k_values.device) is None
        self.is_d_contiguous = self.k_values.stride(-1) == self.v_values.stride(-1) == 1

    def _store(self, start: Tensor, k: Tensor, v: Tensor) -> None:
        if not (self.has_kernels and self.is_d_contiguous):
            return super()._store(start, k, v)
        triton_write(self.k_values, self.k_scales, self.v_values, self.v_scales, start, k, v)

    def _attend(self, q: Tensor, start: Tensor) -> Tensor:
        cached = (self.k_values, self.k_scales, self.v_values, self.v_scales)
        if self.has_kernels and self.causal_mask == "none":
            is_short = q.shape[1] // self.k_values.shape[1] * q.shape[2] <= MAX_DECODE_ROWS
            if is_short and self.is_d_contiguous:
                return triton_decode(q, start, *cached)
            if not is_short and (q.dtype != torch.float32 or q.device.type == "cpu"):
                return flash_prefill(q, start, *cached)  # on CUDA flash attention takes 16-bit types only
        return super()._attend(q, start)
