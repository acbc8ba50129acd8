"""The Triton kernels and the CUDA prefill against the plain path of kv_cache.py.

Kernel tests run on a CUDA device where there is one, otherwise in Triton's interpreter, which must be on
before triton is imported: test_kernels_in_the_interpreter runs them in a process of its own.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import attention_cuda
from attention_cuda import TritonKVCache, decode, n_splits_for, prefill
from kv_cache import CacheSpec, KVCache, attend_blocks, quantize

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_CUDA = torch.cuda.is_available() and not IS_INTERPRETED
DEVICE = "cuda" if HAS_CUDA else "cpu"
on_kernels = pytest.mark.skipif(
    not (HAS_CUDA or IS_INTERPRETED),
    reason="no CUDA device; test_kernels_in_the_interpreter runs it in a process of its own")
on_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
on_compiler = pytest.mark.skipif(IS_INTERPRETED or attention_cuda.triton is None,
                                 reason="needs triton, outside its interpreter")
ROOT = Path(__file__).parents[1]
# A float32 query makes both ways exact but for the order of sums; in 16 bits, roundings of q * k and of
# probabilities differ, each of 2^-9 of values near 1.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 2e-2}


def cached(cache: KVCache) -> tuple:
    return cache.k_values, cache.k_scales, cache.v_values, cache.v_scales


def filled_cache(spec: CacheSpec, B: int, H: int, S: int, D: int, filled: list[int]) -> KVCache:
    """A cache whose row b holds filled[b] random tokens and, past them, what must never matter."""
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(spec, B, H, S, D)
    k, v = (torch.randn(B, H, S, D, generator=generator).to(spec.dtype) for _ in range(2))
    cache.write(torch.zeros(B, dtype=torch.int64), k * 1.5, v)
    for b, n in enumerate(filled):
        for values, scales in ((cache.k_values, cache.k_scales), (cache.v_values, cache.v_scales)):
            values[b, :, n:] = torch.nan if values.is_floating_point() else 127
            if scales is not None:
                scales[b, :, n:] = torch.nan
    return cache.to(DEVICE)


def check_decode(spec: CacheSpec, B: int, H: int, G: int, D: int, T: int, starts: list[int], S: int,
                 dtype: torch.dtype = torch.float32) -> None:
    cache = filled_cache(spec, B, H, S, D, [s + T for s in starts])
    start = torch.tensor(starts, device=DEVICE)
    q = torch.randn(B, T, H * G, D, device=DEVICE).to(dtype).transpose(1, 2)
    expected = attend_blocks(q, start, *cached(cache), block=50)
    torch.testing.assert_close(decode(q, start, *cached(cache)), expected, rtol=0, atol=TOLERANCE[dtype])


@on_kernels
@pytest.mark.parametrize("D", [80, 128])
@pytest.mark.parametrize("axis", ["d", "hd"])
def test_kernel_decode_equals_plain(D, axis):
    check_decode(CacheSpec(8, 8, axis, dtype=torch.float32), 2, 2, 3, D, 1, [0, 130], 150)


@on_kernels
@pytest.mark.parametrize(("bits", "strong", "D"), [
    ((4, 4), (8, 8), 32), ((4, 4), (8, 0), 64), ((8, 4), (0, 8), 80), ((4, 16), (16, 0), 96),
    ((4, 4), (0, 8), 128), ((4, 8), (2, 0), 16), ((16, 16), (0, 0), 64), ((16, 8), (0, 0), 64)])
def test_kernel_decode_serves_bits(bits, strong, D):
    spec = CacheSpec(*bits, "d", "bhsd", "bshd", torch.float32, *strong)
    check_decode(spec, 2, 2, 3, D, 1, [0, 130], 150)
    check_decode(spec, 1, 1, 2, D, 3, [40], 60)


@on_kernels
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "hbsd", "hsbd", "sbhd", "shbd"])
def test_kernel_decode_serves_layouts(layout):
    check_decode(CacheSpec.parse("int8", "d", f"{layout},bshd", torch.float32), 2, 2, 1, 32, 1, [40, 3], 64)


@on_kernels
@pytest.mark.parametrize(("starts", "T", "G"),
                         [([0], 1, 1), ([0, 0], 9, 2), ([63, 64], 1, 4), ([0, 139], 12, 5)])
def test_kernel_decode_sees_no_later_token(starts, T, G):
    """Several tokens, of which the last share of the slots may show a row nothing."""
    check_decode(CacheSpec(8, 8, dtype=torch.float32), len(starts), 1, G, 32, T, starts, 151)


@on_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_kernel_decode_in_16_bits(dtype, bits):
    check_decode(CacheSpec(bits, bits, dtype=dtype), 1, 2, 4, 128, 1, [90], 100, dtype)


@on_kernels
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(B=st.integers(1, 2), H=st.integers(1, 3), G=st.integers(1, 5), D=st.integers(1, 8),
       T=st.integers(1, 4), bits=st.sampled_from([(8, 8), (8, 16), (16, 8), (16, 16), (4, 4), (8, 4)]),
       axis=st.sampled_from(["d", "hd"]), starts=st.tuples(*2 * [st.integers(0, 120)]),
       spare=st.integers(0, 9))
def test_kernel_decode_equals_plain_anywhere(B, H, G, D, T, bits, axis, starts, spare):
    starts = list(starts[:B])
    spec = CacheSpec(*bits, "d" if 4 in bits else axis, dtype=torch.float32)
    check_decode(spec, B, H, G, 16 * D, T, starts, max(starts) + T + spare)


def tokens_to_write(B: int, H: int, T: int, D: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, H, T, D] with a token of ties, one of zeros, one below the smallest scale, and sizes far apart."""
    x = torch.randn(B, T, H, D).transpose(1, 2).to(dtype) * torch.logspace(-3, 3, T, dtype=dtype)[:, None]
    x[:, :, 0] = (torch.arange(D) % 200 - 99.5) * 0.125
    x[:, :, 0, 0] = -127 * 0.125  # makes the scale 0.125 and the rest of the row ties
    if T > 2:
        x[:, :, 1] = 0
        x[:, :, 2] *= 1e-12
    return x


@on_kernels
@pytest.mark.parametrize("axis", ["d", "hd"])
@pytest.mark.parametrize(("T", "H", "D", "dtype"), [(1, 3, 80, torch.float32), (30, 2, 128, torch.bfloat16),
                                                    (5, 1, 96, torch.float16), (7, 4, 16, torch.bfloat16)])
def test_kernel_write_is_bit_equal_to_plain(axis, T, H, D, dtype):
    spec = CacheSpec(8, 8, axis, "bshd", "bhsd", dtype)
    start = torch.tensor([2, 9])
    k, v = tokens_to_write(2, H, T, D, dtype), torch.randn(2, H, T, D).to(dtype)
    plain, fast = KVCache(spec, 2, H, 40, D), TritonKVCache(spec, 2, H, 40, D, DEVICE)
    plain.write(start, k, v)
    fast.write(start.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
    for expected, got in zip(cached(plain), cached(fast), strict=True):
        assert torch.equal(expected, got.cpu())  # untouched slots included


@on_kernels
@pytest.mark.parametrize(("strong", "T", "H", "D"),
                         [((8, 0), 30, 2, 64), ((0, 16), 7, 3, 80), ((8, 8), 1, 1, 128)])
def test_kernel_write_of_4_bits_is_plain(strong, T, H, D):
    """Apart from sums in another order, which may choose another scale; then that row differs."""
    spec = CacheSpec(4, 4, "d", "bshd", "bhsd", torch.float32, *strong)
    start = torch.tensor([2, 9])
    k, v = tokens_to_write(2, H, T, D, torch.float32), torch.randn(2, H, T, D)
    plain, fast = KVCache(spec, 2, H, 40, D), TritonKVCache(spec, 2, H, 40, D, DEVICE)
    plain._store(start, k, v)
    fast._store(start.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
    for name in ("k", "v"):
        values, scales = (getattr(fast, f"{name}_{what}").cpu() for what in ("values", "scales"))
        plain_values, plain_scales = getattr(plain, f"{name}_values"), getattr(plain, f"{name}_scales")
        same = scales == plain_scales
        assert (~same).sum() <= 2
        torch.testing.assert_close(scales, plain_scales, rtol=0.1, atol=0)
        assert torch.equal(values[same], plain_values[same])


@on_kernels
def test_kernel_write_mixes_bits_and_drops_what_lies_outside():
    spec = CacheSpec(8, 16, "hd", dtype=torch.bfloat16)
    plain, fast = KVCache(spec, 2, 3, 8, 32), TritonKVCache(spec, 2, 3, 8, 32, DEVICE)
    k, v = torch.randn(2, 2, 3, 3, 32).to(torch.bfloat16)
    plain.write(torch.tensor([0, 5]), k, v)
    fast.write(torch.tensor([0, 5], device=DEVICE), k.to(DEVICE), v.to(DEVICE))
    fast.write(torch.tensor([8, 1000], device=DEVICE), k.to(DEVICE), v.to(DEVICE))
    for expected, got in zip(cached(plain), cached(fast), strict=True):
        assert (expected is None and got is None) or torch.equal(expected, got.cpu())


@on_kernels
def test_kernel_cache_is_the_plain_cache_through_chunks_and_steps():
    """TritonKVCache end to end: a chunk, then tokens one by one; a D stride other than 1 is not served."""
    dtype = torch.bfloat16 if HAS_CUDA else torch.float32
    for kind, layout in (("int8", "bhsd"), ("int8", "bhds"), ("int4", "bshd")):
        spec = CacheSpec.parse(kind, "d", layout, dtype)
        caches = KVCache(spec, 1, 2, 80, 32, DEVICE), TritonKVCache(spec, 1, 2, 80, 32, DEVICE)
        for first, T in ((0, 40), (40, 30), (70, 1), (71, 1)):
            start = torch.tensor([first], device=DEVICE)
            q, k, v = (torch.randn(1, h, T, 32, device=DEVICE).to(dtype) for h in (6, 2, 2))
            for cache in caches:
                cache.write(start, k, v)
            for name in ("k_values", "v_values", "k_scales", "v_scales"):
                stored, other = (getattr(cache, name) for cache in caches)
                assert (stored != other).float().mean() < 0.01  # a value between two levels may go either way
                other.copy_(stored)
            expected, got = (cache.attend(q, start) for cache in caches)
            torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])


@on_kernels
def test_kernel_step_compiles_to_one_graph_for_all_positions():
    spec = CacheSpec(8, 8, dtype=torch.float32)
    plain, fast = KVCache(spec, 1, 1, 70, 16, DEVICE), TritonKVCache(spec, 1, 1, 70, 16, DEVICE)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    @torch.compile(backend=backend, fullgraph=True)
    def step(q, k, v, start):
        fast.write(start, k, v)
        return fast.attend(q, start)

    for position in (0, 1, 65):
        start = torch.tensor([position], device=DEVICE)
        q, k, v = (torch.randn(1, h, 1, 16, device=DEVICE) for h in (2, 1, 1))
        plain.write(start, k, v)
        torch.testing.assert_close(step(q, k, v, start), plain.attend(q, start), rtol=0, atol=2e-5)
    assert len(graphs) == 1


@on_kernels
def test_kernel_ops_tell_the_truth_about_themselves():
    cache = filled_cache(CacheSpec(8, 8), 1, 1, 20, 16, [10])
    start = torch.tensor([9], device=DEVICE)
    q = torch.randn(1, 1, 2, 16, device=DEVICE).to(torch.bfloat16).transpose(1, 2)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(attention_cuda.triton_decode, (q, start, *cached(cache)), test_utils=checks)
    torch.library.opcheck(attention_cuda.flash_prefill, (q, start, *cached(cache)), test_utils=checks)
    new = torch.randn(1, 1, 1, 16, device=DEVICE)
    torch.library.opcheck(attention_cuda.triton_write, (*cached(cache), start, new, new), test_utils=checks)


@on_compiler
def test_kernels_in_the_interpreter():
    options = ["-x", "-p", "no:cacheprovider", "-o", "addopts=", "-k", "test_kernel_"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    counts = run.stdout.splitlines()[-1]
    assert re.search(r"[3-9]\d passed", counts) and "skipped" not in counts, counts


@pytest.mark.parametrize("layout", ["bhsd", "bhds", "sdbh"])
@pytest.mark.parametrize(("bits", "axis"), [(8, "d"), (8, "hd"), (16, "d"), (4, "d")])
def test_prefill_equals_plain(bits, axis, layout):
    dtype = torch.bfloat16 if HAS_CUDA else torch.float32
    spec = CacheSpec(bits, bits, axis, layout, "bshd", dtype)
    for starts in ([0, 0], [100, 100], [0, 77]):
        cache = filled_cache(spec, 2, 2, 160, 32, [s + 40 for s in starts])
        start = torch.tensor(starts, device=DEVICE)
        q = torch.randn(2, 40, 6, 32, device=DEVICE).to(dtype).transpose(1, 2)
        expected = attend_blocks(q, start, *cached(cache))
        for block in (4096, 33):
            got = prefill(q, start, *cached(cache), block)
            assert got.is_contiguous()
            torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])


def test_prefill_in_16_bits_and_without_groups():
    for dtype in (torch.bfloat16, torch.float16):
        cache = filled_cache(CacheSpec(8, 8, dtype=dtype), 1, 3, 90, 64, [90])
        start = torch.tensor([70], device=DEVICE)
        q = torch.randn(1, 3, 20, 64, device=DEVICE).to(dtype)
        expected = attend_blocks(q, start, *cached(cache))
        got = prefill(q, start, *cached(cache), 32)
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that an op made."""
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


def test_prefill_holds_no_more_when_the_past_grows():
    largest = []
    for past in (256, 2048):
        cache = filled_cache(CacheSpec(8, 8), 1, 2, past + 16, 32, [past + 16])
        q = torch.randn(1, 8, 16, 32, device=DEVICE).to(torch.bfloat16)
        with LargestTensor() as watched:
            prefill(q, torch.tensor([past], device=DEVICE), *cached(cache), 128)
        largest.append(watched.largest)
    assert largest[0] == largest[1] <= 2 * 128 * 32 * 4


def test_splits_give_every_multiprocessor_work_and_no_split_too_little():
    assert n_splits_for(132, 8, 131072, 64) == 66  # 528 programs: four for each
    assert n_splits_for(132, 8, 256, 64) == 4  # a split has at least a block of the allocated slots
    assert n_splits_for(132, 8 * 512, 131072, 64) == 1
    assert n_splits_for(132, 1, 131072, 64) <= 128


def test_available_names_what_is_missing(monkeypatch):
    if not (HAS_CUDA or IS_INTERPRETED):
        assert "need a CUDA device" in attention_cuda.available("cuda")
        assert "need a CUDA device" in attention_cuda.available("cpu")
    monkeypatch.setattr(attention_cuda, "triton", None)
    assert "pip install triton" in attention_cuda.available()


def test_imports_and_attends_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch, attention_cuda, kv_cache
print(attention_cuda.available())
cache = attention_cuda.TritonKVCache(kv_cache.CacheSpec(8, 8), 1, 1, 8, 16)
x = torch.ones(1, 1, 1, 16)
cache.write(torch.tensor([0]), x, x)
print(bool((cache.attend(x, torch.tensor([0])) - x).abs().max() < 0.01))
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "triton is not installed (pip install triton)\nTrue\n", run.stderr


@on_cuda
@pytest.mark.parametrize("axis", ["d", "hd"])
def test_cuda_decode_at_length(axis):
    for dtype in (torch.bfloat16, torch.float16):
        check_decode(CacheSpec(8, 8, axis, dtype=dtype), 2, 8, 4, 128, 1, [8000, 131], 8192, dtype)
        check_decode(CacheSpec(16, 16, dtype=dtype), 1, 3, 3, 64, 4, [3001], 4096, dtype)
        check_decode(CacheSpec(4, 4, dtype=dtype), 2, 8, 4, 128, 1, [8000, 131], 8192, dtype)


@on_cuda
@pytest.mark.parametrize("bits", [8, 4])
def test_cuda_graph_replays_at_every_position_without_synchronizing(bits):
    B, H, G, D, S = 2, 4, 3, 64, 600
    spec = CacheSpec(bits, bits, dtype=torch.bfloat16)
    plain, fast = (cls(spec, B, H, S, D, "cuda") for cls in (KVCache, TritonKVCache))
    q, k, v = (torch.randn(B, h, 1, D, device="cuda", dtype=torch.bfloat16) for h in (H * G, H, H))
    start = torch.zeros(B, dtype=torch.int64, device="cuda")

    def step():
        fast.write(start, k, v)
        return fast.attend(q, start)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    past = [torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for cache in (plain, fast):
        KVCache.write(cache, torch.zeros_like(start), *past)
    for position in (0, 1, 63, 64, 500, 599):
        for x in (q, k, v):
            x.normal_()
        start.fill_(position)
        graph.replay()
        for name in attention_cuda.CACHED:  # torch divides by multiplying on CUDA, so plain.write may differ
            getattr(plain, name).copy_(getattr(fast, name))
        torch.testing.assert_close(out, plain.attend(q, start), rtol=0, atol=TOLERANCE[torch.bfloat16])


@on_cuda
def test_cuda_quantizer_is_the_cpu_quantizer():
    x = torch.randn(1, 8, 4096, 128).to(torch.bfloat16)
    cache = TritonKVCache(CacheSpec(8, 8), 1, 8, 4096, 128, "cuda")
    cache.write(torch.zeros(1, dtype=torch.int64, device="cuda"), x.cuda(), x.cuda())
    values, scales = quantize(x, "d")
    assert torch.equal(cache.k_values.cpu(), values) and torch.equal(cache.k_scales.cpu(), scales)
