// The kernels of linear_cpu.cpp.  Compiled once per instruction set, with GPT_LONG_KERNELS=name and the compiler's
// flags for it, and without PyTorch's headers (see attention_cpu_kernels.cpp).
#include "linear_cpu.h"
#include "cpu_vector.h"

namespace {

constexpr int kPanel = W;                // outputs of a panel
constexpr int kRows = W == 16 ? 8 : 4;   // rows of x that share a pass over a panel: their sums stay in registers
constexpr int kAhead = 2048;             // bytes of weights asked for early: 20 % on DRAM
template <int R> constexpr int kSums = R >= 4 ? 1 : 4 / R;  // sums of a row: enough in flight to hide the latency

typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t UHalf __attribute__((vector_size(2 * W)));
typedef uint16_t U16 __attribute__((vector_size(4 * W)));

#if defined(__AVX512F__)
inline F load_float16(const void* p) { return (F)_mm512_cvtph_ps(load<__m256i>(p)); }
#else
inline F load_float16(const void* p) { return (F)_mm256_cvtph_ps(load<__m128i>(p)); }
#endif
template <Kind K> inline F load_floats(const void* p) {
  return K == kFloat32 ? load<F>(p) : K == kBFloat16 ? load_bfloat16(p) : load_float16(p);
}
constexpr int64_t size_of(Kind kind) { return kind == kFloat32 ? 4 : 2; }
inline S broadcast(const int32_t* pair) { return (S)(I{} + *pair); }

#if defined(__AVX512F__)
inline UHalf narrow_float16(F x) { return (UHalf)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
#else
inline UHalf narrow_float16(F x) { return (UHalf)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
#endif
inline UHalf narrow_bfloat16(F x) {  // round half to even; NaN stays NaN
  U bits = (U)x;
  bits += 0x7fff + ((bits >> 16) & 1);
  bits = x == x ? bits : U{} + 0x7fc00000;
  return __builtin_convertvector(bits >> 16, UHalf);
}

// A group of G inputs: integers up to 32767 in magnitude, and a step.
template <Kind X> void quantize_group(const Linear& a, const char* x, int64_t at, int16_t* q) {
  const float shift = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  constexpr int64_t step = W * size_of(X);
  I most = {}, total = {};  // most: of the absolute values' bits, where NaN stands above infinity
  for (int64_t i = 0; i < a.G / W; i++) {
    I bits = (I)load_floats<X>(x + i * step) & 0x7fffffff;
    most = most > bits ? most : bits;
  }
  int32_t bits = 0, sum = 0;
  for (int i = 0; i < W; i++) bits = bits > most[i] ? bits : most[i];
  float peak = load<float>(&bits), inverse = peak > 1e-30f ? 32767 / peak : 0;
  for (int64_t i = 0; i < a.G / W; i++) {
    I whole = (I)(load_floats<X>(x + i * step) * inverse + shift) - load<int32_t>(&shift);
    total += whole;
    save(q + i * W, __builtin_convertvector(whole, Half));
  }
  for (int i = 0; i < W; i++) sum += total[i];
  a.rows.steps[at] = peak / 32767;
  a.rows.sums[at] = peak / 32767 * sum;
  a.rows.starts[at] = a.int4 ? -8 * sum : 0;
}

template <Kind X> void quantize_row(const Linear& a, int64_t m) {
  constexpr int64_t size = size_of(X);
  const char* x = (const char*)a.x + m * a.n_inputs * size;
  for (int64_t g = 0; g < a.K / a.G; g++) {
    int64_t at = m * (a.K / a.G) + g, left = a.n_inputs - g * a.G;
    const char* from = x + g * a.G * size;
    char padded[64 * 4] = {};  // int8's groups, the only ones that may end early, have at most 64
    if (left < a.G) from = (const char*)memcpy(padded, from, left * size);
    quantize_group<X>(a, from, at, a.rows.values + m * a.K + g * a.G);
  }
}

void quantize(const Linear& a, int64_t first, int64_t last) {
  auto row = a.kind == kFloat32 ? quantize_row<kFloat32> : a.kind == kBFloat16 ? quantize_row<kBFloat16>
                                                                              : quantize_row<kFloat16>;
  for (int64_t m = first; m < last; m++) row(a, m);
}

// The kSums sums over `group` inputs of integer products, for R rows: total[i] += weight * x of row i.
template <int R> inline const uint8_t* dot4(const uint8_t* w, const int32_t* x, int64_t stride, int64_t group,
                                            I total[R][kSums<R>]) {
  constexpr int n = kSums<R>;
  for (int64_t k = 0; k < group; k += 8, w += 4 * W, x += 4) {
    __builtin_prefetch(w + kAhead);
    U16 v = load<U16>(w);
    S w0 = (S)(v & 15), w1 = (S)(v >> 4 & 15), w2 = (S)(v >> 8 & 15), w3 = (S)(v >> 12);
    for (int i = 0; i < R; i++) {
      const int32_t* p = x + i * stride;
      total[i][0] = dot(total[i][0], w0, broadcast(p));
      total[i][1 % n] = dot(total[i][1 % n], w1, broadcast(p + 1));
      total[i][2 % n] = dot(total[i][2 % n], w2, broadcast(p + 2));
      total[i][3 % n] = dot(total[i][3 % n], w3, broadcast(p + 3));
    }
  }
  return w;
}
template <int R> inline const uint8_t* dot8(const uint8_t* w, const int32_t* x, int64_t stride, int64_t group,
                                            I total[R][kSums<R>]) {
  constexpr int n = kSums<R>;
  for (int64_t k = 0; k < group; k += 4, w += 4 * W, x += 2) {
    __builtin_prefetch(w + kAhead);
    S v = load<S>(w), w0 = v << 8 >> 8, w1 = v >> 8;
    for (int i = 0; i < R; i++) {
      const int32_t* p = x + i * stride;
      total[i][0] = dot(total[i][0], w0, broadcast(p));
      total[i][1 % n] = dot(total[i][1 % n], w1, broadcast(p + 1));
    }
  }
  return w;
}

void store(const Linear& a, int64_t m, int64_t panel, F y) {
  int64_t n = panel * kPanel, count = a.N - n < kPanel ? a.N - n : kPanel, size = size_of(a.kind);
  char* out = (char*)a.out + (m * a.N + n) * size;
  UHalf narrow = a.kind == kFloat16 ? narrow_float16(y) : narrow_bfloat16(y);
  const void* from = a.kind == kFloat32 ? (const void*)&y : &narrow;
  if (count == kPanel) memcpy(out, from, kPanel * size);
  else memcpy(out, from, count * size);
}

template <int R, bool Int4> void panel_rows(const Linear& a, int64_t panel, int64_t m) {
  int64_t groups = a.K / a.G;
  const uint8_t* w = a.weight + panel * kPanel * (Int4 ? a.K / 2 : a.K);
  const auto* x = (const int32_t*)(a.rows.values + m * a.K);
  F y[R] = {};
  for (int64_t g = 0; g < groups; g++, x += a.G / 2) {
    int64_t at = m * groups + g;
    I total[R][kSums<R>] = {};
    for (int i = 0; i < R; i++) total[i][0] += a.rows.starts[at + i * groups];
    w = Int4 ? dot4<R>(w, x, a.K / 2, a.G, total) : dot8<R>(w, x, a.K / 2, a.G, total);
    U both = Int4 ? load<U>(a.scales + (panel * groups + g) * kPanel) : U{};
    F scale = (F)(both << 16), zero = (F)(both & 0xffff0000);
    for (int i = 0; i < R; i++) {
      for (int j = 1; j < kSums<R>; j++) total[i][0] += total[i][j];
      F part = to_float(total[i][0]) * a.rows.steps[at + i * groups];
      y[i] = Int4 ? part * scale + y[i] + zero * a.rows.sums[at + i * groups] : y[i] + part;
    }
  }
  for (int i = 0; i < R; i++)
    store(a, m + i, panel, Int4 ? y[i] : y[i] * load_bfloat16(a.row_scales + panel * kPanel));
}

// Rows from m on, R at a time while there are as many, over panels first .. last-1; the row where it ends.
template <int R, bool Int4> int64_t rows_of_panels(const Linear& a, int64_t first, int64_t last, int64_t m) {
  for (; m + R <= a.M; m += R)
    for (int64_t p = first; p < last; p++) panel_rows<R, Int4>(a, p, m);
  return m;
}

template <bool Int4> void multiply_panels(const Linear& a, int64_t first, int64_t last) {
  int64_t bytes = kPanel * (Int4 ? a.K / 2 : a.K);
  int64_t step = a.M > kRows ? 1 + 16384 / bytes : 1;  // as many panels as stay in the first-level cache
  for (int64_t lo = first; lo < last; lo += step) {
    int64_t hi = lo + step < last ? lo + step : last, m = 0;
    m = rows_of_panels<kRows, Int4>(a, lo, hi, m);
    m = rows_of_panels<4, Int4>(a, lo, hi, m);
    m = rows_of_panels<2, Int4>(a, lo, hi, m);
    rows_of_panels<1, Int4>(a, lo, hi, m);
  }
}

void multiply(const Linear& a, int64_t first, int64_t last) {
  a.int4 ? multiply_panels<true>(a, first, last) : multiply_panels<false>(a, first, last);
}

// ---- 16-bit weights ----

// Two vectors of weights, wide; bfloat16: even ones, then odd ones.
template <Kind T> inline void load_pair(const char* p, F& first, F& second) {
  if (T == kBFloat16) return load_bfloat16_pairs(p, first, second);
  first = load_float16(p);
  second = load_float16(p + 2 * W);
}

template <Kind T> void widen_row(const Dense& a, int64_t m) {
  const char* x = a.x + m * a.K * 2;
  float* out = a.wide + m * a.padded();
  for (int64_t k = 0; k < a.padded(); k += 2 * W) {
    char padded[4 * W] = {};
    int64_t left = a.K - k < 0 ? 0 : a.K - k;
    F first, second;
    load_pair<T>(left < 2 * W ? (const char*)memcpy(padded, x + 2 * k, 2 * left) : x + 2 * k, first, second);
    save(out + k, first);
    save(out + k + W, second);
  }
}

void widen(const Dense& a, int64_t first, int64_t last) {
  for (int64_t m = first; m < last; m++) a.kind == kBFloat16 ? widen_row<kBFloat16>(a, m) : widen_row<kFloat16>(a, m);
}

// Outputs n .. n+3 of R rows of x.  Every sum goes along K in the same order, whatever R is.
template <Kind T, int R> void dense_block(const Dense& a, int64_t n, int64_t m) {
  const char* rows[kDenseRows];
  for (int i = 0; i < kDenseRows; i++) rows[i] = a.weight + (n + i < a.N ? n + i : a.N - 1) * a.K * 2;
  const int64_t whole = a.K / (2 * W) * 2 * W, padded = a.padded(), ahead = kDenseRows * a.K * 2;
  const float* x = a.wide + m * padded;
  F sum[kDenseRows][R] = {};
  auto add = [&](int i, const char* p, int64_t k) {
    F first, second;
    load_pair<T>(p, first, second);
    for (int r = 0; r < R; r++) {
      sum[i][r] += first * load<F>(x + r * padded + k);
      sum[i][r] += second * load<F>(x + r * padded + k + W);
    }
  };
  for (int64_t k = 0; k < whole; k += 2 * W)
    for (int i = 0; i < kDenseRows; i++) {
      __builtin_prefetch(rows[i] + 2 * k + ahead);
      add(i, rows[i] + 2 * k, k);
    }
  for (int i = 0; i < kDenseRows && whole < a.K; i++) {
    char tail[4 * W] = {};
    memcpy(tail, rows[i] + 2 * whole, 2 * (a.K - whole));
    add(i, tail, whole);
  }
  for (int r = 0; r < R; r++) {
    F y = {};
    for (int i = 0; i < kDenseRows; i++) y[i] = total(sum[i][r]);
    UHalf narrow = T == kBFloat16 ? narrow_bfloat16(y) : narrow_float16(y);
    int64_t count = a.N - n < kDenseRows ? a.N - n : kDenseRows;
    memcpy(a.out + (m + r) * a.N + n, &narrow, 2 * count);
  }
}

template <Kind T> void dense_blocks(const Dense& a, int64_t first, int64_t last) {
  constexpr int kMost = W == 16 ? 4 : 2;  // rows of x at a time: their sums stay in registers
  for (int64_t n = first * kDenseRows; n < last * kDenseRows; n += kDenseRows) {
    int64_t m = 0;
    for (; m + kMost <= a.M; m += kMost) dense_block<T, kMost>(a, n, m);
    for (; m < a.M; m++) dense_block<T, 1>(a, n, m);
  }
}

void dense(const Dense& a, int64_t first, int64_t last) {
  a.kind == kBFloat16 ? dense_blocks<kBFloat16>(a, first, last) : dense_blocks<kFloat16>(a, first, last);
}

}  // namespace

extern "C" const LinearKernels GPT_LONG_KERNELS = {quantize, multiply, widen, dense};
