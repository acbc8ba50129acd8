// Storing integers: int8 rows, and 4-bit rows as quantize4 of kv_cache.py makes them: `strong` coordinates as int8,
// then indices to kLevels, the first half of the others in the low nibbles and the second half in the high ones.
#pragma once
#include "attention_cpu_tile.h"

#include <cmath>

namespace {

constexpr float kSigma = 127 / 2.7326f;
constexpr float kTrials[] = {0.85f, 0.92f, 1.0f, 1.08f, 1.16f};

#if defined(__AVX512BW__)
// n rows become int8 rows of D, a multiple of 64.  A row's bytes are read where they belong: the packed ones twice,
// masked, the second time `half` bytes further on, where the high nibbles go.
void unpack_rows(const char* rows, int64_t stride, int64_t n, int64_t strong, int64_t D, char* out) {
  const int64_t half = (D - strong) / 2;
  const __m512i levels = _mm512_broadcast_i32x4(load<__m128i>(kLevels)), nibble = _mm512_set1_epi8(15);
  auto below = [](int64_t end) -> __mmask64 { return end <= 0 ? 0 : end >= 64 ? ~0ull : (1ull << end) - 1; };
  for (int64_t c = 0; c < D; c += 64) {
    __mmask64 top = below(strong - c), first = below(strong + half - c);
    const char* row = rows + c;
    char* to = out + c;
    for (int64_t s = 0; s < n; s++, row += stride, to += D) {
      __m512i x = _mm512_mask_loadu_epi8(_mm512_maskz_loadu_epi8(first, row), ~first, row - half);
      __m512i index = _mm512_mask_blend_epi8(first, _mm512_srli_epi16(x, 4), x);
      index = _mm512_and_si512(index, nibble);
      save(to, _mm512_mask_shuffle_epi8(x, ~top, levels, index));
    }
  }
}
#else
// n rows become int8 rows of D.
void unpack_rows(const char* rows, int64_t stride, int64_t n, int64_t strong, int64_t D, char* out) {
  const int64_t half = (D - strong) / 2;
  for (int64_t s = 0; s < n; s++, rows += stride, out += D) {
    for (int64_t i = 0; i < strong; i += 8) save(out + i, load<int64_t>(rows + i));  // the rest overwrites
    const char* packed = rows + strong;
    char *low = out + strong, *high = low + half;
    int64_t i = 0;
#if defined(__AVX2__)
    const __m128i levels = load<__m128i>(kLevels), mask = _mm_set1_epi8(15);
    for (; half >= 16 && i < half; i += 16) {
      i = i < half - 16 ? i : half - 16;
      __m128i x = load<__m128i>(packed + i);
      save(low + i, _mm_shuffle_epi8(levels, _mm_and_si128(x, mask)));
      save(high + i, _mm_shuffle_epi8(levels, _mm_and_si128(_mm_srli_epi16(x, 4), mask)));
    }
#endif
    for (; i < half; i++) {
      low[i] = kLevels[packed[i] & 15];
      high[i] = kLevels[(uint8_t)packed[i] >> 4];
    }
  }
}
#endif

// y = x M, for NX rows of x [NX, D] and a matrix M [D, D]: a block of columns, whose sums stay in registers.
template <int NX, int kLoads>
INLINE void times_columns(const float* x, const uint16_t* matrix, int64_t D, float* y) {
  F even[NX][kLoads], odd[NX][kLoads];
  for (int r = 0; r < NX; r++)
    for (int i = 0; i < kLoads; i++) even[r][i] = odd[r][i] = F{};
  for (int64_t d = 0; d < D; d++, matrix += D)
    for (int i = 0; i < kLoads; i++) {
      F first, second;
      load_bfloat16_pairs(matrix + 2 * W * i, first, second);
      for (int r = 0; r < NX; r++) {
        even[r][i] += first * x[r * D + d];
        odd[r][i] += second * x[r * D + d];
      }
    }
  for (int r = 0; r < NX; r++)
    for (int i = 0; i < kLoads; i++) {
      float first[W], second[W], *to = y + r * D + 2 * W * i;
      save(first, even[r][i]);
      save(second, odd[r][i]);
      for (int j = 0; j < W; j++) to[2 * j] = first[j], to[2 * j + 1] = second[j];
    }
}
template <int NX> OUTLINE void times_matrix_rows(const float* x, const uint16_t* matrix, int64_t D, float* y) {
  int64_t e = 0;
  for (; e + 4 * W <= D; e += 4 * W) times_columns<NX, 2>(x, matrix + e, D, y + e);
  for (; e < D; e += 2 * W) times_columns<NX, 1>(x, matrix + e, D, y + e);
}
constexpr int64_t kTogether = 4;  // rows at most
void times_matrix(const float* x, int64_t rows, const uint16_t* matrix, int64_t D, float* y) {
  auto run = rows == 1 ? times_matrix_rows<1> : rows == 2 ? times_matrix_rows<2> : rows == 3 ? times_matrix_rows<3>
                                                                                : times_matrix_rows<kTogether>;
  run(x, matrix, D, y);
}

void store_int8(const float* __restrict x, float scale, int64_t stride, int64_t D, char* __restrict out) {
  const float shift = 12582912.f;  // rounds to integers, half to even
  auto rounded = [&](int64_t d) {
    float v = (x[d] / scale + shift) - shift;
    v = v < -127 ? -127 : v;
    v = v > 127 ? 127 : v;
    return (int8_t)(int32_t)v;
  };
  if (stride == 1) for (int64_t d = 0; d < D; d++) out[d] = rounded(d);
  else for (int64_t d = 0; d < D; d++) out[d * stride] = rounded(d);
}

// The nearest levels, or their indices: how many midpoints between levels lie below a value.
template <bool Index> inline F nearest(F x) {
  F out = F{} + (Index ? 0.f : kLevels[0]);
  for (int i = 0; i < 15; i++) {
    F next = F{} + (Index ? i + 1.f : kLevels[i + 1]);
    out = x > (kLevels[i] + kLevels[i + 1]) * 0.5f ? next : out;
  }
  return out;
}

// The best of least-squares scales for n values, which zeros follow up to a multiple of W (quantize4 explains).
float fitted_scale(const float* x, int64_t n) {
  const int64_t end = (n + W - 1) / W * W;
  const float of_zeros = 36.f * (end - n);  // zero is nearest to -6; sums of squares of levels are exact
  F squares = {};
  for (int64_t d = 0; d < end; d += W) squares += load<F>(x + d) * load<F>(x + d);
  float rms = std::sqrt(total(squares) / n), best = 0, scale = 0;
  rms = (rms > 1e-8f ? rms : 1e-8f) / kSigma;
  for (float trial : kTrials) {
    F along = {}, norm = {};
    for (int64_t d = 0; d < end; d += W) {
      F fit = nearest<false>(load<F>(x + d) / (rms * trial));
      along += load<F>(x + d) * fit;
      norm += fit * fit;
    }
    float a = total(along), s = total(norm) - of_zeros, gain = a * a / s;
    if (gain > best) best = gain, scale = a / s;
  }
  return scale;
}

// Packs a row x [D] already in its basis; returns its scale.
uint16_t store_packed(const float* x, int64_t strong, int64_t D, int64_t stride, char* out) {
  const int64_t n = D - strong, half = n / 2;
  float rest[kMaxPackedHeadDim + W];
  memcpy(rest, x + strong, n * sizeof(float));
  save(rest + n, F{});
  float scale = fitted_scale(rest, n);
  for (int64_t d = 0; d < strong; d++) {
    float wide = std::fabs(x[d]) / 127;
    scale = scale > wide ? scale : wide;
  }
  uint16_t stored = to_bfloat16(scale > 1e-8f ? scale : 1e-8f);
  scale = from_bfloat16(stored);
  store_int8(x, scale, stride, strong, out);
  int32_t index[kMaxPackedHeadDim + W];
  for (int64_t d = 0; d < n; d += W)
    save(index + d, __builtin_convertvector(nearest<true>(load<F>(rest + d) / scale), I));
  for (int64_t i = 0; i < half; i++) out[(strong + i) * stride] = (char)(index[i] | index[half + i] << 4);
  return stored;
}

}  // namespace
