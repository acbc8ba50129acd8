// What the operators (linear_cpu.cpp) and the kernels (linear_cpu_kernels.cpp) share.
//
// Letters: M rows of activations, N outputs, K inputs, G inputs of a group.  Weights lie in panels of P outputs, as many
// as a vector has 32-bit lanes, padded with zeros to whole panels.  A panel is a row of vectors, 4 bytes of each output:
//   int4  8 inputs per output; nibble i of the first two bytes is input 2i, nibble i of the other two is input 2i + 1
//   int8  4 inputs per output; bytes 0 1 2 3 are inputs 0 2 1 3
// so that a shift and a mask give 16-bit pairs of neighbouring inputs.
// Inputs past a row's end, up to whole vectors, count as zeros.
//
// 16-bit weights stay as PyTorch has them, row by row, and are widened in registers.
#pragma once
#include <cstdint>

enum Kind : int { kFloat32, kBFloat16, kFloat16 };

struct Rows {  // activations as 16-bit integers: x = values * steps
  int16_t* values;  // [M, K]
  float* steps;     // [M, K/G], largest |x| of the group / 32767
  float* sums;      // [M, K/G], of x
  int32_t* starts;  // [M, K/G], -8 * the sum of values: takes 8 from every nibble
};

struct Linear {  // K: a multiple of G
  const void* x;        // [M, n_inputs]
  const uint8_t* weight;
  const uint32_t* scales;  // int4: [panels, K/G, P] bfloat16 pairs of scale and zero
  const uint16_t* row_scales;  // int8: bfloat16 [panels * P]
  void* out;            // [M, N]
  Rows rows;
  int64_t M, N, K, G, n_inputs;
  Kind kind;            // of x and out
  bool int4;            // kind of weight
};

struct Dense {
  const char *x, *weight;  // [M, K], [N, K], both of a 16-bit kind, as is the output
  float* wide;             // [M, K up to a multiple of kWide], x as the kernels read it
  uint16_t* out;           // [M, N]
  int64_t M, N, K;
  Kind kind;
  int64_t padded() const { return (K + kWide - 1) / kWide * kWide; }
  static constexpr int64_t kWide = 32;  // two vectors of AVX-512
};

struct LinearKernels {
  void (*quantize)(const Linear&, int64_t first, int64_t last);  // rows of x
  void (*multiply)(const Linear&, int64_t first, int64_t last);  // panels
  void (*widen)(const Dense&, int64_t first, int64_t last);      // rows of x
  void (*dense)(const Dense&, int64_t first, int64_t last);      // blocks of kDenseRows outputs
};

constexpr int64_t kDenseRows = 4;
