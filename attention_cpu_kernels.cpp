// Decode attention over the quantized KV cache on the CPU: flash-decoding (Dao et al. 2023) in integer arithmetic.
//
// Compiled once per instruction set, with GPT_LONG_KERNELS=name and the compiler's flags for it (attention_cpu.py has
// them).  It includes nothing with inline functions of weight, so none is ever built with instructions that a machine lacks.
//
// One work item is (row b, head h, a part of the slots); it reads its K and V once, for all G*T queries:
//   scores   a query is rounded to 16 bits (one scale per query), K's int8 widened to 16, multiplied and summed in int32
//   softmax  online, in float32, by tiles; K's scale multiplies the scores, V's the probabilities
//   values   probability times V's scale, rounded to 16 bits against the tile's largest, times V summed in int32
// int32 cannot overflow: 32767 * 127 * 512 < 2^31, and no sum is longer than 512 (D <= 512, kTile <= 512).
// A 16-bit cache takes the same steps in float32.
#include "attention_cpu.h"

#include <cmath>
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
constexpr int kBlock = 4;      // queries that share one pass over a tile: their sums stay in registers
constexpr int kChunk = 2 * W;  // values of a row taken at a time; D is a multiple of it

template <class V> inline V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V> inline void save(void* p, V v) { memcpy(p, &v, sizeof v); }
inline F to_float(I x) { return __builtin_convertvector(x, F); }
inline F largest(F a, F b) { return a > b ? a : b; }

// What differs between instruction sets:
//   widen        kChunk int8 as int16
//   dot          acc + the sums of adjacent products
//   interleave   two rows of kChunk int8 as int16 (a0 b0 a1 b1 ...): first and second half
//   add_pairs    per 4 lanes: a0+a2, b0+b2, a1+a3, b1+b3
//   store_sums   eight whole sums, from four results of add_pairs
#if defined(__AVX2__)
#if defined(__AVX512VNNI__)
inline S widen(const char* p) { return (S)_mm512_cvtepi8_epi16(load<__m256i>(p)); }
inline I dot(I acc, S a, S b) { return (I)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b); }
inline void interleave(const char* pa, const char* pb, S& first, S& second) {
  __m256i a = _mm256_permute4x64_epi64(load<__m256i>(pa), 0xd8);  // unpack works within 128 bits
  __m256i b = _mm256_permute4x64_epi64(load<__m256i>(pb), 0xd8);
  first = (S)_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b));
  second = (S)_mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b));
}
template <class V> inline V add_pairs(V a, V b) {
  return (V)_mm512_unpacklo_ps((__m512)a, (__m512)b) + (V)_mm512_unpackhi_ps((__m512)a, (__m512)b);
}
template <class V> inline V add_quads(V a, V b) {
  return (V)_mm512_unpacklo_pd((__m512d)a, (__m512d)b) + (V)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
}
template <class T, class V> inline auto fold(V x) {
  typedef T R __attribute__((vector_size(32)));
  return (R)_mm512_castps512_ps256((__m512)x) + (R)_mm512_extractf32x8_ps((__m512)x, 1);
}
#else
inline S widen(const char* p) { return (S)_mm256_cvtepi8_epi16(load<__m128i>(p)); }
inline I dot(I acc, S a, S b) { return acc + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
inline void interleave(const char* pa, const char* pb, S& first, S& second) {
  __m128i a = load<__m128i>(pa), b = load<__m128i>(pb);
  first = (S)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
  second = (S)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
}
template <class V> inline V add_pairs(V a, V b) {
  return (V)_mm256_unpacklo_ps((__m256)a, (__m256)b) + (V)_mm256_unpackhi_ps((__m256)a, (__m256)b);
}
template <class V> inline V add_quads(V a, V b) {
  return (V)_mm256_unpacklo_pd((__m256d)a, (__m256d)b) + (V)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
}
template <class T, class V> inline V fold(V x) { return x; }
#endif
template <class T, class V> inline void store_sums(const V pairs[4], T* out) {
  auto a = fold<T>(add_quads(pairs[0], pairs[1])), b = fold<T>(add_quads(pairs[2], pairs[3]));
  using R = decltype(a);
  save(out, (R)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x20) +
            (R)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x31));
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
  return V{a[0] + a[2], b[0] + b[2], a[1] + a[3], b[1] + b[3]};
}
template <class T, class V> inline void store_sums(const V pairs[4], T* out) {
  for (int i = 0; i < 4; i++) {
    out[2 * i] = pairs[i][0] + pairs[i][2];
    out[2 * i + 1] = pairs[i][1] + pairs[i][3];
  }
}
#endif

// 2^x for x <= 0, within 2e-7; below -126 it stays at 2^-126.  Taylor's series around the nearest integer.
inline F exp2(F x) {
  const float shift = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  x = largest(x, F{} - 126.f);
  F t = x + shift;
  F f = x - (t - shift);
  F y = f * 1.540353e-4f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.f;
  return (F)((I)y + ((I)t << 23));
}
inline float exp2(float x) { return exp2(F{} + x)[0]; }

inline float from_bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  return load<float>(&wide);
}
inline uint16_t to_bfloat16(float x) {  // round half to even
  uint32_t bits = load<uint32_t>(&x);
  return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void load_row(const char* p, int64_t stride, Kind kind, int64_t D, float* out) {
  if (kind == kFloat32) {
    for (int64_t d = 0; d < D; d++) out[d] = load<float>(p + d * stride);
  } else if (stride == 2) {
    for (int64_t d = 0; d < D; d++) out[d] = from_bfloat16(((const uint16_t*)p)[d]);
  } else {
    for (int64_t d = 0; d < D; d++) out[d] = from_bfloat16(*(const uint16_t*)(p + d * stride));
  }
}
inline float largest_magnitude(const float* x, int64_t D) {
  F top = {};
  for (int64_t d = 0; d < D; d += W) {
    F v = load<F>(x + d);
    top = largest(top, largest(v, -v));
  }
  float most = 0;
  for (int i = 0; i < W; i++) most = most > top[i] ? most : top[i];
  return most;
}

// How the values of a row are read, kChunk at a time.  A 4-bit kind would look its codes up in load().
struct Int8 {
  typedef I Sum;
  typedef int32_t Score;
  typedef int16_t Query;
  struct Chunk { S x; };
  static Chunk load_chunk(const char* row, int64_t c) { return {widen(row + c * kChunk)}; }
  static Chunk query(const void* q, int64_t c) { return {load<S>((const int16_t*)q + c * kChunk)}; }
  static Sum add(Sum sum, Chunk k, Chunk q) { return dot(sum, k.x, q.x); }
};
struct Float32 {
  typedef F Sum;
  typedef float Score;
  typedef float Query;
  struct Chunk { F x, y; };
  static Chunk load_chunk(const char* row, int64_t c) {
    return {load<F>(row + c * 4 * kChunk), load<F>(row + c * 4 * kChunk + 4 * W)};
  }
  static Chunk query(const void* q, int64_t c) { return load_chunk((const char*)q, c); }
  static Sum add(Sum sum, Chunk k, Chunk q) { return sum + k.x * q.x + k.y * q.y; }
};
struct BFloat16 : Float32 {  // even values, then odd ones: one instruction each
  static Chunk load_chunk(const char* row, int64_t c) {
    I pairs = load<I>(row + c * 2 * kChunk);
    return {(F)(pairs << 16), (F)(pairs & (int32_t)0xffff0000)};
  }
};
// Where value d of a row stands among the chunks of its kind.
inline int64_t place(Kind kind, int64_t d) {
  if (kind != kBFloat16) return d;
  int64_t i = d % kChunk;
  return d - i + (i % 2) * W + i / 2;
}

// Scores of NQ queries q [NQ][D] with n rows: out [NQ][kTile], before any scale.
template <class K, int NQ, int FixedD>
void scores(const char* rows, int64_t stride, int64_t n, const void* q, int64_t D, void* out) {
  if (FixedD) D = FixedD;
  for (int64_t s = 0; s < n; s += 8) {
    typename K::Sum pairs[NQ][4];
    for (int i = 0; i < 4; i++) {
      int64_t s0 = s + 2 * i < n ? s + 2 * i : n - 1, s1 = s0 + 1 < n ? s0 + 1 : n - 1;  // stay in filled slots
      const char *row0 = rows + s0 * stride, *row1 = rows + s1 * stride;
      typename K::Sum sum0[NQ] = {}, sum1[NQ] = {};
      for (int64_t c = 0; c < D / kChunk; c++) {
        typename K::Chunk k0 = K::load_chunk(row0, c), k1 = K::load_chunk(row1, c);
        for (int j = 0; j < NQ; j++) {
          typename K::Chunk x = K::query((const typename K::Query*)q + j * D, c);
          sum0[j] = K::add(sum0[j], k0, x);
          sum1[j] = K::add(sum1[j], k1, x);
        }
      }
      for (int j = 0; j < NQ; j++) pairs[j][i] = add_pairs(sum0[j], sum1[j]);
    }
    for (int j = 0; j < NQ; j++) store_sums(pairs[j], (typename K::Score*)out + j * kTile + s);
  }
}

struct Weights {  // the probabilities of NQ queries over a tile, relative to the tile's largest
  alignas(64) float score[kBlock][kTile];    // first int32 or float scores, then probabilities
  alignas(64) int16_t rounded[kBlock][kTile];  // times V's scale
  float shrink[kBlock], factor[kBlock];      // outputs = outputs * shrink + weights @ V * factor
};

// One query's softmax step over a tile of n scores of which it sees `seen`.
template <bool IntK, bool IntV>
void softmax(Weights& w, int j, int64_t n, int64_t seen, float mul, const float* k_scales, const float* v_scales,
             float& top, float& total) {
  float* score = w.score[j];
  I index;
  for (int i = 0; i < W; i++) index[i] = i;
  F most = F{} - INFINITY;
  for (int64_t s = 0; s < n; s += W) {
    F x = IntK ? to_float(load<I>(score + s)) * load<F>(k_scales + s) : load<F>(score + s);
    x = index + (int32_t)s < (int32_t)seen ? x * mul : F{} - INFINITY;
    most = largest(most, x);
    save(score + s, x);
  }
  float tile_top = most[0];
  for (int i = 1; i < W; i++) tile_top = tile_top > most[i] ? tile_top : most[i];
  float new_top = top > tile_top ? top : tile_top;
  F sum = {}, top_weight = F{} + 1e-30f;
  for (int64_t s = 0; s < n; s += W) {
    F p = exp2(load<F>(score + s) - tile_top);
    sum += p;
    if (IntV) {
      p *= load<F>(v_scales + s);
      top_weight = largest(top_weight, p);
    }
    save(score + s, p);
  }
  float tile_total = 0, weight = top_weight[0];
  for (int i = 0; i < W; i++) {
    tile_total += sum[i];
    weight = weight > top_weight[i] ? weight : top_weight[i];
  }
  float relative = exp2(tile_top - new_top);
  w.shrink[j] = exp2(top - new_top);
  w.factor[j] = relative;
  if (IntV) {
    float up = 32767 / weight;
    for (int64_t s = 0; s < n; s += W) {
      I rounded = __builtin_convertvector(load<F>(score + s) * up + 0.5f, I);
      save(w.rounded[j] + s, __builtin_convertvector(rounded, Half));
    }
    w.factor[j] *= weight / 32767;
  }
  total = total * w.shrink[j] + tile_total * relative;
  top = new_top;
}

template <int NQ> void values_int8(const char* rows, int64_t stride, int64_t n, const Weights& w, int64_t D, float* y) {
  for (int64_t c = 0; c < D / kChunk; c++) {
    I x0[NQ] = {}, x1[NQ] = {};
    const char* row = rows + c * kChunk;
    for (int64_t s = 0; s < n; s += 2, row += 2 * stride) {
      S v0, v1;  // the weight past an odd end is zero
      interleave(row, s + 1 < n ? row + stride : row, v0, v1);
      for (int j = 0; j < NQ; j++) {
        S p = (S)(I{} + load<int32_t>(w.rounded[j] + s));
        x0[j] = dot(x0[j], v0, p);
        x1[j] = dot(x1[j], v1, p);
      }
    }
    for (int j = 0; j < NQ; j++) {
      float* out = y + j * D + c * kChunk;
      save(out, load<F>(out) * w.shrink[j] + to_float(x0[j]) * w.factor[j]);
      save(out + W, load<F>(out + W) * w.shrink[j] + to_float(x1[j]) * w.factor[j]);
    }
  }
}

template <class V, int NQ>
void values_float(const char* rows, int64_t stride, int64_t n, const Weights& w, int64_t D, float* y) {
  constexpr int kSums = NQ == 1 ? 4 : NQ == 2 ? 2 : 1;  // enough sums in flight to hide the latency
  for (int64_t c = 0; c < D / kChunk; c++) {
    F x[kSums][NQ] = {}, z[kSums][NQ] = {};
    auto add = [&](int u, int64_t s) {
      typename V::Chunk v = V::load_chunk(rows + s * stride, c);
      for (int j = 0; j < NQ; j++) {
        x[u][j] += v.x * w.score[j][s];
        z[u][j] += v.y * w.score[j][s];
      }
    };
    int64_t s = 0;
    for (; s + kSums <= n; s += kSums)
      for (int u = 0; u < kSums; u++) add(u, s + u);
    for (; s < n; s++) add(0, s);
    for (int u = 1; u < kSums; u++)
      for (int j = 0; j < NQ; j++) x[0][j] += x[u][j], z[0][j] += z[u][j];
    for (int j = 0; j < NQ; j++) {
      float* out = y + j * D + c * kChunk;
      save(out, load<F>(out) * w.shrink[j] + x[0][j] * w.factor[j]);
      save(out + W, load<F>(out + W) * w.shrink[j] + z[0][j] * w.factor[j]);
    }
  }
}

struct Tile {  // n slots of one head
  const char *k, *v;
  int64_t k_stride, v_stride, n;
  alignas(64) float k_scales[kTile], v_scales[kTile];  // zero past n
};

void load_scales(const View& scales, int64_t b, int64_t h, int64_t first, int64_t n, float* out) {
  if (!scales.data) return;
  const char* p = scales.at(b, h, first);
  for (int64_t s = 0; s < n; s++) out[s] = from_bfloat16(*(const uint16_t*)(p + s * scales.s));
  for (int64_t s = n; s < kTile && s < n + W; s++) out[s] = 0;
}

template <class K, int NQ> void scores_of(const Attention& a, const Tile& t, const float* q, int64_t j, void* out) {
  const void* block = (const typename K::Query*)q + j * a.D;
  if (a.D == 64) return scores<K, NQ, 64>(t.k, t.k_stride, t.n, block, a.D, out);
  if (a.D == 128) return scores<K, NQ, 128>(t.k, t.k_stride, t.n, block, a.D, out);
  scores<K, NQ, 0>(t.k, t.k_stride, t.n, block, a.D, out);
}

// NQ queries, from query j of the item on, meet a tile.  Query j is token j / G, so its last slot is known from j.
template <int NQ>
void attend_block(const Attention& a, const Tile& t, int64_t j, int64_t seen_by_first, float* part, Weights& w) {
  int64_t N = a.queries();
  float *top = part + j, *total = top + N, *mul = total + N, *y = part + 3 * N + j * a.D, *q = part + (3 + a.D) * N;
  if (a.k_kind == kInt8) scores_of<Int8, NQ>(a, t, q, j, w.score);
  else if (a.k_kind == kBFloat16) scores_of<BFloat16, NQ>(a, t, q, j, w.score);
  else scores_of<Float32, NQ>(a, t, q, j, w.score);
  bool int_k = a.k_kind == kInt8, int_v = a.v_kind == kInt8;
  auto step = int_k ? int_v ? softmax<true, true> : softmax<true, false>
                    : int_v ? softmax<false, true> : softmax<false, false>;
  for (int i = 0; i < NQ; i++) {
    int64_t seen = seen_by_first + (j + i) / a.G;
    if (seen > 0) {
      step(w, i, t.n, seen < t.n ? seen : t.n, mul[i], t.k_scales, t.v_scales, top[i], total[i]);
    } else {
      memset(w.score[i], 0, sizeof w.score[i]);
      memset(w.rounded[i], 0, sizeof w.rounded[i]);
      w.shrink[i] = 1;
      w.factor[i] = 0;
    }
  }
  if (a.v_kind == kInt8) values_int8<NQ>(t.v, t.v_stride, t.n, w, a.D, y);
  else if (a.v_kind == kBFloat16) values_float<BFloat16, NQ>(t.v, t.v_stride, t.n, w, a.D, y);
  else values_float<Float32, NQ>(t.v, t.v_stride, t.n, w, a.D, y);
}

// The item's queries as its K wants them, with the factor that makes a score an exponent of two.
void load_queries(const Attention& a, int64_t b, int64_t h, float* mul, float* prepared) {
  float row[kMaxHeadDim];
  float to_exponent = 1.44269504f / std::sqrt((float)a.D);
  for (int64_t j = 0; j < a.queries(); j++) {
    load_row(a.q.at(b, h * a.G + j % a.G, j / a.G), a.q.d, a.q_kind, a.D, row);
    mul[j] = to_exponent;
    if (a.k_kind == kInt8) {
      float scale = largest_magnitude(row, a.D) / 32767;
      scale = scale > 1e-30f ? scale : 1e-30f;
      mul[j] *= scale;
      int16_t* out = (int16_t*)prepared + j * a.D;
      float up = 1 / scale;
      for (int64_t d = 0; d < a.D; d++) {
        float x = row[d] * up;
        out[d] = (int16_t)(int32_t)(x + (x < 0 ? -0.5f : 0.5f));
      }
    } else {
      for (int64_t d = 0; d < a.D; d++) prepared[j * a.D + place(a.k_kind, d)] = row[d];
    }
  }
}

void attend(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t last, float* part) {
  int64_t N = a.queries(), blocks = (N + kBlock - 1) / kBlock;
  for (int64_t j = 0; j < N; j++) part[j] = -INFINITY;
  load_queries(a, b, h, part + 2 * N, part + (3 + a.D) * N);
  memset(part + N, 0, N * sizeof(float));
  memset(part + 3 * N, 0, N * a.D * sizeof(float));
  Tile t;
  Weights w;
  t.k_stride = a.k.s;
  t.v_stride = a.v.s;
  for (int64_t s = first; s < last; s += kTile) {
    t.n = last - s < kTile ? last - s : kTile;
    t.k = a.k.at(b, h, s);
    t.v = a.v.at(b, h, s);
    load_scales(a.k_scales, b, h, s, t.n, t.k_scales);
    load_scales(a.v_scales, b, h, s, t.n, t.v_scales);
    int64_t seen = a.start[b] + 1 - s;
    for (int64_t i = 0; i < blocks; i++) {  // blocks of nearly equal size
      int64_t j = i * N / blocks, size = (i + 1) * N / blocks - j;
      if (size == 1) attend_block<1>(a, t, j, seen, part, w);
      else if (size == 2) attend_block<2>(a, t, j, seen, part, w);
      else if (size == 3) attend_block<3>(a, t, j, seen, part, w);
      else attend_block<4>(a, t, j, seen, part, w);
    }
  }
}

// The parts of (b, h), in order, become its outputs.
void combine(const Attention& a, int64_t b, int64_t h, int64_t parts, float* part) {
  int64_t N = a.queries(), step = a.part_floats();
  for (int64_t j = 0; j < N; j++) {
    float top = -INFINITY, total = 0, row[kMaxHeadDim] = {};
    for (int64_t i = 0; i < parts; i++) top = top > part[i * step + j] ? top : part[i * step + j];
    for (int64_t i = 0; i < parts; i++) {
      const float *p = part + i * step, *y = p + 3 * N + j * a.D;
      float weight = exp2(p[j] - top);
      total += weight * p[N + j];
      for (int64_t d = 0; d < a.D; d += W) save(row + d, load<F>(row + d) + load<F>(y + d) * weight);
    }
    char* out = a.out.at(b, h * a.G + j % a.G, j / a.G);
    for (int64_t d = 0; d < a.D; d++) {
      float x = row[place(a.v_kind, d)] / total;
      if (a.q_kind == kFloat32) save(out + d * 4, x);
      else save(out + d * 2, to_bfloat16(x));
    }
  }
}

void store_row(const float* x, Kind kind, float scale, int64_t stride, int64_t D, char* out) {
  for (int64_t d = 0; d < D; d++) {
    if (kind == kFloat32) save(out + d * stride, x[d]);
    if (kind == kBFloat16) save(out + d * stride, to_bfloat16(x[d]));
  }
  if (kind != kInt8) return;
  const float shift = 12582912.f;  // rounds to integers, half to even
  int8_t* bytes = (int8_t*)out;
  for (int64_t d = 0; d < D; d++) {
    float v = (x[d] / scale + shift) - shift;
    v = v < -127 ? -127 : v;
    v = v > 127 ? 127 : v;
    bytes[d] = (int8_t)(int32_t)v;
  }
}

// The quantizer of kv_cache.py, bit for bit.
void store(const Store& a, int64_t first_row, int64_t last_row) {
  float row[kMaxHeadDim];
  for (int64_t r = first_row; r < last_row; r++) {
    int64_t b = r / a.T, t = r % a.T, slot = a.start[b] + t;
    float most = 0;
    if (a.kind == kInt8 && !a.per_head) {
      for (int64_t h = 0; h < a.H; h++) {
        load_row(a.x.at(b, h, t), a.x.d, a.x_kind, a.D, row);
        float m = largest_magnitude(row, a.D);
        most = most > m ? most : m;
      }
    }
    for (int64_t h = 0; h < a.H; h++) {
      float scale = 1;
      load_row(a.x.at(b, h, t), a.x.d, a.x_kind, a.D, row);
      if (a.kind == kInt8) {
        if (a.per_head) most = largest_magnitude(row, a.D);
        scale = most / 127;
        uint16_t bits = to_bfloat16(scale > 1e-8f ? scale : 1e-8f);
        scale = from_bfloat16(bits);
        if (h == 0 || a.per_head) save(a.scales.at(b, h, slot), bits);
      }
      store_row(row, a.kind, scale, a.values.d, a.D, a.values.at(b, h, slot));
    }
  }
}

}  // namespace

extern "C" const Kernels GPT_LONG_KERNELS = {attend, combine, store};
