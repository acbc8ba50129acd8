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

// y = x M, for a row x [D] and a matrix M [D, D]: kVectors of y's at a time stay in registers.
template <int kVectors> inline void times_columns(const float* x, const uint16_t* matrix, int64_t D, float* y) {
  F sum[kVectors] = {};
  for (int64_t d = 0; d < D; d++, matrix += D)
    for (int i = 0; i < kVectors; i++) sum[i] += load_bfloat16(matrix + i * W) * x[d];
  for (int i = 0; i < kVectors; i++) save(y + i * W, sum[i]);
}
OUTLINE void times_matrix(const float* x, const uint16_t* matrix, int64_t D, float* y) {
  int64_t e = 0;
  for (; e + 4 * W <= D; e += 4 * W) times_columns<4>(x, matrix + e, D, y + e);
  for (; e < D; e += W) times_columns<1>(x, matrix + e, D, y + e);
}

void store_int8(const float* x, float scale, int64_t stride, int64_t D, char* out) {
  const float shift = 12582912.f;  // rounds to integers, half to even
  int8_t rounded[kMaxHeadDim];
  for (int64_t d = 0; d < D; d++) {
    float v = (x[d] / scale + shift) - shift;
    v = v < -127 ? -127 : v;
    v = v > 127 ? 127 : v;
    rounded[d] = (int8_t)(int32_t)v;
  }
  if (stride == 1) memcpy(out, rounded, D);
  else for (int64_t d = 0; d < D; d++) out[d * stride] = rounded[d];
}

// The index of the nearest level: how many midpoints between levels lie below x.
inline int nearest(float x) {
  int index = 0;
  for (int i = 0; i < 15; i++) index += x > (kLevels[i] + kLevels[i + 1]) * 0.5f;
  return index;
}
// The same for n values: the levels themselves.
inline void nearest_levels(const float* x, float divisor, int64_t n, float* out) {
  for (int64_t d = 0; d < n; d++) {
    float value = x[d] / divisor, level = kLevels[0];
    for (int i = 0; i < 15; i++)
      level += value > (kLevels[i] + kLevels[i + 1]) * 0.5f ? (float)(kLevels[i + 1] - kLevels[i]) : 0.0f;
    out[d] = level;
  }
}

// The best of least-squares scales for n values (quantize4 explains).
float fitted_scale(const float* x, int64_t n) {
  float squares = 0, best = 0, scale = 0, fit[kMaxHeadDim];
  for (int64_t d = 0; d < n; d++) squares += x[d] * x[d];
  float rms = std::sqrt(squares / n);
  rms = (rms > 1e-8f ? rms : 1e-8f) / kSigma;
  for (float trial : kTrials) {
    float along = 0, norm = 0;
    nearest_levels(x, rms * trial, n, fit);
    for (int64_t d = 0; d < n; d++) along += x[d] * fit[d], norm += fit[d] * fit[d];
    float gain = along * along / norm;
    if (gain > best) best = gain, scale = along / norm;
  }
  return scale;
}

// Packs a row x [D] already in its basis; returns its scale.
uint16_t store_packed(const float* x, int64_t strong, int64_t D, int64_t stride, char* out) {
  const int64_t n = D - strong, half = n / 2;
  const float* rest = x + strong;
  float scale = fitted_scale(rest, n);
  for (int64_t d = 0; d < strong; d++) {
    float wide = std::fabs(x[d]) / 127;
    scale = scale > wide ? scale : wide;
  }
  uint16_t stored = to_bfloat16(scale > 1e-8f ? scale : 1e-8f);
  scale = from_bfloat16(stored);
  store_int8(x, scale, stride, strong, out);
  for (int64_t i = 0; i < half; i++)
    out[(strong + i) * stride] = (char)(nearest(rest[i] / scale) | nearest(rest[half + i] / scale) << 4);
  return stored;
}

}  // namespace
