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

// Bytes 0 to 15 of sixteen rows, four to a vector: lane s is of row s.
INLINE void across(const char* rows, int64_t stride, I out[4]) {
  __m512i x[4], low[2], high[2];
  for (int i = 0; i < 4; i++) {
    const char* row = rows + i * stride;
    x[i] = _mm512_broadcast_i32x4(load<__m128i>(row));
    x[i] = _mm512_mask_broadcast_i32x4(x[i], 0x00f0, load<__m128i>(row + 4 * stride));
    x[i] = _mm512_mask_broadcast_i32x4(x[i], 0x0f00, load<__m128i>(row + 8 * stride));
    x[i] = _mm512_mask_broadcast_i32x4(x[i], 0xf000, load<__m128i>(row + 12 * stride));
  }
  for (int i = 0; i < 2; i++) {
    low[i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    high[i] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
  out[0] = (I)_mm512_unpacklo_epi64(low[0], low[1]);
  out[1] = (I)_mm512_unpackhi_epi64(low[0], low[1]);
  out[2] = (I)_mm512_unpacklo_epi64(high[0], high[1]);
  out[3] = (I)_mm512_unpackhi_epi64(high[0], high[1]);
}

struct Int8 {
  typedef int32_t Score;
  static constexpr int kRows = 16;
  // Where value d of an output ends up.
  static int64_t place(int64_t d) { return (d & ~63) + (d >> 2 & 3) * 16 + (d >> 4 & 3) * 4 + (d & 3); }

  // D high bytes, D low ones, and what 128 too many in every key add, in the place of D floats.
  static void store_query(const int32_t* q, int64_t D, float* out) {
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

  template <int NQ>
  static INLINE void score_sixteen(const char* rows, int64_t stride, const float* q, int64_t D, Fetch& fetch,
                                   char* out) {
    I high[NQ], low[NQ], keys[4];
    for (int j = 0; j < NQ; j++) high[j] = low[j] = I{};
    for (int64_t c = 0; c < D; c += 16) {
      fetch.next(4);
      across(rows + c, stride, keys);
      for (int i = 0; i < 4; i++) {
        I key = keys[i] ^ (int32_t)0x80808080;
        for (int j = 0; j < NQ; j++) {
          const char* query = (const char*)(q + j * D) + c + 4 * i;
          high[j] = dot_bytes(high[j], key, broadcast(query));
          low[j] = dot_bytes(low[j], key, broadcast(query + D));
        }
      }
    }
    for (int j = 0; j < NQ; j++)
      save(out + j * kTile * 4, (high[j] << 8) + low[j] - load<int32_t>((const char*)(q + j * D) + 2 * D));
  }
};

// Rounded probabilities of slots s .. s+15: high bytes, and kTile bytes later low ones.
inline void store_weights(I p, int64_t s, int16_t* rounded) {
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  char* out = (char*)rounded + s;
  save(out, __builtin_convertvector(p >> 8, Bytes));
  save(out + kTile, __builtin_convertvector(p & 255, Bytes));
}

// 32 of 64 values of the rows: of every 16 the first 8 (Half 0) or the last.
template <int NQ, int Half>
OUTLINE void values_of_half(Tile& t, const Weights& w, int64_t D, const char* rows, float* y) {
  I high[2][NQ], low[2][NQ];
  for (int j = 0; j < NQ; j++) high[0][j] = high[1][j] = low[0][j] = low[1][j] = I{};
  auto add = [&](int64_t s, const char* a, const char* b, const char* c, const char* d) {
    auto bytes = [](const char* p, const char* q) {
      __m512i x = load<__m512i>(p), y = load<__m512i>(q);
      return Half ? _mm512_unpackhi_epi8(x, y) : _mm512_unpacklo_epi8(x, y);
    };
    t.k_soon.next(2);
    __m512i ab = bytes(a, b), cd = bytes(c, d);
    I first = (I)_mm512_unpacklo_epi16(ab, cd), second = (I)_mm512_unpackhi_epi16(ab, cd);
    for (int j = 0; j < NQ; j++) {
      const char* p = (const char*)w.rounded[j] + s;
      I upper = broadcast(p), lower = broadcast(p + kTile);
      high[0][j] = dot_bytes(high[0][j], upper, first);
      high[1][j] = dot_bytes(high[1][j], upper, second);
      low[0][j] = dot_bytes(low[0][j], lower, first);
      low[1][j] = dot_bytes(low[1][j], lower, second);
    }
  };
  const int64_t stride = t.v_stride;
  int64_t s = 0;
  for (; s + 4 <= t.n; s += 4, rows += 4 * stride)
    add(s, rows, rows + stride, rows + 2 * stride, rows + 3 * stride);
  if (s < t.n) {  // weights past the end are zero
    const char *b = rows + (s + 1 < t.n ? stride : 0), *c = rows + (s + 2 < t.n ? 2 * stride : 0);
    add(s, rows, b, c, rows);
  }
  F first[NQ], second[NQ];
  for (int j = 0; j < NQ; j++) {
    first[j] = to_float((high[0][j] << 8) + low[0][j]);
    second[j] = to_float((high[1][j] << 8) + low[1][j]);
  }
  add_values<NQ>(y, D, w, first, second);
}
template <int NQ> void values_int8(Tile& t, const Weights& w, int64_t D, float* y) {
  for (int64_t c = 0; c < D; c += 64) {
    values_of_half<NQ, 0>(t, w, D, t.v + c, y + c);
    values_of_half<NQ, 1>(t, w, D, t.v + c, y + c + 32);
  }
}

#else
struct Int8 {  // bytes become 16 bits wide: one instruction multiplies and adds two neighbours
  typedef I Sum;
  typedef int32_t Score;
  typedef int16_t Query;
  typedef int8_t Stored;
  static constexpr int kValues = 2 * W, kRows = 8;
  struct Chunk { S x; };
  static Chunk load_chunk(const char* row) { return {widen(row)}; }
  static Chunk query(const Query* q) { return {load<S>(q)}; }
  static void settle(Chunk& c) { SETTLE(c.x); }
  static Sum add(Sum sum, Chunk k, Chunk q) { return dot(sum, k.x, q.x); }
  static int64_t place(int64_t d) { return d; }
  static void store_query(const int32_t* q, int64_t D, float* out) {
    for (int64_t d = 0; d < D; d++) ((Query*)out)[d] = (Query)q[d];
  }
};

inline void store_weights(I p, int64_t s, int16_t* rounded) {
  save(rounded + s, __builtin_convertvector(p, Half));
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
