// What the operators (attention_cpu.cpp) and the kernels (attention_cpu_kernels.cpp) share.
//
// Letters as everywhere: B batch, T new tokens, S slots, H key/value heads, G query heads per key/value head,
// D head_dim.
#pragma once
#include <cstdint>

enum Kind : int { kInt8, kBFloat16, kFloat32 };
inline int64_t bytes_of(Kind kind) { return kind == kInt8 ? 1 : kind == kBFloat16 ? 2 : 4; }

struct View {  // a tensor [B, H, S or T, D], strides in bytes
  char* data;
  int64_t b, h, s, d;
  char* at(int64_t ib, int64_t ih, int64_t is) const { return data + ib * b + ih * h + is * s; }
};

struct Attention {
  View q, k, v, k_scales, v_scales, out;  // scales: bfloat16, data null when the values have none
  Kind q_kind, k_kind, v_kind;
  const int64_t* start;  // [B]
  int64_t H, G, T, D;
  int64_t k_strong, v_strong;  // of 4-bit rows, -1 for others
  Kind out_kind;
  const uint16_t *v_out, *q_in;  // bfloat16 [H, D, D] out of V's basis and into K's, or null
  int64_t queries() const { return G * T; }
  // floats of one part: for each query its largest score, sum, factor of scores, D outputs, D of itself
  int64_t part_floats() const { return queries() * (2 * D + 3); }
};

struct Slots { int64_t b, h, first, last; };  // first .. last-1 of a head

struct Store {  // new tokens x [B, H, T, D] into their slots
  View x, values, scales;
  Kind x_kind, kind;
  const int64_t* start;
  int64_t H, T, D;
  bool one_scale;  // for all heads of a token
  int64_t strong;      // of 4-bit rows, -1 for others
  const uint16_t* basis;  // bfloat16 [H, D, D] into which x goes first, or null
};

struct Kernels {
  void (*rotate)(const Attention&, int64_t first, int64_t last, float* out);  // groups of G, (b * H + h) * T + t
  void (*attend)(const Attention&, const Slots& now, const Slots& then, float* part);  // `then` is asked for early
  void (*combine)(const Attention&, int64_t b, int64_t h, int64_t parts, float* part);
  void (*store)(const Store&, int64_t first, int64_t last);  // vectors, (b * T + t) * H + h
};

constexpr int64_t kTile = 512;       // slots whose scores are held at a time
constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxPackedHeadDim = 256;

