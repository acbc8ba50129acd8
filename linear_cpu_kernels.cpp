// The AVX2 kernels of linear_cpu.cpp, compiled for that instruction set alone and without PyTorch's headers.
#include "linear_cpu.h"

#include <immintrin.h>

namespace {

constexpr int kAhead = 2048;  // bytes of weights asked for early: 20 % on DRAM

inline __m256 from_bfloat16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

inline __m128i to_bfloat16(__m256 x) {  // round half to even; NaN stays NaN
  __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

inline int32_t largest(__m256i x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

inline int32_t sum(__m256i x) {
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

template <class T> inline __m256 load8(const T* p) {
  if constexpr (sizeof(T) == 2) return from_bfloat16(p);
  else return _mm256_loadu_ps(p);
}

template <class T> void quantize_row(const Linear& a, int64_t m) {
  const T* x = (const T*)a.x + m * a.K;
  int16_t* q = a.rows.values + m * a.K;
  int64_t groups = a.K / a.G;
  for (int64_t g = 0; g < groups; g++, x += a.G, q += a.G) {
    __m256i most = _mm256_setzero_si256();  // of the absolute values' bits, where NaN stands above infinity
    for (int64_t k = 0; k < a.G; k += 8) {
      __m256i bits = _mm256_castps_si256(load8(x + k));
      most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    float peak = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest(most))));
    __m256 inverse = _mm256_set1_ps(peak > 1e-30f ? 32767 / peak : 0);
    __m256i total = _mm256_setzero_si256();
    for (int64_t k = 0; k < a.G; k += 8) {
      __m256i i = _mm256_cvtps_epi32(_mm256_mul_ps(load8(x + k), inverse));
      total = _mm256_add_epi32(total, i);
      __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
      _mm_storeu_si128((__m128i*)(q + k), packed);
    }
    int64_t at = m * groups + g;
    a.rows.steps[at] = peak / 32767;
    a.rows.sums[at] = peak / 32767 * sum(total);
    a.rows.starts[at] = a.int4 ? -8 * sum(total) : 0;
  }
}

void quantize(const Linear& a, int64_t first, int64_t last) {
  for (int64_t m = first; m < last; m++) a.bfloat16 ? quantize_row<uint16_t>(a, m) : quantize_row<float>(a, m);
}

inline void store(const Linear& a, int64_t m, int64_t panel, __m256 y) {
  int64_t n = panel * kPanel, count = a.N - n < kPanel ? a.N - n : kPanel;
  alignas(32) char all[32];
  if (a.bfloat16) _mm_store_si128((__m128i*)all, to_bfloat16(y));
  else _mm256_store_ps((float*)all, y);
  int64_t size = a.bfloat16 ? 2 : 4;
  char* out = (char*)a.out + (m * a.N + n) * size;
  if (count == kPanel) __builtin_memcpy(out, all, 8 * size);
  else __builtin_memcpy(out, all, count * size);
}

// The sum over `group` inputs of integer products, 8 outputs: total[i] += weight * x of row i.
template <int R> inline const uint8_t* dot4(const uint8_t* w, const int32_t* x, int64_t stride, int64_t group,
                                            __m256i* total) {
  const __m256i low = _mm256_set1_epi16(15);
  for (int64_t k = 0; k < group; k += 8, w += 32, x += 4) {
    _mm_prefetch((const char*)w + kAhead, _MM_HINT_T0);
    __m256i v = _mm256_load_si256((const __m256i*)w);
    __m256i w0 = _mm256_and_si256(v, low), w1 = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
    __m256i w2 = _mm256_and_si256(_mm256_srli_epi16(v, 8), low), w3 = _mm256_srli_epi16(v, 12);
    for (int i = 0; i < R; i++) {
      const int32_t* p = x + i * stride;
      __m256i a = _mm256_madd_epi16(w0, _mm256_set1_epi32(p[0])), b = _mm256_madd_epi16(w1, _mm256_set1_epi32(p[1]));
      __m256i c = _mm256_madd_epi16(w2, _mm256_set1_epi32(p[2])), d = _mm256_madd_epi16(w3, _mm256_set1_epi32(p[3]));
      total[i] = _mm256_add_epi32(total[i], _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d)));
    }
  }
  return w;
}

template <int R> inline const uint8_t* dot8(const uint8_t* w, const int32_t* x, int64_t stride, int64_t group,
                                            __m256i* total) {
  for (int64_t k = 0; k < group; k += 4, w += 32, x += 2) {
    _mm_prefetch((const char*)w + kAhead, _MM_HINT_T0);
    __m256i v = _mm256_load_si256((const __m256i*)w);
    __m256i w0 = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), w1 = _mm256_srai_epi16(v, 8);
    for (int i = 0; i < R; i++) {
      const int32_t* p = x + i * stride;
      __m256i a = _mm256_madd_epi16(w0, _mm256_set1_epi32(p[0])), b = _mm256_madd_epi16(w1, _mm256_set1_epi32(p[1]));
      total[i] = _mm256_add_epi32(total[i], _mm256_add_epi32(a, b));
    }
  }
  return w;
}

template <int R, bool Int4> void panel_rows(const Linear& a, int64_t panel, int64_t m) {
  int64_t groups = a.K / a.G;
  const uint8_t* w = a.weight + panel * a.panel_bytes();
  const auto* x = (const int32_t*)(a.rows.values + m * a.K);
  __m256 y[R];
  for (int i = 0; i < R; i++) y[i] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; g++, x += a.G / 2) {
    int64_t at = m * groups + g;
    __m256i total[R];
    for (int i = 0; i < R; i++) total[i] = _mm256_set1_epi32(a.rows.starts[at + i * groups]);
    w = Int4 ? dot4<R>(w, x, a.K / 2, a.G, total) : dot8<R>(w, x, a.K / 2, a.G, total);
    __m256 scale, zero;
    if (Int4) {
      __m256i both = _mm256_load_si256((const __m256i*)(a.scales + (panel * groups + g) * kPanel));
      scale = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
      zero = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xffff0000)));
    }
    for (int i = 0; i < R; i++) {
      __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(total[i]), _mm256_set1_ps(a.rows.steps[at + i * groups]));
      if (Int4) {
        y[i] = _mm256_fmadd_ps(part, scale, y[i]);
        y[i] = _mm256_fmadd_ps(zero, _mm256_set1_ps(a.rows.sums[at + i * groups]), y[i]);
      } else {
        y[i] = _mm256_add_ps(y[i], part);
      }
    }
  }
  for (int i = 0; i < R; i++)
    store(a, m + i, panel, Int4 ? y[i] : _mm256_mul_ps(y[i], from_bfloat16(a.row_scales + panel * kPanel)));
}

template <bool Int4> void multiply_panels(const Linear& a, int64_t first, int64_t last) {
  constexpr int kRows = 4;
  int64_t step = a.M > kRows ? 1 + 16384 / a.panel_bytes() : 1;  // as many panels as stay in the first-level cache
  for (int64_t lo = first; lo < last; lo += step) {
    int64_t hi = lo + step < last ? lo + step : last, m = 0;
    for (; m + kRows <= a.M; m += kRows)
      for (int64_t p = lo; p < hi; p++) panel_rows<kRows, Int4>(a, p, m);
    for (int64_t p = lo; p < hi; p++) {
      if (a.M - m == 3) panel_rows<3, Int4>(a, p, m);
      if (a.M - m == 2) panel_rows<2, Int4>(a, p, m);
      if (a.M - m == 1) panel_rows<1, Int4>(a, p, m);
    }
  }
}

void multiply(const Linear& a, int64_t first, int64_t last) {
  a.int4 ? multiply_panels<true>(a, first, last) : multiply_panels<false>(a, first, last);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const LinearKernels gpt_long_linear_avx2 = {quantize, multiply};
