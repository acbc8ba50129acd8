"""The C++ attention against the plain path: same bits stored, same outputs to rounding, poison never read."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attention_cpu
from attention_cpu import CpuKVCache
from cpu_extension import find_compiler
from inference import vector_options
from kv_cache import CacheSpec, KVCache, attend_blocks

SERVED_LAYOUTS = ("bhsd", "bshd", "sbhd", "shbd", "hbsd", "hsbd")
BUFFERS = ("k_values", "k_scales", "v_values", "v_scales")


@pytest.fixture(scope="module", autouse=True)
def extension():
    reason = attention_cpu.load()
    if find_compiler() is None:
        pytest.skip(reason)
    assert reason == ""


def poison_of(buffer: torch.Tensor) -> float:
    return float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min


def poison(cache: KVCache) -> None:
    """Fill every slot with what must never matter."""
    for buffer in (getattr(cache, name) for name in BUFFERS):
        if buffer is not None:
            buffer.fill_(poison_of(buffer))


def pair(spec: CacheSpec, batch: int, heads: int, slots: int, dim: int,
         level: int = 2) -> tuple[CpuKVCache, KVCache]:
    """A C++ cache and a plain one of the same kind, both poisoned."""
    caches = CpuKVCache(spec, batch, heads, slots, dim), KVCache(spec, batch, heads, slots, dim)
    caches[0].level = level
    for cache in caches:
        poison(cache)
    return caches


def fill(caches: tuple[KVCache, ...], start: list[int], tokens: int, seed: int = 0) -> torch.Tensor:
    """Write start[b] + tokens random tokens into each row b; returns start as a tensor."""
    batch, heads = caches[0].k_values.shape[:2]
    dim = caches[0].head_dim
    generator, dtype = torch.Generator().manual_seed(seed), caches[0].spec.dtype
    k, v = (torch.randn(batch, heads, max(start) + tokens, dim, generator=generator) for _ in range(2))
    k[:, :, :2] *= 8  # the first tokens of real models hold outliers
    for cache in caches:
        cache.write(torch.zeros(batch, dtype=torch.long), k.to(dtype), v.to(dtype))
        for row, first in enumerate(start):  # what a shorter row does not have is poison again
            for buffer in (getattr(cache, name) for name in BUFFERS):
                if buffer is not None:
                    buffer[row, :, first + tokens:] = poison_of(buffer)
    return torch.tensor(start)


def assert_near(y: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal to within the rounding of y's dtype (bfloat16), or of the 16-bit integers inside (float32)."""
    wide = max(y.shape[-1] / 64, 1) ** 0.5  # rounded queries add up over head_dim
    rtol, atol = (2 ** -8, 2 ** -10) if y.dtype == torch.bfloat16 else (1e-4, 3e-4 * wide)
    torch.testing.assert_close(y.float(), exact, rtol=rtol, atol=atol * exact.abs().max().item())


def check(spec: CacheSpec, heads: int, group: int, dim: int, start: list[int], tokens: int,
          level: int) -> None:
    caches = pair(spec, len(start), heads, max(start) + tokens + 7, dim, level)
    position = fill(caches, start, tokens)
    q = torch.randn(len(start), heads * group, tokens, dim).to(spec.dtype)
    y = caches[0].attend(q, position)
    plain = caches[1]
    exact = attend_blocks(q.float(), position, plain.k_values, plain.k_scales, plain.v_values, plain.v_scales)
    assert y.dtype == q.dtype and y.shape == q.shape
    assert_near(y, exact)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_kernel_is_plain_path(data):
    bits = st.sampled_from((8, 8, 16))
    layout = st.sampled_from(SERVED_LAYOUTS)
    axis, dtype = st.sampled_from(("d", "hd")), st.sampled_from((torch.bfloat16, torch.float32))
    spec = CacheSpec(*map(data.draw, (bits, bits, axis, layout, layout, dtype)))
    start = data.draw(st.lists(st.integers(0, 700), min_size=1, max_size=3))
    heads, group, dim = st.integers(1, 4), st.integers(1, 9), st.sampled_from(range(16, 129, 16))
    tokens, level = st.sampled_from((1, 1, 2, 3, 7, 32)), st.sampled_from((0, 1, 2))
    check(spec, *map(data.draw, (heads, group, dim)), start, *map(data.draw, (tokens, level)))


@pytest.mark.parametrize("kind", ("int8", "int4", "k8v4"))
def test_float16_goes_through_the_kernels(kind):
    caches = pair(CacheSpec.parse(kind, dtype=torch.float16), 2, 2, 400, 64)
    position = fill(caches, [300, 40], 3)
    q = torch.randn(2, 6, 3, 64).half()
    k, v = torch.randn(2, 2, 2, 3, 64).half()
    both = [cache.write_and_attend(position, q, k, v) if isinstance(cache, CpuKVCache) else
            (cache.write(position, k, v), cache.attend(q, position))[1] for cache in caches]
    assert caches[0]._serves_attend(q) and both[0].dtype == torch.float16
    if kind == "int8":
        assert torch.equal(caches[0].k_values[0, :, :303], caches[1].k_values[0, :, :303])
    torch.testing.assert_close(*both, rtol=2 ** -8, atol=2 ** -8 * both[1].abs().max().item())


@pytest.mark.parametrize("level", (0, 1, 2))
@pytest.mark.parametrize("bits", (8, 16))
def test_edges_of_tiles_and_parts(level, bits):
    for filled in (1, 7, 8, 9, 255, 256, 257, 4096, 4097, 8191, 8705):
        check(CacheSpec(bits, bits), 1, 3, 64, [filled - 1], 1, level)
    check(CacheSpec(bits, bits, dtype=torch.float32), 2, 2, 512, [300], 1, level)


@pytest.mark.parametrize("level", (0, 1, 2))
@pytest.mark.parametrize("axis", ("d", "hd"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("bits", ((8, 16), (16, 8)))
def test_write_is_plain_quantizer_bit_for_bit(level, axis, dtype, bits):
    spec = CacheSpec(*bits, axis, "sbhd", "bhds", dtype)
    caches = pair(spec, 2, 3, 400, 48, level)
    x = torch.randn(2, 300, 3, 48).transpose(1, 2)  # the strides of a fused projection
    x[0, 1, 5] = 0
    x[:, :, 7] = x[:, :, 7].sign() * torch.linspace(0, 127, 48) * 2 ** -7  # ties: round half to even
    x[1, 2] *= 1e-12
    x[1, 0] *= 1e6
    for cache in caches:
        cache.write(torch.tensor([0, 99]), x.to(dtype), x.to(dtype))
    for name in BUFFERS:
        ours, plain = (getattr(cache, name) for cache in caches)
        assert plain is None or torch.equal(ours.nan_to_num(7.0), plain.nan_to_num(7.0)), name


def test_any_strides_of_input():
    caches = pair(CacheSpec(8, 8), 2, 2, 64, 32)
    position = fill(caches, [3, 40], 2)
    q = torch.randn(2, 32, 2, 4).permute(0, 3, 2, 1).to(torch.bfloat16)  # [2, 4, 2, 32], D stride is not 1
    assert q.stride(3) != 1
    assert torch.equal(caches[0].attend(q, position), caches[0].attend(q.contiguous(), position))


def test_largest_integers_do_not_overflow():
    for level in (0, 1, 2):
        cache, plain = pair(CacheSpec(8, 8, dtype=torch.float32), 1, 1, 600, 512, level)
        ones = torch.ones(1, 1, 600, 512)
        for c in (cache, plain):
            c.write(torch.tensor([0]), ones, -ones)
        q = torch.full((1, 1, 1, 512), 3.0)
        y = cache.attend(q, torch.tensor([599]))
        torch.testing.assert_close(y, -torch.ones(1, 1, 1, 512), rtol=2e-3, atol=0)


def test_what_is_not_served_takes_the_plain_path():
    caches = pair(CacheSpec(8, 8, "d", "bhds", "bhsd"), 1, 2, 200, 32)
    position = fill(caches, [100], 1)
    q = torch.randn(1, 4, 1, 32, dtype=torch.bfloat16)
    ours, plain = (cache.attend(q, position) for cache in caches)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("kind", ["int8", "int4", None])
def test_a_long_chunk_equals_the_plain_path(kind):
    caches = pair(CacheSpec.parse(kind), 2, 2, 300, 64)
    position = fill(caches, [100, 3], 90)
    caches[0].k_values.copy_(caches[1].k_values), caches[0].v_values.copy_(caches[1].v_values)
    q = torch.randn(2, 6, 90, 64, dtype=torch.bfloat16)
    assert_near(caches[0].attend(q, position), caches[1].attend(q.float(), position))


def test_tokens_past_the_cache_are_refused():
    cache, _ = pair(CacheSpec(8, 8), 1, 1, 16, 32)
    k = torch.zeros(1, 1, 1, 32)
    for start in (-1, 16):
        with pytest.raises(RuntimeError, match="do not fit in a cache of 16 slots"):
            cache.write(torch.tensor([start]), k, k)


def test_threads_do_not_change_the_result():
    before = torch.get_num_threads()
    caches = pair(CacheSpec(8, 16), 2, 3, 6000, 64)
    position = fill(caches, [5990, 1000], 1)
    q = torch.randn(2, 9, 1, 64, dtype=torch.bfloat16)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(caches[0].attend(q, position))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


class Layer(nn.Module):
    """Write and attend, as a model's attention does it: by one operator, or by two."""

    def __init__(self, cache: KVCache, together: bool) -> None:
        super().__init__()
        self.cache, self.together = cache, together

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (-1, self.cache.head_dim)).transpose(1, 2)  # [B, heads, T, D]
        q, k, v = x.split((4, 2, 2), dim=1)
        q = q * 1.5
        if self.together:
            return self.cache.write_and_attend(start, q, k, v).transpose(1, 2).flatten(2)
        self.cache.write(start, k, v)
        return self.cache.attend(q, start).transpose(1, 2).flatten(2)


def assert_same_stored(*layers: Layer) -> None:
    for name in BUFFERS:
        a, b = (getattr(layer.cache, name) for layer in layers)
        assert a is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), name


@pytest.mark.parametrize("together", (False, True))
def test_compiled_is_eager_and_one_graph_serves_all_positions(together):
    torch._dynamo.reset()
    layers = [Layer(pair(CacheSpec(8, 8), 2, 2, 64, 32)[0], together and not i) for i in range(2)]
    compiled = torch.compile(layers[0], fullgraph=True, options=vector_options())
    with torch.inference_mode():
        for t in range(20):
            x, start = torch.randn(2, 1, 256, dtype=torch.bfloat16), torch.tensor([t, 2 * t])
            with torch.compiler.set_stance("fail_on_recompile" if t else "default"):
                ours = compiled(x, start)
            torch.testing.assert_close(ours, layers[1](x, start), rtol=2 ** -7, atol=2 ** -7)
    assert_same_stored(*layers)


@pytest.mark.parametrize("kind,axis,layout", [
    ("int8", "d", "bhsd"), ("int8", "hd", "sbhd"), ("int8", "d", "bhds"), ("16,8", "hd", "bshd"),
    ("8,16", "d", "bhsd"), ("int4", "d", "bhsd"), ("4,16", "d", "sbhd")])
@pytest.mark.parametrize("D", (32, 64))
def test_write_and_attend_is_both_bit_for_bit(kind, axis, layout, D):
    caches = [pair(CacheSpec.parse(kind, axis, layout), 2, 2, 400, D)[0] for _ in range(2)]
    layers = [Layer(cache, together) for cache, together in zip(caches, (True, False), strict=True)]
    for tokens, start in ((300, [0, 0]), (1, [300, 17]), (40, [301, 18])):
        x, start = torch.randn(2, tokens, 8 * D, dtype=torch.bfloat16), torch.tensor(start)
        ours, both = (layer(x, start) for layer in layers)
        assert torch.equal(ours, both) and ours.isfinite().all()
    assert_same_stored(*layers)


def test_without_kernels_the_cache_is_the_plain_one(monkeypatch):
    monkeypatch.setattr(attention_cpu, "available", lambda: False)
    caches = pair(CacheSpec(8, 8), 1, 2, 200, 32)
    position = fill(caches, [100], 1)
    q = torch.randn(1, 4, 1, 32, dtype=torch.bfloat16)
    ours, plain = (cache.attend(q, position) for cache in caches)
    assert torch.equal(ours, plain)


def test_without_a_compiler_the_reason_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = attention_cpu.load.__wrapped__()
    assert "no-such-compiler" in reason and "plain PyTorch path" in reason and "\n" not in reason


@pytest.mark.parametrize("kind,strong", [
    ("int4", "8,8"), ("int4", "0,0"), ("int4", "16,8"), ("k8v4", "8,8"), ("4,16", "8,8")])
@pytest.mark.parametrize("D,dtype", [(32, torch.float32), (64, torch.bfloat16), (80, torch.float32),
                                     (128, torch.bfloat16)])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_four_bits_equal_the_plain_path(kind, strong, D, dtype, level):
    torch.manual_seed(0)
    spec = CacheSpec.parse(kind, strong=strong, dtype=dtype)
    fast, plain = CpuKVCache(spec, 2, 2, 300, D), KVCache(spec, 2, 2, 300, D)
    fast.level = level
    k, v = (torch.randn(2, 2, 280, D) + torch.randn(D) * 2).to(dtype), torch.randn(2, 2, 280, D).to(dtype)
    for cache in (fast, plain):
        cache.write(torch.tensor([0, 0]), k, v)
    for name in BUFFERS:
        ours, theirs = getattr(fast, name), getattr(plain, name)
        if ours is not None:  # sums in another order may move a scale by its last bit, and a code with it
            assert (ours != theirs).float().mean() < 0.003
            ours.copy_(theirs)
    for T, start in ((1, [279, 100]), (5, [270, 33])):
        q, start = torch.randn(2, 6, T, D).to(dtype), torch.tensor(start)
        assert_near(fast.attend(q, start), KVCache.attend(plain, q.float(), start))


@pytest.mark.parametrize("level", (1, 2))
@pytest.mark.parametrize("D", (64, 192, 256))
@pytest.mark.parametrize("group", (1, 2, 5))
def test_four_bits_of_any_width_and_group(D, group, level):
    torch.manual_seed(D + group)
    fast, plain = pair(CacheSpec.parse("int4"), 1, 2, 300, D, level)
    position = fill((fast, plain), [266], 1)
    for name in BUFFERS:
        getattr(fast, name).copy_(getattr(plain, name))
    for tokens in (1, 3):
        q, start = torch.randn(1, 2 * group, tokens, D).bfloat16(), position + 1 - tokens
        assert_near(fast.attend(q, start), KVCache.attend(plain, q.float(), start))


def check_packed(spec: CacheSpec, heads: int, group: int, dim: int, start: list[int], tokens: int,
                 level: int) -> None:
    """As `check`, from the plain quantizer's bits: sums in another order may move one of the kernel's."""
    fast, plain = pair(spec, len(start), heads, max(start) + tokens, dim, level)
    position = fill((fast, plain), start, tokens)
    for name in BUFFERS:
        if getattr(fast, name) is not None:
            getattr(fast, name).copy_(getattr(plain, name))
    q = torch.randn(len(start), heads * group, tokens, dim).to(spec.dtype)
    assert_near(fast.attend(q, position), KVCache.attend(plain, q.float(), position))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_four_bits_are_the_plain_path(data):
    counts, dtype = st.sampled_from((0, 8, 16)), st.sampled_from((torch.bfloat16, torch.float32))
    kind, layout = st.sampled_from(("int4", "int4", "k8v4", "4,8", "4,16")), st.sampled_from(SERVED_LAYOUTS)
    strong = f"{data.draw(counts)},{data.draw(counts)}"
    spec = CacheSpec.parse(data.draw(kind), "d", data.draw(layout), data.draw(dtype), strong)
    start = data.draw(st.lists(st.integers(0, 600), min_size=1, max_size=2))
    heads, group, dim = st.integers(1, 3), st.integers(1, 5), st.sampled_from(range(16, 257, 16))
    tokens, level = st.sampled_from((1, 1, 2, 5)), st.sampled_from((0, 1, 1, 2))
    check_packed(spec, *map(data.draw, (heads, group, dim)), start, *map(data.draw, (tokens, level)))


@pytest.mark.parametrize("kind", ("int8", "int4"))
@pytest.mark.parametrize("D", (64, 80, 128))
@pytest.mark.parametrize("level", (1, 2))
def test_tails_of_tiles(kind, D, level):
    for filled in (1, 2, 3, 5, 6, 7, 8, 9, 11, 15, 17, 511, 512, 513, 514, 515, 519):
        check_packed(CacheSpec.parse(kind), 1, 3, D, [filled - 1], 1, level)


def test_shapes_that_do_not_belong_together_are_refused():
    cache, _ = pair(CacheSpec(8, 8), 1, 2, 16, 32)
    k = torch.zeros(1, 2, 3, 32)
    for bad in (lambda: cache.write(torch.tensor([0]), k, k[:, :, :2]),
                lambda: cache.write_and_attend(torch.tensor([0]), k[:, :, :2], k, k)):
        with pytest.raises(RuntimeError, match="attention_cpu"):
            bad()


def test_caches_share_pages_and_no_storage():
    zeros = CpuKVCache.allocator()  # views of one storage would be aliases to torch.compile
    first, second = zeros([3, 64], dtype=torch.int8), zeros([5], dtype=torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == 192
    assert first.untyped_storage().nbytes() == 192 and second.untyped_storage().nbytes() == 10
    assert not first.any() and not second.any()
