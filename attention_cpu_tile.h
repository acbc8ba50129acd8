// What the parts of attention_cpu_kernels.cpp work on: a tile of slots and its weights.
#pragma once
#include "attention_cpu.h"
#include "cpu_vector.h"

namespace {

constexpr int8_t kLevels[16] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};

constexpr int64_t kStrong = 16;  // coordinates of packed keys that keep 8 bits by default

constexpr int kBlock = 4;  // queries that share one pass over a tile: their sums stay in registers

// Rows that will be wanted soon, asked for line by line between other work, so that memory is never idle.
struct Fetch {
  const char* p = nullptr;
  int64_t step = 0;  // as many as there are calls make a tile
  void next(int64_t lines) {
    for (int64_t i = 0; i < lines; i++, p += step) __builtin_prefetch(p, 0, 2);
  }
};

struct Tile {  // n slots of one head
  const char *k, *v;
  int64_t k_stride, v_stride, n, k_strong, v_strong;  // strong: of packed rows, -1 of others
  Fetch v_soon, k_soon;  // this tile's V (the next one's where it is unpacked first), the next one's K
  alignas(64) float k_scales[kTile], v_scales[kTile];  // zero past n
};

struct Weights {  // the probabilities of NQ queries over a tile, relative to the tile's largest
  alignas(64) float score[kBlock][kTile];    // first int32 or float scores, then probabilities
  alignas(64) int16_t rounded[kBlock][kTile];  // times V's scale, as round_weights leaves them
  float shrink[kBlock], factor[kBlock];      // outputs = outputs * shrink + weights @ V * factor
};

template <int NQ>
inline void add_values(float* y, int64_t D, const Weights& w, const F* first, const F* second) {
  for (int j = 0; j < NQ; j++, y += D) {
    save(y, load<F>(y) * w.shrink[j] + first[j] * w.factor[j]);
    save(y + W, load<F>(y + W) * w.shrink[j] + second[j] * w.factor[j]);
  }
}

// All D of them, from integers [NQ][at least D].
template <int NQ, class Sums> void add_sums(float* y, int64_t D, const Weights& w, const Sums& sums) {
  for (int64_t d = 0; d < D; d += 2 * W) {
    F first[NQ], second[NQ];
    for (int j = 0; j < NQ; j++) {
      first[j] = to_float(load<I>(sums[j] + d));
      second[j] = to_float(load<I>(sums[j] + d + W));
    }
    add_values<NQ>(y + d, D, w, first, second);
  }
}

}  // namespace
