// The vectors that attention_cpu_kernels.cpp is written in: the vector extensions of GCC and Clang and, for
// each instruction set, the few operations that these lack.  The compiler's flags choose.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512VNNI__)
constexpr int W = 16;  // 32-bit lanes
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef int16_t S __attribute__((vector_size(4 * W)));
typedef int16_t Half __attribute__((vector_size(2 * W)));
#define OUTLINE __attribute__((noinline))  // hot loops: apart, their sums get all the registers
#define INLINE __attribute__((always_inline)) inline
#define REREAD(p) asm("" : "+r"(p))  // what p points to is not worth keeping in registers
#if defined(__AVX2__)
#define SETTLE(x) asm("" : "+v"(x))  // have it in a register now: compilers load twice, or put additions off
#else
#define SETTLE(x)
#endif

template <class V> inline V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V> inline void save(void* p, V v) { memcpy(p, &v, sizeof v); }
inline F to_float(I x) { return __builtin_convertvector(x, F); }
#if defined(__AVX512VNNI__)
inline F largest(F a, F b) { return a > b ? a : b; }
inline float greatest(F x) { return _mm512_reduce_max_ps((__m512)x); }
inline float total(F x) { return _mm512_reduce_add_ps((__m512)x); }
#else
#if defined(__AVX2__)
inline F largest(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }  // compilers may take two instructions
#else
inline F largest(F a, F b) { return a > b ? a : b; }
#endif
template <int N = W> inline float greatest(F x, int first = 0) {
  if constexpr (N == 1) return x[first];
  else {
    float a = greatest<N / 2>(x, first), b = greatest<N / 2>(x, first + N / 2);
    return a > b ? a : b;
  }
}
template <int N = W> inline float total(F x, int first = 0) {
  if constexpr (N == 1) return x[first];
  else return total<N / 2>(x, first) + total<N / 2>(x, first + N / 2);
}
#endif

// What differs between instruction sets:
//   dot          acc + the sums of adjacent products
//   add_pairs    per 4 lanes: a0+a2, a1+a3, b0+b2, b1+b3
//   store_sums   eight whole sums, from four results of add_pairs
// and for portable code alone, as the others have ways of their own to meet bytes:
//   widen        2W int8 as int16
//   interleave   2W int8 of two rows as int16 (a0 b0 a1 b1 ...), in two halves
#if defined(__AVX512VNNI__)
inline I dot(I acc, S a, S b) { return (I)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b); }
template <class V> inline V add_pairs(V a, V b) {
  return (V)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x4e) +
         (V)_mm512_mask_blend_ps(0xcccc, (__m512)a, (__m512)b);
}
template <class V> inline V add_neighbours(V a, V b) {
  return (V)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88) + (V)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd);
}
template <class T, class V> inline auto fold(V x) {
  typedef T R __attribute__((vector_size(32)));
  return (R)_mm512_castps512_ps256((__m512)x) + (R)_mm512_extractf64x4_pd((__m512d)x, 1);
}
#elif defined(__AVX2__)
inline I dot(I acc, S a, S b) { return acc + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
template <class V> inline V add_pairs(V a, V b) {
  return (V)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x4e) + (V)_mm256_blend_ps((__m256)a, (__m256)b, 0xcc);
}
template <class V> inline V add_neighbours(V a, V b) {
  return (V)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88) + (V)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
}
template <class T, class V> inline V fold(V x) { return x; }
#endif
#if defined(__AVX2__)
template <class T, class V> inline void store_sums(const V pairs[4], T* out) {
  auto a = fold<T>(add_neighbours(pairs[0], pairs[1])), b = fold<T>(add_neighbours(pairs[2], pairs[3]));
  using R = decltype(a);
  save(out, (R)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x21) +
                (R)_mm256_blend_ps((__m256)a, (__m256)b, 0xf0));
}
#else
inline S widen(const char* p) {
  typedef int8_t Bytes __attribute__((vector_size(2 * W)));
  return __builtin_convertvector(load<Bytes>(p), S);
}
inline I dot(I acc, S a, S b) {
  I x = (I)a, y = (I)b;
  return acc + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
}
inline void interleave(const char* a, const char* b, S& first, S& second) {
  int16_t pairs[4 * W];
  for (int i = 0; i < 2 * W; i++) {
    pairs[2 * i] = (int8_t)a[i];
    pairs[2 * i + 1] = (int8_t)b[i];
  }
  first = load<S>(pairs);
  second = load<S>(pairs + 2 * W);
}
template <class V> inline V add_pairs(V a, V b) {
  return V{a[0] + a[2], a[1] + a[3], b[0] + b[2], b[1] + b[3]};
}
template <class T, class V> inline void store_sums(const V pairs[4], T* out) {
  for (int i = 0; i < 4; i++) {
    out[2 * i] = pairs[i][0] + pairs[i][1];
    out[2 * i + 1] = pairs[i][2] + pairs[i][3];
  }
}
#endif

// 2^x for x <= 0, within 2e-7.
#if defined(__AVX512VNNI__)
inline F exp2(F x) {  // a polynomial of what floor(x) leaves
  F f = (F)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  F y = f * 1.87757668e-3f + 8.98934009e-3f;
  y = y * f + 5.58263181e-2f;
  y = y * f + 2.40153617e-1f;
  y = y * f + 6.93153073e-1f;
  y = y * f + 0.999999925f;
  return (F)_mm512_scalef_ps((__m512)y, (__m512)x);
}
#else
inline F exp2(F x) {  // a polynomial around the nearest integer; below -126 it stays at 2^-126
  const float shift = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  x = largest(x, F{} - 126.f);
  F t = x + shift;
  F f = x - (t - shift);
  F y = f * 1.32646706e-3f + 9.67149993e-3f;
  y = y * f + 5.55073376e-2f;
  y = y * f + 2.40222423e-1f;
  y = y * f + 6.93146978e-1f;
  y = y * f + 1.f;
  return (F)((I)y + ((I)t << 23));
}
#endif
inline float exp2(float x) { return exp2(F{} + x)[0]; }

inline float from_bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  return load<float>(&wide);
}
inline F load_bfloat16(const void* p) { return (F)(__builtin_convertvector(load<Half>(p), I) << 16); }
// 2W of them: the even ones and the odd ones, an instruction each.
inline void load_bfloat16_pairs(const void* p, F& even, F& odd) {
  I pairs = load<I>(p);
  even = (F)(pairs << 16);
  odd = (F)(pairs & (int32_t)0xffff0000);
}
inline uint16_t to_bfloat16(float x) {  // round half to even
  uint32_t bits = load<uint32_t>(&x);
  return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace
