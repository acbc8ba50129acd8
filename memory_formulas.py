"""Bytes of a run as arithmetic: weights, cache, mask, and what loading, prefill and decode hold for a while.

Each function mirrors the code that allocates, which is named; a test compares them with runs on fake tensors
and with measured ones.  Letters: B batch, T tokens of a chunk, M = B*T rows, S slots, H key/value heads, D
head_dim, E model dim, I inner dim of the feed-forward, N outputs and K inputs of a linear layer.
"""
from dataclasses import dataclass

import torch

import quantize
from cpu_extension import X86
from kv_cache import BASIS_DTYPE, BLOCK_SLOTS, CacheSpec
from linear_cpu import FEW_ROWS
from model import ModelConfig

FLOAT = 4  # bytes of float32
LIBRARIES_CPU = 20_000_000  # code pages and BLAS buffers: 12 to 26 MB measured
COMPILER_CPU = 265_000_000  # torch.compile's Python, measured
PACK_SLAB = {"int4": 16, "int8": 13}  # bytes per weight of a slab while it is rounded (quantize.*Linear.pack)


@dataclass(frozen=True)
class Setup:
    """A run to be planned.  prompt_tokens None: a prompt that fills the cache.  kernels: the fastest of
    backends.py, not plain PyTorch.  source: where weights come from, "checkpoint" (full precision), "packed"
    (a file that quantize.py saved) or "random".  assumed: tokens that Engine.assume_filled puts there."""
    config: ModelConfig
    spec: CacheSpec
    cache_size: int
    quantization: str | None = None
    batch: int = 1
    prefill_chunk: int = 512
    prompt_tokens: int | None = None
    causal_mask: str = "none"
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    kernels: bool = True
    source: str = "checkpoint"
    compile: bool = False
    assumed: int = 0

    @property
    def chunk(self) -> int:
        """Tokens of the largest prefill call."""
        prompt = self.cache_size if self.prompt_tokens is None else self.prompt_tokens
        return max(min(self.prefill_chunk, prompt, self.cache_size), 1)

    @property
    def filled(self) -> int:
        """Slots that the last prefill chunk sees."""
        prompt = self.cache_size if self.prompt_tokens is None else self.prompt_tokens
        return min(self.assumed + prompt, self.cache_size)

    @property
    def gemm_bytes(self) -> int:
        """Bytes of a value in a GEMM of many rows."""
        return quantize.gemm_dtype(self.device, self.dtype).itemsize

    @property
    def linear_kernels(self) -> bool:
        """Whether linear_cpu.py serves the linear layers."""
        vectors = X86 and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        return self.kernels and self.device == "cpu" and vectors

    @property
    def attention_kernels(self) -> bool:
        """Whether attention_cpu.py serves the cache."""
        innermost = self.spec.k_layout[-1] + self.spec.v_layout[-1] == "dd"
        return self.kernels and self.device == "cpu" and innermost and self.config.head_dim % 16 == 0


# ---- what stays ----


def layer_shapes(config: ModelConfig) -> list[tuple[int, int, bool]]:
    """(N, K, has a bias) of the linear layers of one block, in the order of loading."""
    c = config
    heads = c.n_heads * c.head_dim
    return [(heads + 2 * c.n_kv_heads * c.head_dim, c.dim, c.attention_bias),
            (c.dim, heads, c.attention_bias),
            (2 * c.intermediate_size, c.dim, c.mlp_bias), (c.dim, c.intermediate_size, c.mlp_bias)]


def linear_bytes(s: Setup, N: int, K: int) -> int:
    """A layer's weight as it stays."""
    if s.quantization is None:
        return N * K * s.dtype.itemsize
    return quantize.packed_bytes(N, K, s.quantization)


def weights(s: Setup) -> tuple[int, int]:
    """Linear layers with norms and biases; the embedding.  A tied output layer is one more once quantized."""
    c, a = s.config, s.dtype.itemsize
    block = sum(linear_bytes(s, N, K) + N * a * bias for N, K, bias in layer_shapes(c)) + 2 * c.dim * a
    shared = c.tie_word_embeddings and s.quantization is None
    output = 0 if shared else linear_bytes(s, c.vocab_size, c.dim)
    return c.n_layers * block + output + c.dim * a, c.vocab_size * c.dim * a


def cache(s: Setup) -> tuple[int, int, int]:
    """Values, scales, and the bases of 4-bit caches (kv_cache.KVCache, kv_calibrate.basis)."""
    c, size = s.config, (s.batch, s.config.n_kv_heads, s.cache_size, s.config.head_dim)
    sides = (s.spec.k_bits == 4) + (s.spec.v_bits == 4)
    bases = sides * 2 * c.n_kv_heads * c.head_dim ** 2 * BASIS_DTYPE.itemsize
    return c.n_layers * s.spec.value_bytes(*size), c.n_layers * s.spec.scale_bytes(*size), c.n_layers * bases


def mask(s: Setup) -> int:
    """The table of `full`; the other modes keep none."""
    return s.cache_size ** 2 if s.causal_mask == "full" else 0


def libraries(s: Setup) -> int:
    """What libraries take in resident memory; CUDA's allocator does not count them."""
    return 0 if s.device != "cpu" else LIBRARIES_CPU + COMPILER_CPU * s.compile


def holes(s: Setup) -> int:
    """What the C library's heap keeps beside the transients that it serves: about as much again, measured.
    Behind the other masks they are large, and mapped one by one (generation.make_engine)."""
    return max(prefill(s), decode(s)) if s.device == "cpu" and s.causal_mask == "none" else 0


# ---- linear layers ----


def linear(s: Setup, M: int, N: int, K: int) -> int:
    """Peak of y = layer(x) beyond x, y included (quantize.py, linear_cpu.py)."""
    a, g, out = s.dtype.itemsize, s.gemm_bytes, M * N * s.dtype.itemsize
    few = M < quantize.MANY_ROWS and a == 2
    if s.quantization is None:
        if s.linear_kernels and a == 2 and M <= FEW_ROWS:  # linear_cpu.CpuLinear
            return out + M * K * FLOAT
        wide = s.linear_kernels and g > a
        return max(2 * M * N, M * N + M * K + (1 << 20)) * FLOAT if wide else out
    if s.linear_kernels:
        dynamic = M * (2 * N * FLOAT + K * a) if s.quantization == "int8dq" else 0
        return out + M * K * 2 + dynamic  # activations as 16-bit integers
    slab = min(quantize.SLAB_VALUES, N * K)
    rows = M * K * g if g != a else 0
    if s.quantization.startswith("int8"):
        dynamic = M * (K + N) * FLOAT if s.quantization == "int8dq" else 0
        if s.device == "cuda":
            return dynamic + (0 if dynamic and M > 16 else N * K * a) + 2 * out
        return dynamic + (out if few else rows + max(2 * M * N * g, M * N * g + slab * g))
    if s.device == "cuda" or few:
        return out
    return rows + out + slab * g + max(slab, M * slab // K * g)


# ---- one block of the model ----


def attention(s: Setup, T: int, filled: int) -> int:
    """Peak of reading the cache for T tokens a row, beyond q (kv_cache.attend_blocks or _attend_masked)."""
    c, B, a = s.config, s.batch, s.dtype.itemsize
    H, Hq, D = c.n_kv_heads, c.n_heads, c.head_dim
    if s.causal_mask != "none":
        return _attention_masked(s, T)
    if s.device == "cuda" and s.kernels and a == 2:
        own = 2 * B * (Hq + H) * T * D * a
        return own + 2 * B * H * min(4096, filled) * D * a + B * Hq * T * D * (2 * FLOAT + a)
    if s.attention_kernels:
        return B * Hq * T * D * (a + FLOAT * (s.spec.k_bits == 4))
    g = a if s.device != "cpu" else s.gemm_bytes if T * Hq // H >= 32 else FLOAT
    n, rows = min(BLOCK_SLOTS, filled), B * Hq * T
    four = 4 in (s.spec.k_bits, s.spec.v_bits)
    basis = rows * D * a if four else 0
    unpacking = B * H * n * D * 6 if four else 0  # an index of 4 bytes, the nibbles, the levels
    scores = rows * n * (FLOAT if g == FLOAT else FLOAT + g)
    block = max(B * H * n * D * g * 3 + scores + B * T * Hq // H * n, unpacking + B * H * n * D * g)
    return basis + rows * D * (g + FLOAT) + rows * D * g + block


def _attention_masked(s: Setup, T: int) -> int:
    """Dequantizes all slots, repeats them for every query head, then SDPA behind a mask of numbers."""
    c, B, S, a = s.config, s.batch, s.cache_size, s.dtype.itemsize
    stored, repeated = B * c.n_kv_heads * S * c.head_dim, B * c.n_heads * S * c.head_dim * a
    group = c.n_heads // c.n_kv_heads
    one = stored * a + repeated if group > 1 else stored * a
    quantized = 16 != s.spec.v_bits
    widening = stored * 2 * FLOAT + (stored * 5 if s.spec.v_bits == 4 else 0) if quantized else 0
    masks = B * T * S
    return masks + repeated + max(widening, one if quantized or group > 1 else 0, repeated + masks * a)


def block(s: Setup, T: int, filled: int) -> int:
    """Peak of one layer for T tokens a row beyond weights and cache, residuals included (model.py)."""
    c, a, M = s.config, s.dtype.itemsize, s.batch * T
    heads, kv, inner = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.intermediate_size
    outside = 2 * M * c.dim * a + M * c.head_dim * FLOAT  # the residual before and now, cos and sin
    qkv = heads + 2 * kv
    held = M * c.dim * a + M * qkv * a  # the normed input, q k v
    rope = M * (heads + kv) * (4 * FLOAT)
    rotated = M * (heads + kv) * a
    reading = held + rotated + attention(s, T, filled)
    mixing = held + max(rope + rotated, M * kv * 3 * FLOAT + rotated)
    projecting = held + rotated + M * heads * a * 2 + linear(s, M, c.dim, heads)
    normed = M * c.dim * a
    gate_up = normed + linear(s, M, 2 * inner, c.dim)
    gating = normed + M * inner * a * 4
    down = normed + M * inner * a * 3 + linear(s, M, c.dim, inner)
    first = M * c.dim * a + linear(s, M, qkv, c.dim)
    return outside + max(first, reading, mixing, projecting, gate_up, gating, down)


def prefill(s: Setup) -> int:
    """Transients of the largest chunk, or of Engine.assume_filled."""
    c, n = s.config, min(s.assumed, 4096)
    values = s.batch * c.n_kv_heads * n * c.head_dim
    assuming = values * (2 * s.dtype.itemsize + (0 if s.kernels else 3 * FLOAT))
    return max(block(s, s.chunk, s.filled), assuming)


def decode(s: Setup) -> int:
    """Transients of a step of one token a row at the end of the cache."""
    return block(s, 1, s.cache_size)


def logits(s: Setup) -> int:
    """Logits of one position a row, and sampling (inference.make_sampler)."""
    c = s.config
    return linear(s, s.batch, c.vocab_size, c.dim) + s.batch * c.vocab_size * 5 * FLOAT


# ---- loading ----


def loading(s: Setup) -> int:
    """Peak of load._fill: output layer and embedding first, then block by block, norms last."""
    c, a = s.config, s.dtype.itemsize
    linears, embedding = weights(s)
    blocks = layer_shapes(c)
    output = 0 if c.tie_word_embeddings and s.quantization is None else linear_bytes(s, c.vocab_size, c.dim)
    peaks = [_load_linear(s, c.vocab_size, c.dim)] if output else []
    paged = s.source != "random" and s.device == "cpu"  # resident memory counts what is read of the file
    peaks.append(output + embedding * (1 + paged))
    after = linears + embedding - c.dim * a
    for N, K, bias in reversed(blocks):  # of the last block
        after -= linear_bytes(s, N, K) + N * a * bias
        peaks.append(after + _load_linear(s, N, K))
    return max(peaks)


def _load_linear(s: Setup, N: int, K: int) -> int:
    """Peak while one linear layer is loaded, itself included."""
    packed, full = linear_bytes(s, N, K), N * K * s.dtype.itemsize
    paged = s.source != "random" and s.device == "cpu"
    if s.quantization is None:
        return full * (1 + paged)
    order = _kernel_order(s, packed, _slab(N, K, quantize.SLAB_VALUES))
    if s.source == "random":
        return packed + order
    if s.source == "packed":
        return packed + max(order, packed * paged)
    rounding = _slab(N, K, quantize.PACK_VALUES) * PACK_SLAB[s.quantization[:4]]
    return packed + max(full + rounding, order)


def _slab(N: int, K: int, values: int) -> int:
    """Weights of the largest slab of a layer."""
    return quantize._slabs(N, K, values)[0][1] * K


def _kernel_order(s: Setup, packed: int, slab: int) -> int:
    """What bringing a packed layer into the order of its kernels takes beside it, the result included."""
    int4 = s.quantization.startswith("int4")
    if s.linear_kernels:
        return packed + slab * 2  # linear_cpu.int4_panels, int8_panels
    if not int4:
        return 0
    if s.device == "cuda":
        return 3 * packed
    return packed + min(quantize.PACK_VALUES, slab) * 8  # quantize._cpu_pack
