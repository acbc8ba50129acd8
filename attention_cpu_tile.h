// What the parts of attention_cpu_kernels.cpp work on: a tile of slots and its weights.
#pragma once
#include "attention_cpu.h"
#include "cpu_vector.h"

namespace {

constexpr int kBlock = 4;  // queries that share one pass over a tile: their sums stay in registers

// Rows that will be wanted soon, asked for line by line between other work: memory is never idle then.
struct Fetch {
  const char* row;
  int64_t stride, bytes, rows, at = 0;
  void next(int lines) {
    for (int i = 0; i < lines && rows > 0; i++) {
      __builtin_prefetch(row + at, 0, 2);
      at += 64;
      if (at >= bytes) at = 0, row += stride, rows--;
    }
  }
};

struct Tile {  // n slots of one head
  const char *k, *v;
  int64_t k_stride, v_stride, n;
  Fetch v_soon, k_soon;  // this tile's V, the next one's K
  alignas(64) float k_scales[kTile], v_scales[kTile];  // zero past n
};

struct Weights {  // the probabilities of NQ queries over a tile, relative to the tile's largest
  alignas(64) float score[kBlock][kTile];    // first int32 or float scores, then probabilities
  alignas(64) int16_t rounded[kBlock][kTile];  // times V's scale, as store_weights leaves them
  float shrink[kBlock], factor[kBlock];      // outputs = outputs * shrink + weights @ V * factor
};

template <int NQ>
inline void add_values(float* y, int64_t D, const Weights& w, const F* first, const F* second) {
  for (int j = 0; j < NQ; j++, y += D) {
    save(y, load<F>(y) * w.shrink[j] + first[j] * w.factor[j]);
    save(y + W, load<F>(y + W) * w.shrink[j] + second[j] * w.factor[j]);
  }
}

}  // namespace
