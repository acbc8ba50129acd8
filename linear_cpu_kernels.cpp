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

inline F load_floats(const uint16_t* p) { return load_bfloat16(p); }
inline F load_floats(const float* p) { return load<F>(p); }
inline S broadcast(const int32_t* pair) { return (S)(I{} + *pair); }

inline UHalf narrow_bfloat16(F x) {  // round half to even; NaN stays NaN
  U bits = (U)x;
  bits += 0x7fff + ((bits >> 16) & 1);
  bits = x == x ? bits : U{} + 0x7fc00000;
  return __builtin_convertvector(bits >> 16, UHalf);
}

// A row in groups of G: integers up to 32767 in magnitude, and a step.
template <class T> void quantize_row(const Linear& a, int64_t m) {
  const float shift = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const T* x = (const T*)a.x + m * a.K;
  int16_t* q = a.rows.values + m * a.K;
  for (int64_t g = 0, at = m * (a.K / a.G); g < a.K / a.G; g++, at++, x += a.G, q += a.G) {
    I most = {}, total = {};  // most: of the absolute values' bits, where NaN stands above infinity
    for (int64_t k = 0; k < a.G; k += W) {
      I bits = (I)load_floats(x + k) & 0x7fffffff;
      most = most > bits ? most : bits;
    }
    int32_t bits = 0, sum = 0;
    for (int i = 0; i < W; i++) bits = bits > most[i] ? bits : most[i];
    float peak = load<float>(&bits), inverse = peak > 1e-30f ? 32767 / peak : 0;
    for (int64_t k = 0; k < a.G; k += W) {
      I i = (I)(load_floats(x + k) * inverse + shift) - load<int32_t>(&shift);
      total += i;
      save(q + k, __builtin_convertvector(i, Half));
    }
    for (int i = 0; i < W; i++) sum += total[i];
    a.rows.steps[at] = peak / 32767;
    a.rows.sums[at] = peak / 32767 * sum;
    a.rows.starts[at] = a.int4 ? -8 * sum : 0;
  }
}

void quantize(const Linear& a, int64_t first, int64_t last) {
  for (int64_t m = first; m < last; m++) a.bfloat16 ? quantize_row<uint16_t>(a, m) : quantize_row<float>(a, m);
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
  int64_t n = panel * kPanel, count = a.N - n < kPanel ? a.N - n : kPanel, size = a.bfloat16 ? 2 : 4;
  char* out = (char*)a.out + (m * a.N + n) * size;
  UHalf narrow = narrow_bfloat16(y);
  const void* from = a.bfloat16 ? (const void*)&narrow : &y;
  if (count == kPanel) memcpy(out, from, a.bfloat16 ? sizeof narrow : sizeof y);
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

}  // namespace

extern "C" const LinearKernels GPT_LONG_KERNELS = {quantize, multiply, kPanel};
