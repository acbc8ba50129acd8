// Decode attention over the quantized KV cache on the CPU: flash-decoding (Dao et al. 2023) in integers.
//
// Compiled once per instruction set, with GPT_LONG_KERNELS=name and the compiler's flags for it (they are in
// attention_cpu.py).  No header with inline functions that another file might share: none may be built with
// instructions that a machine lacks.
//
// One work item is (row b, head h, a part of the slots); it reads its K and V once, for all G*T queries:
//   scores   a query rounded to 16 bits (a scale each) times K's int8, summed in int32
//   softmax  online, in float32, by tiles; K's scale multiplies the scores, V's the probabilities
//   values   probability times V's scale, rounded to 16 bits of the tile's largest, times V, summed in int32
// attention_cpu_int8.h has the integer steps.  A 16-bit cache takes the same ones in float32; 4-bit rows become int8, a
// tile at a time, where they are not met as they are stored.
#include "attention_cpu_int8.h"
#include "attention_cpu_packed.h"
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#include "attention_cpu_avx2.h"
#endif

#include <cmath>
#include <type_traits>

namespace {

inline void load_row(const char* p, int64_t stride, Kind kind, int64_t D, float* out) {
  if (kind == kFloat32 && stride == 4) {
    memcpy(out, p, 4 * D);
  } else if (kind == kFloat32) {
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
  return greatest(top);
}

// How values are read, kValues of a row at a time.  A kind is free to take them out of order: place(d) tells
// where value d of a row ends up, and queries and outputs are kept in that order.  kRun values stay neighbours.
struct Float32 {
  typedef F Sum;
  typedef float Score;
  typedef float Query;
  typedef float Stored;
  static constexpr bool kMeetsPacked = false;
  static constexpr int kValues = 2 * W, kRun = 16;
  struct Chunk { F x, y; };
  static Chunk load_chunk(const char* row) { return {load<F>(row), load<F>(row + 4 * W)}; }
  static Chunk query(const Query* q) { return load_chunk((const char*)q); }
  static void settle(Chunk& c) { SETTLE(c.x); SETTLE(c.y); }
  static Sum add(Sum sum, Chunk k, Chunk q) { return sum + k.x * q.x + k.y * q.y; }
  static int64_t place(int64_t d) { return d; }
};
struct BFloat16 : Float32 {  // even values, then odd ones
  typedef uint16_t Stored;
  static constexpr int kRun = 1;
  static Chunk load_chunk(const char* row) {
    Chunk c;
    load_bfloat16_pairs(row, c.x, c.y);
    return c;
  }
  static int64_t place(int64_t d) { return d / kValues * kValues + d % 2 * W + d % kValues / 2; }
};
// Calls f with the class of a kind.
template <class Call> inline void with_kind(Kind kind, const Call& f) {
  if (kind == kInt8) f(Int8());
  else if (kind == kBFloat16) f(BFloat16());
  else f(Float32());
}

// Scores of NQ queries q, each in the place of D floats, with eight rows: out [NQ][kTile], before any scale.
template <class K, int NQ>
INLINE void score_eight(const char* row, int64_t stride, const float* q, int64_t D, Fetch& fetch, char* out) {
  constexpr int64_t bytes = K::kValues * sizeof(typename K::Stored);
  typename K::Sum pairs[NQ][4];
  for (int i = 0; i < 4; i++, row += 2 * stride) {
    fetch.next(2 * D / K::kValues * bytes / 64);
    REREAD(q);
    typename K::Sum sum0[NQ], sum1[NQ];
    for (int j = 0; j < NQ; j++) sum0[j] = sum1[j] = typename K::Sum{};
    const char *row0 = row, *row1 = row + stride;
    for (int64_t c = 0; c < D; c += K::kValues, row0 += bytes, row1 += bytes) {
      typename K::Chunk k0 = K::load_chunk(row0), k1 = K::load_chunk(row1);
      for (int j = 0; j < NQ; j++) {
        typename K::Chunk x = K::query((const typename K::Query*)(q + j * D) + c);
        K::settle(x);
        sum0[j] = K::add(sum0[j], k0, x);
        sum1[j] = K::add(sum1[j], k1, x);
        SETTLE(sum0[j]);
        SETTLE(sum1[j]);
      }
    }
    for (int j = 0; j < NQ; j++) pairs[j][i] = add_pairs(sum0[j], sum1[j]);
  }
  for (int j = 0; j < NQ; j++) store_sums(pairs[j], (typename K::Score*)out + j * kTile);
}

// The same with the n filled rows of a tile.  FixedD (0: any) unrolls the loop over D.
template <class K, int NQ, int FixedD>
OUTLINE void scores(Tile& t, const float* q, int64_t D, void* out) {
  if (FixedD) D = FixedD;
  Fetch soon = t.v_soon;
  if (t.n < 8) {  // no row past the filled ones is read: the same row eight times, the next one overwrites
    REREAD(D);
    for (int64_t s = 0; s < t.n; s++)
      score_eight<K, NQ>(t.k + s * t.k_stride, 0, q, D, soon, (char*)out + s * sizeof(typename K::Score));
    return;
  }
  for (int64_t s = 0; s < t.n; s += 8) {
    s = s < t.n - 8 ? s : t.n - 8;
    score_eight<K, NQ>(t.k + s * t.k_stride, t.k_stride, q, D, soon, (char*)out + s * sizeof(typename K::Score));
  }
}

// The softmax step of NQ queries over a tile; query j sees seen[j] of its n scores, none if that is not positive.
template <int NQ, bool IntK, bool IntV>
OUTLINE void softmax(const Tile& t, const int64_t* seen, const float* mul, Weights& w, float* top, float* all) {
  const int64_t n = t.n;
  F most[NQ], sum[NQ], top_weight[NQ], lanes;
  float tile_top[NQ];
  int64_t all_see = seen[0];  // the first query sees the fewest
  for (int i = 0; i < W; i++) lanes[i] = i;
  for (int j = 0; j < NQ; j++) most[j] = F{} - INFINITY;
  for (int64_t s = 0; s < n; s += W) {
    F k_scale = IntK ? load<F>(t.k_scales + s) : F{};
    for (int j = 0; j < NQ; j++) {
      F x = IntK ? to_float(load<I>(w.score[j] + s)) * k_scale : load<F>(w.score[j] + s);  // but for mul[j]
      if (s + W > all_see) x = lanes < (float)(seen[j] - s) ? x : F{} - INFINITY;
      most[j] = largest(most[j], x);
      save(w.score[j] + s, x);
    }
  }
  for (int j = 0; j < NQ; j++) tile_top[j] = seen[j] > 0 ? greatest(most[j]) * mul[j] : 0;
  for (int j = 0; j < NQ; j++) {  // one at a time: an exponential takes many registers
    const float up = mul[j];
    F all_p = {}, most_p = F{} + 1e-30f;
    for (int64_t s = 0; s < n; s += W) {
      F p = exp2(load<F>(w.score[j] + s) * up - tile_top[j]);
      all_p += p;
      if (IntV) p *= load<F>(t.v_scales + s);
      if (IntV) most_p = largest(most_p, p);
      save(w.score[j] + s, p);
    }
    sum[j] = all_p, top_weight[j] = most_p;
  }
  for (int j = 0; j < NQ; j++) {
    float new_top = seen[j] > 0 && tile_top[j] > top[j] ? tile_top[j] : top[j];
    float relative = seen[j] > 0 ? exp2(tile_top[j] - new_top) : 0;
    w.shrink[j] = seen[j] > 0 ? exp2(top[j] - new_top) : 1;
    w.factor[j] = relative;
    if (IntV) {
      float weight = greatest(top_weight[j]);
      round_weights(w.score[j], 32767 / weight, n, w.rounded[j]);
      w.factor[j] *= weight / 32767;
    }
    all[j] = all[j] * w.shrink[j] + total(sum[j]) * relative;
    top[j] = new_top;
  }
}

template <class V, int NQ>
OUTLINE void values_float(Tile& t, const Weights& w, int64_t D, float* y) {
  constexpr int kSums = NQ == 1 ? 4 : NQ == 2 ? 2 : 1;  // enough sums in flight to hide the latency
  const char* rows = t.v;
  Fetch soon = t.k_soon;
  for (int64_t c = 0; c < D; c += V::kValues, rows += V::kValues * sizeof(typename V::Stored)) {
    F x[kSums][NQ], z[kSums][NQ];
    for (int u = 0; u < kSums; u++)
      for (int j = 0; j < NQ; j++) x[u][j] = z[u][j] = F{};
    auto add = [&](int u, int64_t s) {
      soon.next(1);
      typename V::Chunk v = V::load_chunk(rows + s * t.v_stride);
      for (int j = 0; j < NQ; j++) {
        x[u][j] += v.x * w.score[j][s];
        z[u][j] += v.y * w.score[j][s];
      }
    };
    int64_t s = 0;
    for (; s + kSums <= t.n; s += kSums)
      for (int u = 0; u < kSums; u++) add(u, s + u);
    for (; s < t.n; s++) add(0, s);
    for (int u = 1; u < kSums; u++)
      for (int j = 0; j < NQ; j++) x[0][j] += x[u][j], z[0][j] += z[u][j];
    add_values<NQ>(y + c, D, w, x[0], z[0]);
  }
  t.k_soon = soon;
}

// Scales of n slots; those of the tile that comes next are asked for.
void load_scales(const View& scales, int64_t b, int64_t h, int64_t first, int64_t n, const Slots& soon, float* out) {
  if (!scales.data) return;
  const char *p = scales.at(b, h, first), *next = scales.at(soon.b, soon.h, soon.first);
  if (scales.s == 2)
    for (int64_t i = 0; i < 2 * kTile; i += 64) __builtin_prefetch(next + i, 0, 2);
  int64_t s = 0;
  if (scales.s == 2)
    for (; s + W <= n; s += W) save(out + s, load_bfloat16(p + 2 * s));
  for (; s < n; s++) out[s] = from_bfloat16(*(const uint16_t*)(p + s * scales.s));
  for (; s % W; s++) out[s] = 0;
}

// NQ queries, from query j of the item on, meet a tile.  Query j is of token j / G, which tells what it sees.
template <int NQ>
void attend_block(const Attention& a, Tile& t, int64_t j, int64_t seen_by_first, float* part,
                  Weights& w) {
  int64_t N = a.queries();
  float *top = part + j, *total = top + N, *mul = total + N;
  if (j > 0) t.k_soon = t.v_soon = {t.k};
  float *y = part + 3 * N + j * a.D, *q = part + (3 + a.D) * N;
  with_kind(a.k_kind, [&](auto kind) {
    typedef decltype(kind) K;
    if constexpr (K::kMeetsPacked) {
      K::template scores<NQ>(t, q + j * a.D, a.D, w.score);
    } else {
      auto run = a.D == 64 ? scores<K, NQ, 64> : scores<K, NQ, 0>;
      run(t, q + j * a.D, a.D, w.score);
    }
  });
  bool int_k = a.k_kind == kInt8, int_v = a.v_kind == kInt8;
  auto step = int_k ? int_v ? softmax<NQ, true, true> : softmax<NQ, true, false>
                    : int_v ? softmax<NQ, false, true> : softmax<NQ, false, false>;
  int64_t seen[NQ];
  for (int i = 0; i < NQ; i++) seen[i] = seen_by_first + (j + i) / a.G;
  step(t, seen, mul, w, top, total);
  with_kind(a.v_kind, [&](auto kind) {
    typedef decltype(kind) V;
    if constexpr (V::kMeetsPacked)
      if (t.v_strong >= 0) return values_packed<NQ>(t, w, a.D, y);
    if constexpr (std::is_same_v<V, Int8>) values_int8<NQ>(t, w, a.D, y);
    else values_float<V, NQ>(t, w, a.D, y);
  });
}

// The item's queries as its K wants them, with the factor that makes a score an exponent of two.
template <class K>
void load_queries(const Attention& a, int64_t b, int64_t h, int64_t strong, float* mul, float* prepared) {
  float row[kMaxHeadDim];
  for (int64_t j = 0; j < a.queries(); j++) {
    load_row(a.q.at(b, h * a.G + j % a.G, j / a.G), a.q.d, a.q_kind, a.D, row);
    mul[j] = 1.44269504f / std::sqrt((float)a.D);
    float* out = prepared + j * a.D;
    if constexpr (std::is_same_v<K, Int8>) {
      int32_t rounded[kMaxHeadDim];
      float most = largest_magnitude(row, a.D), up = most > 1e-30f ? kQueryMost / most : 0;
      mul[j] *= (most > 1e-30f ? most : 1e-30f) / kQueryMost;  // not 0: it meets infinities
      for (int64_t d = 0; d < a.D; d += W) {
        F x = load<F>(row + d) * up;
        save(rounded + d, __builtin_convertvector(x + (x < 0 ? F{} - 0.5f : F{} + 0.5f), I));
      }
      K::store_query(rounded, a.D, strong, out);
    } else {
      for (int64_t d = 0; d < a.D; d++) out[K::place(d)] = row[d];
    }
  }
}

// Groups of queries times q_in, the matrix of their head: out [B, Hq, T, D].
void rotate(const Attention& a, int64_t first, int64_t last, float* out) {
  float rows[kTogether * kMaxPackedHeadDim], turned[kTogether * kMaxPackedHeadDim];
  for (int64_t i = first; i < last; i++) {
    int64_t t = i % a.T, h = i / a.T % a.H, b = i / a.T / a.H;
    for (int64_t g = 0, n; g < a.G; g += n) {
      n = a.G - g < kTogether ? a.G - g : kTogether;
      const int64_t head = h * a.G + g;
      for (int64_t r = 0; r < n; r++) load_row(a.q.at(b, head + r, t), a.q.d, a.q_kind, a.D, rows + r * a.D);
      times_matrix(rows, n, a.q_in + h * a.D * a.D, a.D, turned);
      for (int64_t r = 0; r < n; r++)
        memcpy(out + ((b * a.H * a.G + head + r) * a.T + t) * a.D, turned + r * a.D, a.D * sizeof(float));
    }
  }
}

void attend(const Attention& a, const Slots& now, const Slots& then, float* part) {
  const int64_t b = now.b, h = now.h, first = now.first, last = now.last;
  int64_t N = a.queries(), blocks = (N + kBlock - 1) / kBlock;
  for (int64_t j = 0; j < N; j++) part[j] = -INFINITY;
  bool unpack_k = a.k_strong >= 0 && !(Int8::kMeetsPacked && a.k_strong % 16 == 0);
  bool unpack_v = a.v_strong >= 0 && !Int8::meets_values(a.v_strong, a.D);
  with_kind(a.k_kind, [&](auto kind) {
    load_queries<decltype(kind)>(a, b, h, unpack_k ? -1 : a.k_strong, part + 2 * N, part + (3 + a.D) * N);
  });
  memset(part + N, 0, N * sizeof(float));
  memset(part + 3 * N, 0, N * a.D * sizeof(float));
  if (a.v_out && first == 0)  // `combine` will want it
    for (int64_t i = 0; i < a.D * a.D; i += 32) __builtin_prefetch(a.v_out + h * a.D * a.D + i, 0, 2);
  Tile t;
  Weights w;
  alignas(64) char k_rows[kTile * kMaxPackedHeadDim], v_rows[kTile * kMaxPackedHeadDim];
  t.k_strong = unpack_k ? -1 : a.k_strong;
  t.v_strong = unpack_v ? -1 : a.v_strong;
  t.k_stride = unpack_k ? a.D : a.k.s;
  t.v_stride = unpack_v ? a.D : a.v.s;
  int64_t k_bytes = a.D * bytes_of(a.k_kind), v_bytes = a.D * bytes_of(a.v_kind);  // that the loops go over
  if (t.k_strong >= 0) k_bytes = ((a.D + t.k_strong) / 2 + 15) & ~15;
  for (int64_t s = first; s < last; s += kTile) {
    t.n = last - s < kTile ? last - s : kTile;
    t.k = unpack_k ? k_rows : a.k.at(b, h, s);
    t.v = unpack_v ? v_rows : a.v.at(b, h, s);
    Slots soon = s + t.n < last ? Slots{b, h, s + t.n, last} : then;
    t.k_soon = {a.k.at(soon.b, soon.h, soon.first), a.k.s * 64 / v_bytes};
    t.v_soon = {unpack_v ? a.v.at(soon.b, soon.h, soon.first) : t.v, a.v.s * 64 / k_bytes};
    if (unpack_k) unpack_rows(a.k.at(b, h, s), a.k.s, t.n, a.k_strong, a.D, k_rows);
    if (unpack_v) unpack_rows(a.v.at(b, h, s), a.v.s, t.n, a.v_strong, a.D, v_rows);
    load_scales(a.k_scales, b, h, s, t.n, soon, t.k_scales);
    load_scales(a.v_scales, b, h, s, t.n, soon, t.v_scales);
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

void convert_row(const float* x, Kind kind, int64_t stride, int64_t D, char* out) {
  if (kind == kFloat32) {
    for (int64_t d = 0; d < D; d++) save(out + d * stride, x[d]);
  } else if (stride == 2) {
    for (int64_t d = 0; d < D; d++) ((uint16_t*)out)[d] = to_bfloat16(x[d]);
  } else {
    for (int64_t d = 0; d < D; d++) save(out + d * stride, to_bfloat16(x[d]));
  }
}

// Output of query j from the parts of its head, in order.
void combine_query(const Attention& a, int64_t j, int64_t parts, const float* part, float* out) {
  int64_t N = a.queries(), step = a.part_floats();
  float top = -INFINITY, total = 0, row[kMaxHeadDim];
  for (int64_t i = 0; i < parts; i++) top = top > part[i * step + j] ? top : part[i * step + j];
  memset(row, 0, a.D * sizeof(float));
  for (int64_t i = 0; i < parts; i++) {
    const float *p = part + i * step, *y = p + 3 * N + j * a.D;
    float weight = exp2(p[j] - top);
    total += weight * p[N + j];
    for (int64_t d = 0; d < a.D; d += W) save(row + d, load<F>(row + d) + load<F>(y + d) * weight);
  }
  float scale = 1 / total;
  with_kind(a.v_kind, [&](auto kind) {
    typedef decltype(kind) V;
    for (int64_t d = 0; d < a.D; d += V::kRun)
      for (int i = 0; i < V::kRun; i++) out[d + i] = row[V::place(d) + i] * scale;
  });
}

// The parts of (b, h) become its outputs.
void combine(const Attention& a, int64_t b, int64_t h, int64_t parts, float* part) {
  float rows[kTogether * kMaxHeadDim], turned[kTogether * kMaxPackedHeadDim];
  for (int64_t j = 0, N = a.queries(), n; j < N; j += n) {
    n = N - j < kTogether ? N - j : kTogether;
    for (int64_t r = 0; r < n; r++) combine_query(a, j + r, parts, part, rows + r * a.D);
    if (a.v_out) times_matrix(rows, n, a.v_out + h * a.D * a.D, a.D, turned);
    for (int64_t r = 0; r < n; r++)
      convert_row((a.v_out ? turned : rows) + r * a.D, a.out_kind, a.out.d, a.D,
                  a.out.at(b, h * a.G + (j + r) % a.G, (j + r) / a.G));
  }
}

// The quantizer of kv_cache.py: int8 bit for bit, 4 bits but for the order of sums.
void store(const Store& a, int64_t first, int64_t last) {
  float row[kMaxHeadDim], own[kMaxHeadDim];
  for (int64_t i = first; i < last; i++) {
    int64_t h = i % a.H, t = i / a.H % a.T, b = i / a.H / a.T, slot = a.start[b] + t;
    if (a.one_scale && h > 0) continue;  // the first head does the work of all
    int64_t end = a.one_scale ? a.H : h + 1;
    float most = 0;
    for (int64_t other = 0; a.one_scale && other < a.H; other++) {
      load_row(a.x.at(b, other, t), a.x.d, a.x_kind, a.D, row);
      float m = largest_magnitude(row, a.D);
      most = most > m ? most : m;
    }
    for (; h < end; h++) {
      char* out = a.values.at(b, h, slot);
      load_row(a.x.at(b, h, t), a.x.d, a.x_kind, a.D, row);
      if (a.strong >= 0) {
        times_matrix(row, 1, a.basis + h * a.D * a.D, a.D, own);
        save(a.scales.at(b, h, slot), store_packed(own, a.strong, a.D, a.values.d, out));
      } else if (a.kind != kInt8) {
        convert_row(row, a.kind, a.values.d, a.D, out);
      } else {
        if (!a.one_scale) most = largest_magnitude(row, a.D);
        uint16_t scale = to_bfloat16(most / 127 > 1e-8f ? most / 127 : 1e-8f);
        save(a.scales.at(b, h, slot), scale);
        store_int8(row, from_bfloat16(scale), a.values.d, a.D, out);
      }
    }
  }
}

}  // namespace

extern "C" const Kernels GPT_LONG_KERNELS = {rotate, attend, combine, store};
