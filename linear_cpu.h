// What the operators (linear_cpu.cpp) and the kernels (linear_cpu_kernels.cpp) share.
//
// Letters: M rows of activations, N outputs, K inputs, G inputs of a group.  Weights lie in panels of P outputs, as many
// as a vector has 32-bit lanes, padded with zeros to whole panels.  A panel is a row of vectors, 4 bytes of each output:
//   int4  8 inputs per output; nibble i of the first two bytes is input 2i, nibble i of the other two is input 2i + 1
//   int8  4 inputs per output; bytes 0 1 2 3 are inputs 0 2 1 3
// so that a shift and a mask give 16-bit pairs of neighbouring inputs.
#pragma once
#include <cstdint>

struct Rows {  // activations as 16-bit integers: x = values * steps
  int16_t* values;  // [M, K]
  float* steps;     // [M, K/G], largest |x| of the group / 32767
  float* sums;      // [M, K/G], of x
  int32_t* starts;  // [M, K/G], -8 * the sum of values: takes 8 from every nibble
};

struct Linear {
  const void* x;        // [M, K]
  const uint8_t* weight;
  const uint32_t* scales;  // int4: [panels, K/G, P] bfloat16 pairs of scale and zero
  const uint16_t* row_scales;  // int8: bfloat16 [panels * P]
  void* out;            // [M, N]
  Rows rows;
  int64_t M, N, K, G;
  bool bfloat16, int4;  // dtype of x and out; kind of weight
};

struct LinearKernels {
  void (*quantize)(const Linear&, int64_t first, int64_t last);  // rows of x
  void (*multiply)(const Linear&, int64_t first, int64_t last);  // panels
  int64_t panel;                                                 // P
};
