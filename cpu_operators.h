// What the operators of both extensions use: PyTorch's own threads, and what the processor has.  Not for kernels.
#pragma once
#include <cstdint>
#include <ATen/Version.h>
#include <torch/csrc/stable/c/shim.h>

// work(first, last) over shares of 0 .. n-1, of `grain` or more each.
template <class Work> void in_parallel(int64_t n, int64_t grain, const Work& work) {
  if (n <= grain) return work(0, n);
  auto call = [](int64_t first, int64_t last, void* work) { (*(const Work*)work)(first, last); };
  torch_parallel_for(0, n, grain, call, (void*)&work);
}

#if defined(__x86_64__)
// Asked before the kernels of X86_FLAGS (cpu_extension.py) are taken.  PyTorch's own choice caps them: it follows the
// environment's ATEN_CPU_CAPABILITY, so that the narrower kernels can be run on a wider machine.
inline bool has_avx512() {
  static const bool has = at::get_cpu_capability().rfind("AVX512", 0) == 0 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  return has;
}
inline bool has_avx2() {
  static const bool has = at::get_cpu_capability().rfind("AVX", 0) == 0 && __builtin_cpu_supports("avx2") &&
                          __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return has;
}
#endif
