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
from types import SimpleNamespace

import torch
from torch import Tensor

from kv_cache import SCALE_EPS, KVCache

try:
    import triton
    import triton.language as tl
except ImportError:  # the plain path works without it
    triton = None
    tl = SimpleNamespace(constexpr=None)  # for the kernels' annotations

MAX_DECODE_ROWS = 64  # query rows (G * T) of one kv head that a decode program holds
PREFILL_BLOCK = 4096  # past slots dequantized at a time
PROGRAMS_PER_MULTIPROCESSOR = 4  # as many as fit by registers and shared memory: loads in flight hide latency
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


_jit = triton.jit if triton else lambda function: function

# ---- kernels: strides are in elements, D's is 1; offsets of rows, heads and blocks are int64 ----


@_jit
def _load_tile(ptr, slot_stride, slots, dims, is_filled,
               D: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Stored values [BLOCK_N, BLOCK_D] as DTYPE, before their scales: the one place that knows the packing.

    Slots that are not filled and dims past D give 0 (what lies there may be NaN).
    """
    tl.static_assert(BITS == 8 or BITS == 16, "values are int8 or floating point")
    mask = is_filled[:, None]
    if dims.shape[0] != D:
        mask = mask & (dims < D)[None, :]
    tile = tl.load(ptr + slots[:, None] * slot_stride + dims[None, :], mask=mask, other=0)
    return tile.to(DTYPE)  # int8 is exact in bfloat16 and in float16


@_jit
def _share(filled, n_splits, BLOCK_N: tl.constexpr):
    """Slots per split, in whole blocks: equal shares of the filled length."""
    return tl.cdiv(tl.cdiv(filled, n_splits), BLOCK_N) * BLOCK_N


@_jit
def _split_kernel(q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, start_ptr, part_ptr, lse_ptr,
                  q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_s,
                  v_stride_b, v_stride_h, v_stride_s, ks_stride_b, ks_stride_h, ks_stride_s,
                  vs_stride_b, vs_stride_h, vs_stride_s, H, S, scale_log2,
                  T: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  K_BITS: tl.constexpr, V_BITS: tl.constexpr, QK_DTYPE: tl.constexpr, PV_DTYPE: tl.constexpr):
    """One share of the slots for the G * T query rows (row g * T + t) of one kv head.

    Leaves softmax(scores) @ v over the share in part [B*H, n_splits, G*T, D] and the base-2 log-sum-exp of
    the scores in lse [B*H, n_splits, G*T], float32.  Shares past the filled length leave nothing.
    """
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    split, n_splits = tl.program_id(1), tl.num_programs(1)
    start = tl.load(start_ptr + b).to(tl.int32)
    filled = tl.minimum(start + T, S)
    share = _share(filled, n_splits, BLOCK_N)
    first = split * share
    last = tl.minimum(first + share, filled)
    if first >= last:
        return

    rows, dims, slots = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    g, t = rows // T, rows % T
    is_row = (rows < G * T)[:, None] & (dims < D)[None, :]
    q_ptr += b * q_stride_b + h * G * q_stride_h
    q = tl.load(q_ptr + (g * q_stride_h + t * q_stride_t)[:, None] + dims[None, :], mask=is_row, other=0)
    q = q.to(QK_DTYPE)
    k_ptr += b * k_stride_b + h * k_stride_h
    v_ptr += b * v_stride_b + h * v_stride_h
    k_scale_ptr += b * ks_stride_b + h * ks_stride_h
    v_scale_ptr += b * vs_stride_b + h * vs_stride_h

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum of the scores, base 2
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in tl.range(first, last, BLOCK_N):
        at = tl.zeros([], tl.int64) + n
        is_filled = n + slots < last
        k = _load_tile(k_ptr + at * k_stride_s, k_stride_s, slots, dims, is_filled, D, K_BITS, QK_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if K_BITS < 16:
            k_scale = tl.load(k_scale_ptr + (at + slots) * ks_stride_s, mask=is_filled, other=0)
            scores *= (k_scale.to(tl.float32) * scale_log2)[None, :]
        else:
            scores *= scale_log2
        is_seen = is_filled[None, :] & ((n + slots)[None, :] <= start + t[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see nothing of this share
        p = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, 1)
        top = new_top
        if V_BITS < 16:
            v_scale = tl.load(v_scale_ptr + (at + slots) * vs_stride_s, mask=is_filled, other=0)
            p *= v_scale.to(tl.float32)[None, :]
        v = _load_tile(v_ptr + at * v_stride_s, v_stride_s, slots, dims, is_filled, D, V_BITS, PV_DTYPE)
        acc = tl.dot(p.to(PV_DTYPE), v, acc * fade[:, None], input_precision="ieee")

    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    part = (tl.program_id(0).to(tl.int64) * n_splits + split) * (G * T)
    tl.store(part_ptr + (part + rows)[:, None] * D + dims[None, :], out, mask=is_row)
    tl.store(lse_ptr + part + rows, top + tl.log2(total), mask=rows < G * T)


@_jit
def _combine_kernel(part_ptr, lse_ptr, start_ptr, out_ptr, H, S, n_splits,
                    T: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """One query row of out [B, Hq, T, D]: the mean of what _split_kernel left, weighted by exp2(lse)."""
    pid = tl.program_id(0).to(tl.int64)  # (b * H + h) * G * T + row, the order of out's rows
    head, row = pid // (G * T), pid % (G * T)
    filled = tl.minimum(tl.load(start_ptr + head // H).to(tl.int32) + T, S)
    used = tl.cdiv(filled, _share(filled, n_splits, BLOCK_N))
    dims, splits = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_SPLITS)

    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, used, BLOCK_SPLITS):
        at = (head * n_splits + first + splits) * (G * T) + row
        is_used = first + splits < used
        lse = tl.load(lse_ptr + at, mask=is_used, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 0))  # finite from the first block on: every row sees slot 0
        weight = tl.exp2(lse - new_top)
        fade = tl.exp2(top - new_top)
        mask = is_used[:, None] & (dims < D)[None, :]
        part = tl.load(part_ptr + at[:, None] * D + dims[None, :], mask=mask, other=0)
        acc = acc * fade + tl.sum(part * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = new_top
    tl.store(out_ptr + pid * D + dims, acc / total, mask=dims < D)


@_jit
def _round_to_bfloat16(x):
    """Finite float32 x to bfloat16, half to even, in integers: Triton's interpreter would truncate."""
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -0x10000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@_jit
def _store_tokens(new_ptr, new_stride_h, new_stride_t, cache_ptr, cache_stride_h, cache_stride_s,
                  scale_ptr, scale_stride_h, scale_stride_s, tokens, heads, dims, is_token, H,
                  D: tl.constexpr, BITS: tl.constexpr, IS_SHARED: tl.constexpr, EPS: tl.constexpr):
    """Stores K or V of some tokens [BLOCK_T, BLOCK_H, BLOCK_D] as kv_cache.quantize does, bit for bit.

    Divisions are IEEE ones (Triton's `/` is approximate in float32), every rounding is half to even.
    """
    is_head = is_token[:, None] & (heads < H)[None, :]
    mask = is_head[:, :, None] & (dims < D)[None, None, :]
    new_ptr += (tokens * new_stride_t)[:, None] + (heads * new_stride_h)[None, :]  # [BLOCK_T, BLOCK_H]
    cache_ptr += (tokens * cache_stride_s)[:, None] + (heads * cache_stride_h)[None, :]
    x = tl.load(new_ptr[:, :, None] + dims[None, None, :], mask=mask, other=0)
    cache_ptr = cache_ptr[:, :, None] + dims[None, None, :]
    if BITS == 16:
        tl.store(cache_ptr, x.to(cache_ptr.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), 2)  # [BLOCK_T, BLOCK_H]
        if IS_SHARED:  # one scale for all heads, stored by the first
            largest = tl.broadcast_to(tl.max(largest, 1)[:, None], largest.shape)
            is_head = is_head & (heads == 0)[None, :]
        scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)), EPS)
        scale = _round_to_bfloat16(scale)
        scale_ptr += (tokens * scale_stride_s)[:, None] + (heads * scale_stride_h)[None, :]
        tl.store(scale_ptr, scale, mask=is_head)
        x = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32)[:, :, None], x.shape))
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: a sum there has no fraction bits left
        tl.store(cache_ptr, tl.minimum(tl.maximum(x, -127.0), 127.0).to(tl.int8), mask=mask)


@_jit
def _write_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, start_ptr,
                  k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
                  kc_stride_b, kc_stride_h, kc_stride_s, vc_stride_b, vc_stride_h, vc_stride_s,
                  ks_stride_b, ks_stride_h, ks_stride_s, vs_stride_b, vs_stride_h, vs_stride_s, T, H, S,
                  D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
                  K_BITS: tl.constexpr, V_BITS: tl.constexpr, IS_SHARED: tl.constexpr, EPS: tl.constexpr):
    """Stores K and V of BLOCK_T tokens of row b, all heads, at slots start[b] + t."""
    b = tl.program_id(0).to(tl.int64)
    start = tl.load(start_ptr + b).to(tl.int64)
    tokens = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    heads = tl.arange(0, BLOCK_H).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    # A slot outside the cache is the caller's mistake: a replayed graph cannot say so, but spoils no memory.
    is_token = (tokens < T) & (start + tokens >= 0) & (start + tokens < S)
    _store_tokens(k_ptr + b * k_stride_b, k_stride_h, k_stride_t,
                  k_cache_ptr + b * kc_stride_b + start * kc_stride_s, kc_stride_h, kc_stride_s,
                  k_scale_ptr + b * ks_stride_b + start * ks_stride_s, ks_stride_h, ks_stride_s,
                  tokens, heads, dims, is_token, H, D, K_BITS, IS_SHARED, EPS)
    _store_tokens(v_ptr + b * v_stride_b, v_stride_h, v_stride_t,
                  v_cache_ptr + b * vc_stride_b + start * vc_stride_s, vc_stride_h, vc_stride_s,
                  v_scale_ptr + b * vs_stride_b + start * vs_stride_s, vs_stride_h, vs_stride_s,
                  tokens, heads, dims, is_token, H, D, V_BITS, IS_SHARED, EPS)


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


def decode_config(n_rows: int, head_dim: int, k_dtype: torch.dtype, v_dtype: torch.dtype,
                  q_dtype: torch.dtype) -> dict:
    """Constants of _split_kernel for G * T = `n_rows`: tile sizes, operand types, warps, pipeline stages.

    int8 meets the query as bfloat16 or float16 (exact).  float32 queries are multiplied in float32, and so is
    everything in Triton's interpreter, which has no bfloat16 products.
    """
    is_wide = _is_interpreted() or torch.float32 in (q_dtype, k_dtype, v_dtype)
    itemsize = 4 if is_wide else max(k_dtype.itemsize, v_dtype.itemsize)
    block_d = triton.next_power_of_2(max(head_dim, 16))
    pv_dtype = torch.bfloat16 if v_dtype == torch.int8 else v_dtype  # float16 loses small probability * scale
    qk_dtype = q_dtype if k_dtype in (torch.int8, q_dtype) else torch.float32
    return {
        "D": head_dim,
        "BLOCK_M": triton.next_power_of_2(max(n_rows, 16)),  # tensor cores take 16 rows or more
        "BLOCK_N": min(64, max(16, STAGE_BYTES // (block_d * itemsize))),
        "BLOCK_D": block_d,
        "K_BITS": 8 if k_dtype == torch.int8 else 16,
        "V_BITS": 8 if v_dtype == torch.int8 else 16,
        "QK_DTYPE": tl.float32 if is_wide else getattr(tl, str(qk_dtype).removeprefix("torch.")),
        "PV_DTYPE": tl.float32 if is_wide else getattr(tl, str(pv_dtype).removeprefix("torch.")),
        "num_warps": 4,
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
    is_shared = H > 1 and any(x is not None and x.shape[1] == 1 for x in (k_scales, v_scales))
    block_h, block_d = triton.next_power_of_2(H), triton.next_power_of_2(D)
    block_t = min(triton.next_power_of_2(T), max(1, WRITE_TILE // (block_h * block_d)))
    with torch.cuda.device_of(k):
        _write_kernel[(B, triton.cdiv(T, block_t))](
            k, v, *_pointers(k_values, k_scales, v_values, v_scales), start, *_strides(k), *_strides(v),
            *_strides(k_values), *_strides(v_values), *_strides(k_scales), *_strides(v_scales),
            T, H, k_values.shape[2], D=D, BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_D=block_d,
            K_BITS=16 if k_scales is None else 8, V_BITS=16 if v_scales is None else 8,
            IS_SHARED=is_shared, EPS=SCALE_EPS, num_warps=4)


def decode(q: Tensor, start: Tensor, k_values: Tensor, k_scales: Tensor | None, v_values: Tensor,
           v_scales: Tensor | None) -> Tensor:
    """Attention of q [B, Hq, T, D] at start[b] .. start[b]+T-1 over a cache that holds those tokens already.

    values [B, H, S, D] with D stride 1: int8 with bfloat16 scales [B, H or 1, S], or floating point without;
    G * T <= MAX_DECODE_ROWS.  Returns [B, Hq, T, D].  Never reads `start` on the host.
    """
    B, Hq, T, D = q.shape
    H, S = k_values.shape[1:3]
    rows = Hq // H * T
    config = decode_config(rows, D, k_values.dtype, v_values.dtype, q.dtype)
    n_splits = n_splits_for(_multiprocessors(q.device), B * H, S, config["BLOCK_N"])
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    part = torch.empty((B * H, n_splits, rows, D), dtype=torch.float32, device=q.device)
    lse = torch.empty((B * H, n_splits, rows), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        _split_kernel[(B * H, n_splits)](
            q, *_pointers(k_values, k_scales, v_values, v_scales), start, part, lse, *q.stride()[:3],
            *_strides(k_values), *_strides(v_values), *_strides(k_scales), *_strides(v_scales),
            H, S, D**-0.5 * math.log2(math.e), T=T, G=Hq // H, **config)
        _combine_kernel[(B * H * rows,)](
            part, lse, start, out, H, S, n_splits, T=T, G=Hq // H, D=D, BLOCK_N=config["BLOCK_N"],
            BLOCK_D=config["BLOCK_D"], BLOCK_SPLITS=16, num_warps=4)
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
    """Slots first .. first+n of a cache into out [B, H, n, D], rounded once; on CUDA without a temporary."""
    values = values[:, :, first : first + out.shape[2]]
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
        packed = 4 in (self.spec.k_bits, self.spec.v_bits)
        self.has_kernels = available(self.k_values.device) is None and not packed
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
