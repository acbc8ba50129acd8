"""The C++ quantized linear layers against plain matrix products with the dequantized weights."""
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import linear_cpu
from cpu_extension import X86, HugePages, Unit, build_and_load, find_compiler
from linear_cpu import CpuInt4Linear, CpuInt8Linear, LinearFactory, widen
from quantize import _quantize_rows, _unpair, linear, pack

SERVED = X86 and find_compiler() and torch.backends.cpu.get_cpu_capability().startswith("AVX")
assert not SERVED or linear_cpu.load() == ""
pytestmark = pytest.mark.skipif(not SERVED, reason=linear_cpu.load() or "-")
PANELS = [None] if linear_cpu.load() else sorted({8, torch.ops.gpt_long_cpu_linear.panel()})
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 4e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """One seed; one thread, for the references of a few rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def dequantized(tensors: dict[str, Tensor]) -> Tensor:
    """The weight [N, K], float64, that packed tensors stand for."""
    if "scales" in tensors:
        return tensors["weight"].double() * tensors["scales"].double()[:, None]
    scale, zero = tensors["scales_and_zeros"].double().permute(2, 1, 0)[..., None]  # [N, K/G, 1]
    nibbles = _unpair(tensors["weight"]).double().view(*scale.shape[:2], -1)
    return ((nibbles - 8) * scale + zero).flatten(1)


def relative_error(y: Tensor, expected: Tensor) -> float:
    return ((y.double() - expected).norm() / expected.norm()).item()


def uneven(M: int, K: int) -> Tensor:
    """Activations as models have them: a few inputs a hundred times larger than the others."""
    return torch.randn(M, K) * torch.where(torch.rand(K) < 0.01, 100.0, 1.0)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("scheme", ["int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256", "int8wo"])
@pytest.mark.parametrize("N", [64, 40, 8, 3, 50])
def test_every_number_of_rows(scheme: str, N: int, panel: int) -> None:
    tensors = pack(torch.randn(N, 512) + 0.3, scheme)
    layer, weight = _cpu(tensors, panel=panel), dequantized(tensors)
    for M in [1, 2, 3, 5, 7, 8, 15, 17]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = uneven(M, 512).to(dtype)
            y = layer(x)
            assert y.shape == (M, N) and y.dtype == dtype
            assert relative_error(y, x.double() @ weight.t()) < TOLERANCE[dtype]


def _cpu(tensors: dict[str, Tensor], bias: Tensor | None = None, panel: int | None = None,
         dynamic: bool = False) -> nn.Module:
    if "scales" in tensors:
        return CpuInt8Linear(*tensors.values(), bias, dynamic, panel)
    return CpuInt4Linear(*tensors.values(), bias, panel)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("K", [32, 96, 576, 1536])
@pytest.mark.parametrize("scheme", ["int4wo-256", "int8wo"])
def test_every_input_size(scheme: str, K: int, panel: int) -> None:
    tensors = pack(torch.randn(72, K), scheme)
    x, layer = torch.randn(5, K), _cpu(tensors, panel=panel)
    assert relative_error(layer(x), x.double() @ dequantized(tensors).t()) < TOLERANCE[x.dtype]


WIDTHS = range(1, 301)  # every one as inputs and as outputs


@pytest.mark.parametrize("family", ["torch", *PANELS])
@pytest.mark.parametrize("scheme", ["int8wo", "int8dq", "int4wo-32"])
def test_every_width(scheme: str, family: str | int) -> None:
    for N in WIDTHS:
        K = 301 - N if scheme != "int4wo-32" else 32 + 32 * (N % 9)
        tensors = pack(torch.randn(N, K), scheme)
        plain = linear(tensors, scheme)
        layer = plain if family == "torch" else _cpu(tensors, None, family, scheme == "int8dq")
        weight = dequantized(tensors)
        for M, dtype in ((1, torch.bfloat16), (3, torch.float32), (33, torch.bfloat16), (2, torch.float16)):
            x = torch.randn(M, K).to(dtype)
            if scheme == "int8dq":
                rows, step = _quantize_rows(x)
                expected = rows.double() @ weight.t() * step.double()
            else:
                expected = x.double() @ weight.t()
            size = x.double().norm(dim=-1)[:, None] * weight.norm(dim=-1)  # of what is added up
            error = ((layer(x).double() - expected).abs() / size).max()
            assert error < (2e-2 if family == "torch" else 8e-3), (N, K, M)  # torch rounds to bfloat16 twice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_width_of_16_bits(dtype: torch.dtype) -> None:
    for N in WIDTHS:
        K = 301 - N
        layer = nn.Linear(K, N, bias=N % 2 == 0, dtype=dtype).requires_grad_(False)
        widen(layer)
        for M in (1, 2, 3, 4, 5, 16):
            x = torch.randn(M, K).to(dtype)
            exact = (x.double() @ layer.weight.double().t()).to(dtype)
            exact = exact if layer.bias is None else exact + layer.bias
            torch.testing.assert_close(layer(x), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
            rows = torch.cat([layer(row[None]) for row in x])
            assert torch.equal(layer(x), rows)  # a row does not depend on its company


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("scheme", ["int4wo-256", "int8wo"])
def test_largest_integers_do_not_overflow(scheme: str, panel: int) -> None:
    tensors = pack(torch.randn(8, 512), scheme)
    tensors["weight"].fill_(255 if scheme != "int8wo" else -128)
    for sign in (1, -1):
        x = torch.full((1, 512), 3.0 * sign)
        assert relative_error(_cpu(tensors, panel=panel)(x), x.double() @ dequantized(tensors).t()) < 1e-4


@pytest.mark.parametrize("panel", PANELS)
def test_zero_and_not_finite_rows(panel: int) -> None:
    layer = _cpu(pack(torch.randn(16, 128), "int4wo-64"), panel=panel)
    x = torch.zeros(3, 128)
    x[1, 5], x[2, 7] = float("nan"), 1e-38
    y = layer(x)
    assert y[0].eq(0).all() and y[1].isnan().all() and y[2].abs().max() < 1e-30
    assert layer(x.bfloat16())[1].isnan().all()


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("scheme", ["int4wo-64", "int8wo"])
def test_threads_and_batches_give_the_same_bits(scheme: str, panel: int) -> None:
    layer = _cpu(pack(torch.randn(600, 512), scheme), panel=panel)
    x = torch.randn(20, 512)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(layer(x))
    assert torch.equal(*results)
    assert torch.equal(results[0], torch.cat([layer(row[None]) for row in x]))


def test_shapes_strides_and_bias() -> None:
    tensors, bias = pack(torch.randn(24, 64), "int4wo-32"), torch.randn(24)
    layer, weight = _cpu(tensors, bias), dequantized(tensors)
    x = torch.randn(2, 64, 3).transpose(1, 2)
    expected = x.double() @ weight.t() + bias
    assert relative_error(layer(x), expected) < 1e-4
    assert layer(x[:, :0]).shape == (2, 0, 24)
    assert layer(x[0, 0]).shape == (24,)


@pytest.mark.parametrize("scheme", ["int4wo-32", "int8wo", "int8dq"])
@pytest.mark.parametrize("N, K", [(96, 64), (41, 96), (1500, 4096)])
def test_the_factory_makes_what_quantize_does(scheme: str, N: int, K: int) -> None:
    tensors, bias, x = pack(torch.randn(N, K), scheme), torch.randn(N), torch.randn(3, K)
    new, old = LinearFactory()(tensors, scheme, bias), linear(tensors, scheme, bias)
    assert type(new) in (CpuInt4Linear, CpuInt8Linear)
    assert relative_error(new(x), old(x).double()) < TOLERANCE[torch.float32]


def test_compiled_is_eager() -> None:
    layer = _cpu(pack(torch.randn(24, 64), "int4wo-32"), torch.randn(24))
    both = nn.Sequential(layer, _cpu(pack(torch.randn(16, 24), "int8wo")))
    wide = nn.Linear(64, 24, dtype=torch.bfloat16).requires_grad_(False)
    widen(wide)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(wide, fullgraph=True, backend="aot_eager")(x), wide(x))
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for M in (1, 5):
        x = torch.randn(M, 64)
        torch.testing.assert_close(compiled(x), both(x))


def test_operators_are_well_formed() -> None:
    layer, x = _cpu(pack(torch.randn(24, 64), "int4wo-32")), torch.randn(2, 64)
    eight = _cpu(pack(torch.randn(24, 64), "int8wo"))
    ops = torch.ops.gpt_long_cpu_linear
    torch.library.opcheck(ops.int4_mm, (x, layer.weight, layer.scales_and_zeros, 32, 24))
    torch.library.opcheck(ops.dense_mm, (x.half(), torch.randn(24, 64).half()))
    torch.library.opcheck(ops.int8_mm, (x, eight.weight, eight.scales, 64, 24))


def test_wrong_arguments_are_refused() -> None:
    layer = _cpu(pack(torch.randn(24, 64), "int4wo-32"))
    with pytest.raises(RuntimeError, match="63 inputs"):
        layer(torch.randn(2, 63))
    with pytest.raises(RuntimeError, match="panels"):
        multiply = torch.ops.gpt_long_cpu_linear.int4_mm
        multiply(torch.randn(2, 64), layer.weight, layer.scales_and_zeros, 32, 33)


def test_huge_pages_hold_copies() -> None:
    memory = HugePages()
    memory.block = 1 << 12
    tensors = [torch.randn(5, 3).t(), torch.randint(0, 9, (7000,)), torch.empty(0), torch.ones(())]
    copies = [memory.empty(t.shape, t.dtype).copy_(t) for t in tensors]
    del memory
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy) and copy.is_contiguous() and copy.data_ptr() % 64 == 0


def test_a_failed_build_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unit = (Unit("broken", "linear_cpu.cpp"),)  # without PyTorch's headers
    assert "could not be built" in build_and_load("broken", unit) and not list(tmp_path.rglob("*.so"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in build_and_load("broken", unit)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "no C++ compiler" in build_and_load("broken", unit)


@pytest.mark.parametrize("rows", [1, 40])
def test_16_bits_are_multiplied_in_float32(rows, monkeypatch):
    layer = torch.nn.Linear(600, 4000, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, rows, 600, dtype=torch.bfloat16)
    exact = torch.nn.functional.linear(x.float(), layer.weight.float()).bfloat16() + layer.bias
    monkeypatch.setattr(linear_cpu.quantize, "gemm_dtype", lambda *_: torch.float32)
    widen(layer)
    torch.testing.assert_close(layer(x), exact)
