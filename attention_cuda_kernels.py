"""The Triton kernels of attention_cuda.py: decode in two steps, and writing, over 16, 8 and 4 stored bits.

Kernels meet what is stored: rows of D floating point numbers, D int8, or at 4 bits (quantize4 in kv_cache.py)
STRONG int8, then HALF = (D - STRONG) / 2 bytes of two nibbles.  A 4-bit tile holds the coordinates in the
order in which unpacking leaves them; the query is read, and the result stored, in that order.

Strides are in elements (bytes at 4 bits), D's is 1; offsets of rows, heads and blocks are int64.  Those of
the cache come to decode in units of K_ALIGN and V_ALIGN, which tell the compiler how wide loads may be.
"""
from types import SimpleNamespace

from kv_cache import LEVELS, SCALE_EPS, SCALE_TRIALS, SIGMA

try:
    import triton
    import triton.language as tl
except ImportError:  # the plain path works without it
    triton = None
    tl = SimpleNamespace(constexpr=lambda value: value)

_jit = triton.jit if triton else lambda function: function

# LEVELS are symmetric: the upper half of the codes counts the positive ones up, the lower half mirrors it.
_POSITIVE = LEVELS[8:]
_TABLE = tl.constexpr(sum(level << 8 * i for i, level in enumerate(_POSITIVE)))  # a byte each
_EDGES = tl.constexpr(tuple((a + b) / 2 for a, b in zip(LEVELS, LEVELS[1:], strict=False)))
_N_EDGES = tl.constexpr(len(LEVELS) - 1)
_TRIALS = tl.constexpr(SCALE_TRIALS)
_N_TRIALS = tl.constexpr(len(SCALE_TRIALS))
_SIGMA = tl.constexpr(SIGMA)
_EPS = tl.constexpr(SCALE_EPS)


def lookup_asm(float_bits: list[int]) -> str:
    """PTX that turns four bytes of two codes into the levels of the four low and of the four high nibbles.

    float_bits: the eight positive levels as bfloat16 or float16, bit patterns.  Their upper and lower bytes
    make tables that prmt reads (PTX ISA, prmt: four lookups at once in eight bytes, by the nibbles of a
    selector, where a set top bit asks for the sign of the byte instead).  A conversion of each value would
    bound the whole kernel; this takes about two instructions a value.
    """
    def table(shift: int) -> str:
        eight = [bits >> shift & 0xFF for bits in float_bits]
        return ", ".join(f"{sum(byte << 8 * i for i, byte in enumerate(four)):#010x}"
                         for four in (eight[:4], eight[4:]))

    return f"""{{
    .reg .b32 x, m, s, t, a, b, c, d;
    not.b32 m, $4;
    and.b32 m, m, 0x88888888;
    shr.u32 t, m, 3;
    sub.u32 t, m, t;
    xor.b32 s, $4, t;
    and.b32 s, s, 0x77777777;
    prmt.b32 a, {table(8)}, s;
    prmt.b32 c, {table(0)}, s;
    prmt.b32 t, 0x40404040, 0x40404040, $4;
    shl.b32 t, t, 1;
    add.u32 a, a, t;
    shr.u32 s, s, 16;
    shr.u32 x, $4, 16;
    prmt.b32 b, {table(8)}, s;
    prmt.b32 d, {table(0)}, s;
    prmt.b32 t, 0x40404040, 0x40404040, x;
    shl.b32 t, t, 1;
    add.u32 b, b, t;
    prmt.b32 $0, c, a, 0x6240;
    prmt.b32 $1, d, b, 0x6240;
    prmt.b32 $2, c, a, 0x7351;
    prmt.b32 $3, d, b, 0x7351;
    }}"""


@_jit
def _level(code):
    """The level of a 4-bit code, int32; by arithmetic, since a table would be read from memory."""
    mirrored = tl.where(code < 8, 7 - code, code - 8).to(tl.int64)
    table = tl.full(code.shape, _TABLE, tl.int64)
    level = ((table >> (mirrored * 8)) & 127).to(tl.int32)
    return tl.where(code < 8, -level, level)


@_jit
def _coordinates(D: tl.constexpr, BITS: tl.constexpr, STRONG: tl.constexpr, BLOCK: tl.constexpr):
    """The coordinate that each column of a tile holds; D or more where it holds none."""
    columns = tl.arange(0, BLOCK)
    if BITS == 4:
        HALF: tl.constexpr = (D - STRONG) // 2
        columns = tl.where(columns // 2 < HALF, STRONG + columns % 2 * HALF + columns // 2, D)
    return columns


@_jit
def _load_tile(ptr, slot_stride, slots, is_filled, D: tl.constexpr, BITS: tl.constexpr,
               STRONG: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, LOOKUP: tl.constexpr):
    """Stored values [BLOCK_N, BLOCK] as DTYPE, before their scales, in the order of _coordinates.

    Slots that are not filled and columns that hold no coordinate give something finite (what lies there may
    be NaN).  All levels are exact in bfloat16 and float16, as int8 is.
    """
    ptr += slots[:, None] * slot_stride
    if BITS == 4:
        HALF: tl.constexpr = (D - STRONG) // 2
        columns = tl.arange(0, BLOCK // 2)
        mask = is_filled[:, None] & (columns < HALF)[None, :]
        pairs = tl.load(ptr + STRONG + columns[None, :], mask=mask, other=0)
        if LOOKUP is None:
            codes = pairs.to(tl.int32)
            low, high = _level(codes & 15).to(DTYPE), _level(codes >> 4).to(DTYPE)
        else:
            low, high = tl.inline_asm_elementwise(LOOKUP, "=r,=r,=r,=r,r", [pairs], (tl.int16, tl.int16),
                                                  is_pure=True, pack=4)
            low, high = low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
        return tl.interleave(low, high)
    else:
        columns = tl.arange(0, BLOCK)
        mask = is_filled[:, None]
        if BLOCK != D:
            mask = mask & (columns < D)[None, :]
        return tl.load(ptr + columns[None, :], mask=mask, other=0).to(DTYPE)


@_jit
def _load_strong(ptr, slot_stride, slots, is_filled, STRONG: tl.constexpr, BLOCK: tl.constexpr,
                 DTYPE: tl.constexpr):
    """The strong coordinates [BLOCK_N, BLOCK] of 4-bit rows as DTYPE, before their scale; 0 past them."""
    columns = tl.arange(0, BLOCK)
    mask = is_filled[:, None] & (columns < STRONG)[None, :]
    tile = tl.load(ptr + slots[:, None] * slot_stride + columns[None, :], mask=mask, other=0)
    return tile.to(tl.int8, bitcast=True).to(DTYPE)


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
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                  K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_STRONG: tl.constexpr, V_STRONG: tl.constexpr,
                  BLOCK_K_STRONG: tl.constexpr, BLOCK_V_STRONG: tl.constexpr,
                  K_ALIGN: tl.constexpr, V_ALIGN: tl.constexpr,
                  QK_DTYPE: tl.constexpr, PV_DTYPE: tl.constexpr,
                  K_LOOKUP: tl.constexpr, V_LOOKUP: tl.constexpr):
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

    rows, slots = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    g, t = rows // T, rows % T
    is_row = (rows < G * T)[:, None]
    q_ptr += b * q_stride_b + h * G * q_stride_h + (g * q_stride_h + t * q_stride_t)[:, None]
    dims = _coordinates(D, K_BITS, K_STRONG, BLOCK_K)[None, :]
    q = tl.load(q_ptr + dims, mask=is_row & (dims < D), other=0).to(QK_DTYPE)
    if K_STRONG:
        dims = tl.arange(0, BLOCK_K_STRONG)[None, :]
        q_strong = tl.load(q_ptr + dims, mask=is_row & (dims < K_STRONG), other=0).to(QK_DTYPE)
    k_ptr += (b * k_stride_b + h * k_stride_h) * K_ALIGN
    v_ptr += (b * v_stride_b + h * v_stride_h) * V_ALIGN
    k_stride_s, v_stride_s = k_stride_s * K_ALIGN, v_stride_s * V_ALIGN
    k_scale_ptr += b * ks_stride_b + h * ks_stride_h
    v_scale_ptr += b * vs_stride_b + h * vs_stride_h

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum of the scores, base 2
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if V_STRONG:
        acc_strong = tl.zeros([BLOCK_M, BLOCK_V_STRONG], tl.float32)
    for n in tl.range(first, last, BLOCK_N):
        at = tl.zeros([], tl.int64) + n
        is_filled = n + slots < last
        k_at = k_ptr + at * k_stride_s
        k = _load_tile(k_at, k_stride_s, slots, is_filled, D, K_BITS, K_STRONG, BLOCK_K, QK_DTYPE, K_LOOKUP)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if K_STRONG:
            k = _load_strong(k_at, k_stride_s, slots, is_filled, K_STRONG, BLOCK_K_STRONG, QK_DTYPE)
            scores = tl.dot(q_strong, tl.trans(k), scores, input_precision="ieee")
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
        v_at = v_ptr + at * v_stride_s
        if V_STRONG:
            v = _load_strong(v_at, v_stride_s, slots, is_filled, V_STRONG, BLOCK_V_STRONG, PV_DTYPE)
            acc_strong = tl.dot(p.to(PV_DTYPE), v, acc_strong * fade[:, None], input_precision="ieee")
        v = _load_tile(v_at, v_stride_s, slots, is_filled, D, V_BITS, V_STRONG, BLOCK_V, PV_DTYPE, V_LOOKUP)
        acc = tl.dot(p.to(PV_DTYPE), v, acc * fade[:, None], input_precision="ieee")

    whole = tl.where(total > 0, total, 1.0)[:, None]
    part = (tl.program_id(0).to(tl.int64) * n_splits + split) * (G * T)
    tl.store(lse_ptr + part + rows, top + tl.log2(total), mask=rows < G * T)
    part_ptr += (part + rows)[:, None] * D
    dims = _coordinates(D, V_BITS, V_STRONG, BLOCK_V)[None, :]
    tl.store(part_ptr + dims, acc / whole, mask=is_row & (dims < D))
    if V_STRONG:
        dims = tl.arange(0, BLOCK_V_STRONG)[None, :]
        tl.store(part_ptr + dims, acc_strong / whole, mask=is_row & (dims < V_STRONG))


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
def _divide(x, y):
    """x / y in float32, rounded as IEEE does it: Triton's `/` is approximate."""
    return tl.div_rn(x, tl.zeros(x.shape, tl.float32) + y)


@_jit
def _to_int8(x):
    """Float32 x, rounded half to even and clamped, as int8."""
    x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: a sum there has no fraction bits left
    return tl.minimum(tl.maximum(x, -127.0), 127.0).to(tl.int8)


@_jit
def _code(y):
    """The code of the level next to y, the lower one of a tie: how many edges between levels lie below y."""
    code = tl.zeros(y.shape, tl.int32)
    for i in tl.static_range(_N_EDGES):
        code += (y > _EDGES[i]).to(tl.int32)
    return code


@_jit
def _fit_scale(low, high, mask, N: tl.constexpr):
    """The scale [BLOCK_T, BLOCK_H, 1] of least squared error among fits from SCALE_TRIALS; 0 for zeros.

    low, high: [BLOCK_T, BLOCK_H, BLOCK], of which those in `mask` count, N to a head in all.
    """
    mean = _divide(tl.sum(low * low, 2, True) + tl.sum(high * high, 2, True), N)
    rms = _divide(tl.maximum(tl.sqrt_rn(mean), _EPS), _SIGMA)
    best, scale = tl.zeros(rms.shape, tl.float32), tl.zeros(rms.shape, tl.float32)
    for i in tl.static_range(_N_TRIALS):
        step = rms * _TRIALS[i]
        fit_low = tl.where(mask, _level(_code(_divide(low, step))), 0).to(tl.float32)
        fit_high = tl.where(mask, _level(_code(_divide(high, step))), 0).to(tl.float32)
        along = tl.sum(low * fit_low, 2, True) + tl.sum(high * fit_high, 2, True)
        norm = tl.sum(fit_low * fit_low, 2, True) + tl.sum(fit_high * fit_high, 2, True)
        norm = tl.maximum(norm, 1.0)  # 0 only where there is no token
        gain = _divide(along * along, norm)
        scale = tl.where(gain > best, _divide(along, norm), scale)
        best = tl.maximum(gain, best)
    return scale


@_jit
def _store8(new_ptr, cache_ptr, scale_ptr, is_head, heads, D: tl.constexpr, BLOCK_D: tl.constexpr,
            IS_SHARED: tl.constexpr):
    """As kv_cache.quantize, bit for bit.  Pointers [BLOCK_T, BLOCK_H, 1]."""
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    mask = is_head & (dims < D)
    x = tl.load(new_ptr + dims, mask=mask, other=0).to(tl.float32)
    largest = tl.max(tl.abs(x), 2, keep_dims=True)
    if IS_SHARED:  # one scale for all heads, stored by the first
        largest = tl.broadcast_to(tl.max(largest, 1, keep_dims=True), largest.shape)
        is_head = is_head & (heads == 0)
    scale = _round_to_bfloat16(tl.maximum(_divide(largest, 127.0), _EPS))
    tl.store(scale_ptr, scale, mask=is_head)
    tl.store(cache_ptr + dims, _to_int8(_divide(x, scale.to(tl.float32))), mask=mask)


@_jit
def _store4(new_ptr, cache_ptr, scale_ptr, is_head, D: tl.constexpr, BLOCK_D: tl.constexpr,
            STRONG: tl.constexpr):
    """As kv_cache.quantize4, but for the order of sums, which may turn the choice between scales that are
    equally good.  Pointers [BLOCK_T, BLOCK_H, 1]; is_head [BLOCK_T, BLOCK_H, 1]."""
    HALF: tl.constexpr = (D - STRONG) // 2
    dims = tl.arange(0, BLOCK_D // 2)[None, None, :]
    mask = is_head & (dims < HALF)
    low = tl.load(new_ptr + STRONG + dims, mask=mask, other=0).to(tl.float32)
    high = tl.load(new_ptr + STRONG + HALF + dims, mask=mask, other=0).to(tl.float32)
    scale = _fit_scale(low, high, mask, 2 * HALF)
    if STRONG:
        dims_strong = tl.arange(0, BLOCK_D)[None, None, :]
        is_strong = is_head & (dims_strong < STRONG)
        strong = tl.load(new_ptr + dims_strong, mask=is_strong, other=0).to(tl.float32)
        scale = tl.maximum(scale, _divide(tl.max(tl.abs(strong), 2, keep_dims=True), 127.0))
    scale = _round_to_bfloat16(tl.maximum(scale, _EPS))
    tl.store(scale_ptr, scale, mask=is_head)
    scale = scale.to(tl.float32)
    pairs = _code(_divide(low, scale)) | (_code(_divide(high, scale)) << 4)
    tl.store(cache_ptr + STRONG + dims, pairs.to(tl.uint8), mask=mask)
    if STRONG:
        strong = _to_int8(_divide(strong, scale)).to(tl.uint8, bitcast=True)
        tl.store(cache_ptr + dims_strong, strong, mask=is_strong)


@_jit
def _store_tokens(new_ptr, new_stride_h, new_stride_t, cache_ptr, cache_stride_h, cache_stride_s,
                  scale_ptr, scale_stride_h, scale_stride_s, tokens, heads, is_token, H, D: tl.constexpr,
                  BLOCK_D: tl.constexpr, BITS: tl.constexpr, STRONG: tl.constexpr, IS_SHARED: tl.constexpr):
    """Stores K or V of some tokens: tokens, is_token [BLOCK_T, 1, 1], heads [1, BLOCK_H, 1]."""
    is_head = is_token & (heads < H)
    new_ptr += tokens * new_stride_t + heads * new_stride_h  # [BLOCK_T, BLOCK_H, 1]
    cache_ptr += tokens * cache_stride_s + heads * cache_stride_h
    scale_ptr += tokens * scale_stride_s + heads * scale_stride_h
    if BITS == 4:
        _store4(new_ptr, cache_ptr, scale_ptr, is_head, D, BLOCK_D, STRONG)
    elif BITS == 8:
        _store8(new_ptr, cache_ptr, scale_ptr, is_head, heads, D, BLOCK_D, IS_SHARED)
    else:
        dims = tl.arange(0, BLOCK_D)[None, None, :]
        mask = is_head & (dims < D)
        x = tl.load(new_ptr + dims, mask=mask, other=0)
        tl.store(cache_ptr + dims, x.to(cache_ptr.dtype.element_ty), mask=mask)


@_jit
def _write_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, start_ptr,
                  k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
                  kc_stride_b, kc_stride_h, kc_stride_s, vc_stride_b, vc_stride_h, vc_stride_s,
                  ks_stride_b, ks_stride_h, ks_stride_s, vs_stride_b, vs_stride_h, vs_stride_s, T, H, S,
                  D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
                  K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_STRONG: tl.constexpr, V_STRONG: tl.constexpr,
                  IS_SHARED: tl.constexpr):
    """Stores K and V of BLOCK_T tokens of row b, all heads, at slots start[b] + t."""
    b = tl.program_id(0).to(tl.int64)
    start = tl.load(start_ptr + b).to(tl.int64)
    tokens = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None, None]
    heads = tl.arange(0, BLOCK_H).to(tl.int64)[None, :, None]
    # A slot outside the cache is the caller's mistake: a replayed graph cannot say so, but spoils no memory.
    is_token = (tokens < T) & (start + tokens >= 0) & (start + tokens < S)
    k_ptr += b * k_stride_b
    v_ptr += b * v_stride_b
    k_cache_ptr += b * kc_stride_b + start * kc_stride_s
    v_cache_ptr += b * vc_stride_b + start * vc_stride_s
    k_scale_ptr += b * ks_stride_b + start * ks_stride_s
    v_scale_ptr += b * vs_stride_b + start * vs_stride_s
    _store_tokens(k_ptr, k_stride_h, k_stride_t, k_cache_ptr, kc_stride_h, kc_stride_s,
                  k_scale_ptr, ks_stride_h, ks_stride_s,
                  tokens, heads, is_token, H, D, BLOCK_D, K_BITS, K_STRONG, IS_SHARED)
    _store_tokens(v_ptr, v_stride_h, v_stride_t, v_cache_ptr, vc_stride_h, vc_stride_s,
                  v_scale_ptr, vs_stride_h, vs_stride_s,
                  tokens, heads, is_token, H, D, BLOCK_D, V_BITS, V_STRONG, IS_SHARED)
