"""Calibrated bases of the 4-bit cache: they invert, keep the strong coordinates in range, and cost less."""
import pytest
import torch
from conftest import tiny_model

from inference import Engine
from kv_cache import CacheSpec, KVCache, attach
from kv_calibrate import attach_calibrated, basis, calibrate


@pytest.mark.parametrize("D,strong", [(32, 0), (64, 8), (80, 16), (128, 16)])
def test_basis_inverts(D, strong):
    torch.manual_seed(0)
    k = torch.randn(2, 4096, D, dtype=torch.float64) * torch.rand(D) + 3 * torch.randn(2, 1, D)
    q = torch.randn(2, 4096, D, dtype=torch.float64)
    into, back = basis(k.mT @ k / 4096, q.mT @ q / 4096, k.mean(1), strong)
    torch.testing.assert_close(into @ back.mT, torch.eye(D).expand(2, D, D), atol=1e-3, rtol=0)


def test_calibrated_keys_with_outliers_cost_less():
    torch.manual_seed(0)
    k = torch.randn(1, 2, 400, 64) * torch.logspace(-0.5, 0.5, 64) + 6 * (torch.rand(64) > 0.9)
    q, v, start = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 400, 64), torch.tensor([399])
    exact = KVCache(CacheSpec(dtype=torch.float32), 1, 2, 400, 64)
    plain, fitted = (KVCache(CacheSpec.parse("4,16", dtype=torch.float32), 1, 2, 400, 64) for _ in range(2))
    moments = k[0].double().mT @ k[0].double() / 400
    white = torch.eye(64, dtype=torch.float64).expand(2, 64, 64)
    fitted.k_bases.copy_(torch.stack(basis(moments, white, k[0].double().mean(1), 16)))
    results = []
    for cache in (exact, plain, fitted):
        cache.write(torch.tensor([0]), k, v)
        results.append(cache.attend(q, start))
    assert (results[2] - results[0]).norm() < 0.5 * (results[1] - results[0]).norm()


def test_calibration_is_the_same_every_time_and_leaves_no_cache():
    model = tiny_model()
    a, b = calibrate(model), calibrate(model)
    assert all(torch.equal(x.k, y.k) and torch.equal(x.q, y.q) for x, y in zip(a, b, strict=True))
    assert model.layers[0].attention.cache is None


def test_other_kinds_attach_as_ever():
    model, ids, zero = tiny_model(), torch.arange(20)[None], torch.tensor([0])
    spec = CacheSpec.parse("int8", dtype=torch.float32)
    attach(model, spec, 1, 32)
    expected = model(ids, zero)
    attach_calibrated(model, spec, 1, 32)
    assert torch.equal(model(ids, zero), expected)


def test_chunked_is_one_shot_with_calibrated_bases():
    model = tiny_model()
    spec = CacheSpec.parse("int4", dtype=torch.float32)
    engines = [Engine(model, spec, 64, prefill_chunk=chunk) for chunk in (7, 64)]
    runs = [list(engine.generate(list(range(30)), 10)) for engine in engines]
    assert runs[0] == runs[1]
