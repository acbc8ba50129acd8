// int8 keys and values against 16-bit factors, in exact integers: queries of up to kQueryMost, probabilities of up
// to 32767.  int32 cannot overflow: kQueryMost * 127 * 512 < 2^31, and no sum is longer than 512 (D, kTile).
#pragma once
#include "attention_cpu_tile.h"

namespace {

constexpr int kQueryMost = 127 * 256 + 127;  // so that both bytes of a query are signed ones

#if defined(__AVX512VNNI__)
// One instruction multiplies unsigned bytes by signed ones and adds four neighbours to a 32-bit lane.  A factor is
// two bytes, 256 * high + low, met one after the other: bytes of the cache need no widening, and no sum across lanes.
//   scores   lanes are slots; keys, made unsigned by adding 128, meet signed bytes of the query
//   values   lanes are values of a row, four slots to a lane, and meet unsigned bytes of the probabilities
inline I dot_bytes(I acc, I x, I y) { return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)y); }
inline I broadcast(const void* four) { return I{} + load<int32_t>(four); }

// Keys take 256 bits at a time: on AMD's double-pumped units loads that gather rows cost half as much.
typedef int32_t Eight __attribute__((vector_size(32)));
inline Eight dot_bytes(Eight acc, Eight x, Eight y) {
  return (Eight)_mm256_dpbusd_epi32((__m256i)acc, (__m256i)x, (__m256i)y);
}

// Indices to kLevels, the low four bits of every byte, as levels + 128.
inline Eight levels_above(Eight index) {
  const __m256i above = _mm256_broadcastsi128_si256(_mm_xor_si128(load<__m128i>(kLevels), _mm_set1_epi8(-128)));
  return (Eight)_mm256_shuffle_epi8(above, (__m256i)(index & 0x0f0f0f0f));
}

// Bytes 0 to 15 of eight rows, four to a vector: lane s is of row s.
INLINE void across(const char* rows, int64_t stride, Eight out[4]) {
  __m256i x[4], low[2], high[2];
  for (int i = 0; i < 4; i++) {
    const char* row = rows + i * stride;
    x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(row)), load<__m128i>(row + 4 * stride), 1);
  }
  for (int i = 0; i < 2; i++) {
    low[i] = _mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    high[i] = _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
  out[0] = (Eight)_mm256_unpacklo_epi64(low[0], low[1]);
  out[1] = (Eight)_mm256_unpackhi_epi64(low[0], low[1]);
  out[2] = (Eight)_mm256_unpacklo_epi64(high[0], high[1]);
  out[3] = (Eight)_mm256_unpackhi_epi64(high[0], high[1]);
}

struct Int8 {
  static constexpr bool kMeetsPacked = true;  // 4-bit rows are met as they are stored
  static constexpr int kRun = 4;
  static bool meets_values(int64_t strong, int64_t) { return strong == 8; }
  template <int NQ> static void scores(Tile& t, const float* q, int64_t D, void* out);
  // Where value d of an output ends up.
  static int64_t place(int64_t d) { return (d & ~63) + (d >> 2 & 3) * 16 + (d >> 4 & 3) * 4 + (d & 3); }

  // D high bytes, D low ones, and what 128 too many in every key add, in the place of D floats.
  static void store_query(const int32_t* q, int64_t D, int64_t, float* out) {
    auto* bytes = (int8_t*)out;
    int32_t sum = 0;
    for (int64_t d = 0; d < D; d++) {
      bytes[D + d] = (int8_t)q[d];
      bytes[d] = (int8_t)((q[d] - bytes[D + d]) >> 8);
      sum += q[d];
    }
    sum = (int32_t)(128u * (uint32_t)sum);
    save(bytes + 2 * D, sum);
  }
};

constexpr int kVectors = 2;  // of eight slots that share a query's bytes

// Sums of NQ queries and 8 * kVectors rows.
template <int NQ> struct Sums {
  const char* rows;
  int64_t stride;
  const float* q;
  int64_t D;
  Eight high[kVectors][NQ] = {}, low[kVectors][NQ] = {};

  INLINE void meet(const Eight* key, int64_t d) {  // values d .. d+3 of the rows
    for (int j = 0; j < NQ; j++) {
      const char* query = (const char*)(q + j * D) + d;
      Eight upper = Eight{} + load<int32_t>(query), lower = Eight{} + load<int32_t>(query + D);
      for (int r = 0; r < kVectors; r++) {
        high[r][j] = dot_bytes(high[r][j], key[r], upper);
        low[r][j] = dot_bytes(low[r][j], key[r], lower);
      }
    }
  }
  // Bytes c + 4 * First to c + 15 of the rows: values of this number or, packed, also those `half` further on.
  template <int First, bool Packed> INLINE void add(int64_t c, int64_t half, Fetch& fetch) {
    Eight x[kVectors][4], key[kVectors];
    fetch.next(2 * kVectors);
    for (int r = 0; r < kVectors; r++) across(rows + c + 8 * r * stride, stride, x[r]);
#pragma GCC unroll 4
    for (int i = First; i < 4; i++) {
      for (int r = 0; r < kVectors; r++) key[r] = Packed ? levels_above(x[r][i]) : x[r][i] ^ (int32_t)0x80808080;
      meet(key, c + 4 * i);
      if (!Packed) continue;
      for (int r = 0; r < kVectors; r++) key[r] = levels_above(x[r][i] >> 4);
      meet(key, c + 4 * i + half);
    }
  }
};

// Scores of NQ queries with 8 * kVectors rows.  Of a packed row the first `strong` bytes are values, by sixteens.
template <int NQ, bool Packed>
INLINE void score_rows(const char* rows, int64_t stride, const float* q, int64_t D, int64_t strong, Fetch& fetch,
                       char* out) {
  const int64_t half = (D - strong) / 2, whole = Packed ? strong : D;
  Sums<NQ> sums = {rows, stride, q, D};
  int64_t c = 0;
  for (; c < whole; c += 16) sums.template add<0, false>(c, 0, fetch);
  if (Packed) {
    for (; c + 16 <= strong + half; c += 16) sums.template add<0, true>(c, half, fetch);
    if (c < strong + half) sums.template add<2, true>(c - 8, half, fetch);  // `half` is a multiple of 8
  }
  for (int r = 0; r < kVectors; r++)
    for (int j = 0; j < NQ; j++) {
      Eight sum = (sums.high[r][j] << 8) + sums.low[r][j] - load<int32_t>((const char*)(q + j * D) + 2 * D);
      save(out + (j * kTile + 8 * r) * 4, sum);
    }
}

// The same with the n filled rows of a tile: out [NQ][kTile], before any scale.  FixedD (0: any) unrolls the loops,
// over packed rows of kStrong.
template <int NQ, bool Packed, int FixedD> OUTLINE void scores_int8(Tile& t, const float* q, int64_t D, void* out) {
  constexpr int64_t kRows = 8 * kVectors;
  if (FixedD) D = FixedD;
  const int64_t strong = FixedD ? kStrong : t.k_strong, bytes = Packed ? (D + strong) / 2 : D;
  Fetch soon = t.v_soon;
  if (t.n < kRows) {  // from a copy: no row past the filled ones is read
    alignas(64) char rows[kRows * kMaxHeadDim];
    for (int64_t s = 0; s < t.n; s++) memcpy(rows + s * bytes, t.k + s * t.k_stride, bytes);
    return score_rows<NQ, Packed>(rows, bytes, q, D, strong, soon, (char*)out);
  }
  for (int64_t s = 0; s < t.n; s += kRows) {
    s = s < t.n - kRows ? s : t.n - kRows;
    score_rows<NQ, Packed>(t.k + s * t.k_stride, t.k_stride, q, D, strong, soon, (char*)out + s * 4);
  }
}

template <int NQ> void Int8::scores(Tile& t, const float* q, int64_t D, void* out) {
  bool usual = t.k_strong == kStrong;
  auto run = t.k_strong < 0 ? scores_int8<NQ, false, 0> : usual && D == 64 ? scores_int8<NQ, true, 64>
             : usual && D == 128 ? scores_int8<NQ, true, 128> : scores_int8<NQ, true, 0>;
  run(t, q, D, out);
}

// n probabilities times `up`, rounded: high bytes, and kTile bytes later low ones.
inline void round_weights(const float* p, float up, int64_t n, int16_t* rounded) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  auto bytes = [&](I a, I b) { return _mm512_permutexvar_epi32(order, _mm512_packus_epi16((__m512i)a, (__m512i)b)); };
  for (int64_t s = 0; s < n; s += 64) {  // what lies behind n matters to nobody
    S x[2];
    for (int i = 0; i < 2; i++) {
      I a = __builtin_convertvector(load<F>(p + s + 32 * i) * up + 0.5f, I);
      I b = __builtin_convertvector(load<F>(p + s + 32 * i + 16) * up + 0.5f, I);
      x[i] = (S)_mm512_packus_epi32((__m512i)a, (__m512i)b);
    }
    save((char*)rounded + s, bytes((I)(x[0] >> 8), (I)(x[1] >> 8)));
    save((char*)rounded + kTile + s, bytes((I)(x[0] & 255), (I)(x[1] & 255)));
  }
}

// Calls add(s, four rows) for slots s .. s+3; past the end, where weights are zero, it repeats a row.
template <class Add> INLINE void by_four(const char* rows, int64_t stride, int64_t n, Fetch& fetch, const Add& add) {
  int64_t s = 0;
  for (; s + 4 <= n; s += 4, rows += 4 * stride) {
    fetch.next(2);
    add(s, rows, rows + stride, rows + 2 * stride, rows + 3 * stride);
  }
  if (s < n) add(s, rows, rows + (s + 1 < n ? stride : 0), rows + (s + 2 < n ? 2 * stride : 0), rows);
}

// Weighted sums of 32 values, 4 slots to a lane.
template <int NQ> struct WeightedSums {
  I high[2][NQ], low[2][NQ];
  INLINE WeightedSums() {
    for (int j = 0; j < NQ; j++) high[0][j] = high[1][j] = low[0][j] = low[1][j] = I{};
  }
  INLINE void add(const Weights& w, int64_t s, I first, I second) {
    for (int j = 0; j < NQ; j++) {
      const char* p = (const char*)w.rounded[j] + s;
      I upper = broadcast(p), lower = broadcast(p + kTile);
      high[0][j] = dot_bytes(high[0][j], upper, first);
      high[1][j] = dot_bytes(high[1][j], upper, second);
      low[0][j] = dot_bytes(low[0][j], lower, first);
      low[1][j] = dot_bytes(low[1][j], lower, second);
    }
  }
  I sum(int i, int j) const { return (high[i][j] << 8) + low[i][j]; }
};

// 32 of 64 values of the rows: of every 16 the first 8 (Half 0) or the last.
template <int NQ, int Half>
OUTLINE void values_of_half(Tile& t, const Weights& w, int64_t D, const char* rows, float* y) {
  WeightedSums<NQ> sums;
  Fetch soon = t.k_soon;
  by_four(rows, t.v_stride, t.n, soon, [&](int64_t s, const char* a, const char* b, const char* c, const char* d) {
    auto bytes = [](const char* p, const char* q) {
      __m512i x = load<__m512i>(p), y = load<__m512i>(q);
      return Half ? _mm512_unpackhi_epi8(x, y) : _mm512_unpacklo_epi8(x, y);
    };
    __m512i ab = bytes(a, b), cd = bytes(c, d);
    sums.add(w, s, (I)_mm512_unpacklo_epi16(ab, cd), (I)_mm512_unpackhi_epi16(ab, cd));
  });
  t.k_soon = soon;
  F first[NQ], second[NQ];
  for (int j = 0; j < NQ; j++) first[j] = to_float(sums.sum(0, j)), second[j] = to_float(sums.sum(1, j));
  add_values<NQ>(y, D, w, first, second);
}
template <int NQ> void values_int8(Tile& t, const Weights& w, int64_t D, float* y) {
  for (int64_t c = 0; c < D; c += 64) {
    values_of_half<NQ, 0>(t, w, D, t.v + c, y + c);
    values_of_half<NQ, 1>(t, w, D, t.v + c, y + c + 32);
  }
}

// Packed values, of which the first eight are bytes.  The nibbles and the last four of the bytes go in blocks of 32
// bytes: first the low nibbles, then, kept in `mixed` by fours of slots, the high ones.  The first block's four bytes
// count as low ones, and the row's first four take their place among the high ones.
template <int NQ, bool High, bool First>
OUTLINE void values_of_nibbles(Tile& t, const Weights& w, const char* rows, char* mixed, int32_t* sums, int64_t value) {
  WeightedSums<NQ> all;
  Fetch soon = t.k_soon;
  const __m512i levels = _mm512_broadcast_i32x4(load<__m128i>(kLevels));
  const __m128i turn = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  by_four(rows, t.v_stride, t.n, soon, [&](int64_t s, const char* a, const char* b, const char* c, const char* d) {
    char* kept = mixed + 32 * s;
    I first, second;
    if (High) {
      first = load<I>(kept), second = load<I>(kept + 64);
    } else {
      __m256i x = load<__m256i>(a), y = load<__m256i>(b), z = load<__m256i>(c), u = load<__m256i>(d);
      __m256i ab0 = _mm256_unpacklo_epi8(x, y), ab1 = _mm256_unpackhi_epi8(x, y);
      __m256i cd0 = _mm256_unpacklo_epi8(z, u), cd1 = _mm256_unpackhi_epi8(z, u);
      auto both = [](__m256i x, __m256i y) { return (I)_mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1); };
      first = both(_mm256_unpacklo_epi16(ab0, cd0), _mm256_unpackhi_epi16(ab0, cd0));  // bytes 0-3 16-19 4-7 20-23
      second = both(_mm256_unpacklo_epi16(ab1, cd1), _mm256_unpackhi_epi16(ab1, cd1));  // 8-11 24-27 12-15 28-31
      save(kept, first);
      save(kept + 64, second);
    }
    auto level = [&](I x, __mmask64 nibbles) {
      I index = (High ? x >> 4 : x) & 0x0f0f0f0f;
      return (I)_mm512_mask_shuffle_epi8((__m512i)x, nibbles, levels, (__m512i)index);
    };
    all.add(w, s, level(first, First ? ~0xffffull : ~0ull), level(second, ~0ull));
    if (!High && First) {
      auto four = [](const char* p) { return load<int32_t>(p - 4); };
      save(kept, _mm_shuffle_epi8(_mm_setr_epi32(four(a), four(b), four(c), four(d)), turn));
    }
  });
  t.k_soon = soon;
  for (int j = 0; j < NQ; j++, sums += kMaxPackedHeadDim)
    for (int i = 0; i < 2; i++) {
      __m512i sum = (__m512i)all.sum(i, j);
      auto keep = [&](int64_t at, __m128i four) { save(sums + Int8::place(at), four); };
      keep(High && First && i == 0 ? 0 : value + 8 * i, _mm512_castsi512_si128(sum));
      keep(value + 8 * i + 16, _mm512_extracti32x4_epi32(sum, 1));
      keep(value + 8 * i + 4, _mm512_extracti32x4_epi32(sum, 2));
      keep(value + 8 * i + 20, _mm512_extracti32x4_epi32(sum, 3));
    }
}
template <int NQ> void values_packed(Tile& t, const Weights& w, int64_t D, float* y) {
  alignas(64) int32_t sums[NQ][kMaxPackedHeadDim];
  alignas(64) char mixed[32 * kTile];
  for (int64_t c = 0; c < D / 2; c += 32) {
    auto low = c == 0 ? values_of_nibbles<NQ, false, true> : values_of_nibbles<NQ, false, false>;
    auto high = c == 0 ? values_of_nibbles<NQ, true, true> : values_of_nibbles<NQ, true, false>;
    low(t, w, t.v + 4 + c, mixed, sums[0], 4 + c);
    high(t, w, t.v + 4 + c, mixed, sums[0], D / 2 + c);
  }
  add_sums<NQ>(y, D, w, sums);
}

#elif !defined(__AVX2__)  // attention_cpu_avx2.h has them with AVX2
struct Int8 {  // bytes become 16 bits wide: one instruction multiplies and adds two neighbours
  typedef I Sum;
  typedef int32_t Score;
  typedef int16_t Query;
  typedef int8_t Stored;
  static constexpr bool kMeetsPacked = false;  // 4-bit rows become int8 rows first
  static bool meets_values(int64_t, int64_t) { return false; }
  static constexpr int kValues = 2 * W, kRun = 16;
  struct Chunk { S x; };
  static Chunk load_chunk(const char* row) { return {widen(row)}; }
  static Chunk query(const Query* q) { return {load<S>(q)}; }
  static void settle(Chunk& c) { SETTLE(c.x); }
  static Sum add(Sum sum, Chunk k, Chunk q) { return dot(sum, k.x, q.x); }
  static int64_t place(int64_t d) { return d; }
  static void store_query(const int32_t* q, int64_t D, int64_t, float* out) {
    for (int64_t d = 0; d < D; d++) ((Query*)out)[d] = (Query)q[d];
  }
};

// n probabilities times `up`, rounded.
inline void round_weights(const float* p, float up, int64_t n, int16_t* rounded) {
  for (int64_t s = 0; s < n; s += W) {
    I whole = __builtin_convertvector(load<F>(p + s) * up + 0.5f, I);
    save(rounded + s, __builtin_convertvector(whole, Half));
  }
}

template <int NQ>
OUTLINE void values_int8(Tile& t, const Weights& w, int64_t D, float* y) {
  for (int64_t c = 0; c < D; c += Int8::kValues) {
    I x0[NQ], x1[NQ];
    for (int j = 0; j < NQ; j++) x0[j] = x1[j] = I{};
    auto add = [&](int64_t s, const char* row, const char* next) {
      S v0, v1;
      interleave(row, next, v0, v1);
      for (int j = 0; j < NQ; j++) {
        S p = (S)(I{} + load<int32_t>(w.rounded[j] + s));
        x0[j] = dot(x0[j], v0, p);
        x1[j] = dot(x1[j], v1, p);
      }
    };
    const char* row = t.v + c;
    int64_t s = 0;
    for (; s + 2 <= t.n; s += 2, row += 2 * t.v_stride) add(s, row, row + t.v_stride);
    if (s < t.n) add(s, row, row);  // the weight past an odd end is zero
    F first[NQ], second[NQ];
    for (int j = 0; j < NQ; j++) first[j] = to_float(x0[j]), second[j] = to_float(x1[j]);
    add_values<NQ>(y + c, D, w, first, second);
  }
}
#endif

}  // namespace
