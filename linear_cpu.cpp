// PyTorch operators around the kernels of linear_cpu_kernels.cpp: gpt_long_cpu_linear::int4_mm, ::int8_mm and ::dense_mm.
#include "linear_cpu.h"
#include "cpu_operators.h"

#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

using at::Tensor;

extern "C" const LinearKernels gpt_long_linear_avx2, gpt_long_linear_avx512;

namespace {

constexpr int64_t kSmall = 1 << 17;  // products; with fewer a parallel region costs more than it saves

// Outputs of a panel that this processor's best kernels want.
int64_t best_panel() {
  return has_avx512() ? 16 : 8;
}

Kind kind_of(const Tensor& t) {
  if (t.scalar_type() == at::kBFloat16) return kBFloat16;
  if (t.scalar_type() == at::kHalf) return kFloat16;
  TORCH_CHECK(t.scalar_type() == at::kFloat, "linear_cpu: x is bfloat16, float16 or float32, not ", t.scalar_type());
  return kFloat32;
}

Tensor empty_output(const Tensor& x, int64_t n_inputs, int64_t n_outputs) {
  TORCH_CHECK(x.size(-1) == n_inputs, "linear_cpu: x has ", x.size(-1), " inputs, the weight has ", n_inputs);
  auto shape = x.sizes().vec();
  shape.back() = n_outputs;
  return at::empty(shape, x.options());
}

Tensor run(const Tensor& x, Linear& a, int64_t panel) {
  TORCH_CHECK(panel == 8 || panel == best_panel(), "linear_cpu: panels have 8 outputs, with AVX-512 16, not ", panel);
  const LinearKernels& kernels = panel == 8 ? gpt_long_linear_avx2 : gpt_long_linear_avx512;
  Tensor input = x.contiguous(), y = empty_output(x, a.n_inputs, a.N);
  a.x = input.data_ptr();
  a.out = y.data_ptr();
  a.M = x.numel() / a.n_inputs;
  if (a.M == 0) return y;
  a.kind = kind_of(x);
  int64_t groups = a.K / a.G;
  std::unique_ptr<int16_t[]> values(new int16_t[a.M * a.K]);
  std::unique_ptr<float[]> facts(new float[3 * a.M * groups]);
  a.rows = {values.get(), facts.get(), facts.get() + a.M * groups, (int32_t*)facts.get() + 2 * a.M * groups};
  in_parallel(a.M, kSmall / 2 / a.K + 1, [&](int64_t lo, int64_t hi) { kernels.quantize(a, lo, hi); });
  int64_t panels = (a.N + panel - 1) / panel, grain = kSmall / (a.M * a.K * panel) + 1;
  in_parallel(panels, grain, [&](int64_t lo, int64_t hi) { kernels.multiply(a, lo, hi); });
  return y;
}

Tensor dense_mm(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && x.scalar_type() == weight.scalar_type() &&
                      kind_of(x) != kFloat32,
              "linear_cpu: wants x and a contiguous weight [N, K] of bfloat16 or float16");
  const LinearKernels& kernels = has_avx512() ? gpt_long_linear_avx512 : gpt_long_linear_avx2;
  Tensor input = x.contiguous(), y = empty_output(x, weight.size(1), weight.size(0));
  if (y.numel() == 0 || x.numel() == 0) return y.zero_();
  Dense a = {(const char*)input.data_ptr(), (const char*)weight.data_ptr(), nullptr, (uint16_t*)y.data_ptr(),
             x.numel() / weight.size(1), weight.size(0), weight.size(1), kind_of(x)};
  std::unique_ptr<float[]> wide(new float[a.M * a.padded()]);
  a.wide = wide.get();
  in_parallel(a.M, kSmall / 2 / a.K + 1, [&](int64_t lo, int64_t hi) { kernels.widen(a, lo, hi); });
  int64_t blocks = (a.N + kDenseRows - 1) / kDenseRows, grain = kSmall / (a.M * a.K * kDenseRows) + 1;
  in_parallel(blocks, grain, [&](int64_t lo, int64_t hi) { kernels.dense(a, lo, hi); });
  return y;
}

void check_weight(const Tensor& weight, int64_t n_outputs, int64_t panel) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() &&
                      (n_outputs + panel - 1) / panel * panel == weight.size(0),
              "linear_cpu: the weight is not in panels of ", panel, " outputs");
}

Tensor int4_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, int64_t group, int64_t n_outputs) {
  TORCH_CHECK(scales.dim() == 4, "linear_cpu: int4 weights want scales and zeros [panels, K/group, P, 2]");
  int64_t K = 2 * weight.size(1), panel = scales.size(2);
  check_weight(weight, n_outputs, panel);
  TORCH_CHECK(weight.scalar_type() == at::kByte && scales.scalar_type() == at::kBFloat16 && scales.is_contiguous() &&
                      group >= 16 && group <= 256 && group % 16 == 0 && K % group == 0 &&
                      scales.numel() == weight.size(0) * (K / group) * 2,
              "linear_cpu: int4 weights want bfloat16 scales and zeros [panels, K/group, P, 2], group 16 to 256");
  Linear a = {};
  a.weight = (const uint8_t*)weight.data_ptr();
  a.scales = (const uint32_t*)scales.data_ptr();
  a.N = n_outputs, a.K = a.n_inputs = K, a.G = group, a.int4 = true;
  return run(x, a, panel);
}

Tensor int8_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, int64_t n_inputs, int64_t n_outputs) {
  TORCH_CHECK(scales.dim() == 2, "linear_cpu: int8 weights want scales [panels, P]");
  int64_t K = weight.size(1), group = 64, panel = scales.size(1);
  check_weight(weight, n_outputs, panel);
  while (group > panel && K % group) group /= 2;
  TORCH_CHECK(K == (n_inputs + panel - 1) / panel * panel && weight.scalar_type() == at::kChar &&
                      scales.scalar_type() == at::kBFloat16 && scales.is_contiguous() &&
                      scales.numel() == weight.size(0),
              "linear_cpu: int8 weights want a bfloat16 scale for each padded output, inputs padded to a multiple of P");
  Linear a = {};
  a.weight = (const uint8_t*)weight.data_ptr();
  a.row_scales = (const uint16_t*)scales.data_ptr();
  a.N = n_outputs, a.K = K, a.G = group, a.n_inputs = n_inputs;
  return run(x, a, panel);
}

}  // namespace

TORCH_LIBRARY(gpt_long_cpu_linear, m) {
  m.def("int4_mm(Tensor x, Tensor weight, Tensor scales_and_zeros, int group, int n_outputs) -> Tensor");
  m.def("int8_mm(Tensor x, Tensor weight, Tensor scales, int n_inputs, int n_outputs) -> Tensor");
  m.def("dense_mm(Tensor x, Tensor weight) -> Tensor");
  m.def("panel() -> int", &best_panel);
}
TORCH_LIBRARY_IMPL(gpt_long_cpu_linear, CPU, m) {
  m.impl("int4_mm", &int4_mm);
  m.impl("int8_mm", &int8_mm);
  m.impl("dense_mm", &dense_mm);
}
