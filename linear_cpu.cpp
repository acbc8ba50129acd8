// PyTorch operators around the kernels of linear_cpu_kernels.cpp: gpt_long_cpu_linear::int4_mm and ::int8_mm.
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

Tensor run(const Tensor& x, Linear& a, int64_t panel) {
  TORCH_CHECK(panel == 8 || panel == best_panel(), "linear_cpu: panels have 8 outputs, with AVX-512 16, not ", panel);
  const LinearKernels& kernels = panel == 8 ? gpt_long_linear_avx2 : gpt_long_linear_avx512;
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat,
              "linear_cpu: x is bfloat16 or float32, not ", x.scalar_type());
  TORCH_CHECK(x.size(-1) == a.K, "linear_cpu: x has ", x.size(-1), " inputs, the weight has ", a.K);
  Tensor input = x.contiguous();
  auto shape = x.sizes().vec();
  shape.back() = a.N;
  Tensor y = at::empty(shape, x.options());
  a.x = input.data_ptr();
  a.out = y.data_ptr();
  a.M = x.numel() / a.K;
  if (a.M == 0) return y;
  a.bfloat16 = x.scalar_type() == at::kBFloat16;
  int64_t groups = a.K / a.G;
  std::unique_ptr<int16_t[]> values(new int16_t[a.M * a.K]);
  std::unique_ptr<float[]> facts(new float[3 * a.M * groups]);
  a.rows = {values.get(), facts.get(), facts.get() + a.M * groups, (int32_t*)facts.get() + 2 * a.M * groups};
  in_parallel(a.M, kSmall / 2 / a.K + 1, [&](int64_t lo, int64_t hi) { kernels.quantize(a, lo, hi); });
  int64_t panels = (a.N + panel - 1) / panel, grain = kSmall / (a.M * a.K * panel) + 1;
  in_parallel(panels, grain, [&](int64_t lo, int64_t hi) { kernels.multiply(a, lo, hi); });
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
  a.N = n_outputs, a.K = K, a.G = group, a.int4 = true;
  return run(x, a, panel);
}

Tensor int8_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, int64_t n_outputs) {
  TORCH_CHECK(scales.dim() == 2, "linear_cpu: int8 weights want scales [panels, P]");
  int64_t K = weight.size(1), group = 64, panel = scales.size(1);
  check_weight(weight, n_outputs, panel);
  while (group > panel && K % group) group /= 2;
  TORCH_CHECK(K % group == 0 && weight.scalar_type() == at::kChar && scales.scalar_type() == at::kBFloat16 &&
                      scales.is_contiguous() && scales.numel() == weight.size(0),
              "linear_cpu: int8 weights want a bfloat16 scale for each padded output, K a multiple of P");
  Linear a = {};
  a.weight = (const uint8_t*)weight.data_ptr();
  a.row_scales = (const uint16_t*)scales.data_ptr();
  a.N = n_outputs, a.K = K, a.G = group;
  return run(x, a, panel);
}

}  // namespace

TORCH_LIBRARY(gpt_long_cpu_linear, m) {
  m.def("int4_mm(Tensor x, Tensor weight, Tensor scales_and_zeros, int group, int n_outputs) -> Tensor");
  m.def("int8_mm(Tensor x, Tensor weight, Tensor scales, int n_outputs) -> Tensor");
  m.def("panel() -> int", &best_panel);
}
TORCH_LIBRARY_IMPL(gpt_long_cpu_linear, CPU, m) {
  m.impl("int4_mm", &int4_mm);
  m.impl("int8_mm", &int8_mm);
}
