// The integer steps of attention_cpu_int8.h with AVX2, over int8 rows and over packed ones as they are stored.  Bytes
// become 16 bits wide, even ones apart from odd ones: an instruction each, within 128 bits (the one that widens
// neighbours holds AMD's two shuffle units for three cycles).  Another multiplies 16 bits and adds two neighbours.
#pragma once
#include "attention_cpu_tile.h"

namespace {

inline S even_bytes(__m256i x) { return (S)_mm256_maddubs_epi16(_mm256_set1_epi16(1), x); }
inline S odd_bytes(__m256i x) { return (S)x >> 8; }

// Indices to kLevels, the low four bits of every byte, as levels.
inline __m256i levels(__m256i index) {
  const __m256i all = _mm256_broadcastsi128_si256(load<__m128i>(kLevels));
  return _mm256_shuffle_epi8(all, _mm256_and_si256(index, _mm256_set1_epi8(15)));
}

struct Int8 {
  static constexpr bool kMeetsPacked = true;
  static constexpr int kRun = 16;
  static bool meets_values(int64_t strong, int64_t D) { return strong == 8 && D % 64 == 0; }
  static int64_t place(int64_t d) { return d; }
  template <int NQ> static void scores(Tile& t, const float* q, int64_t D, void* out);

  // 16-bit values in the order in which rows are met, by sixteens: the even ones twice, then the odd ones twice.
  static void store_query(const int32_t* q, int64_t D, int64_t strong, float* out) {
    const __m256i evens_first = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    auto put = [&](int64_t first, int64_t second) {  // eight values from there on, and eight from there
      __m256i x = _mm256_packs_epi32(load<__m256i>(q + first), load<__m256i>(q + second));  // fours, by turns
      x = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(x, 0xd8), evens_first);
      save(out, _mm256_permute4x64_epi64(x, 0x88));
      save(out + 8, _mm256_permute4x64_epi64(x, 0xdd));
      out += 16;
    };
    const int64_t whole = strong < 0 ? D : strong, half = (D - whole) / 2;
    int64_t d = 0;
    for (; d < whole; d += 16) put(d, d + 8);
    for (; d + 16 <= whole + half; d += 16) put(d, d + 8), put(d + half, d + half + 8);
    if (d < whole + half) put(d, d + half);
  }
};

// Bytes of two rows that are `apart`, sixteen each.
INLINE __m256i sixteen(const char* row, int64_t apart) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(row)), load<__m128i>(row + apart), 1);
}
// Eight each, and again so that the high nibbles are the low ones.
INLINE __m256i eight_twice(const char* row, int64_t apart) {
  __m256i x = _mm256_set1_epi64x(load<int64_t>(row)), y = _mm256_set1_epi64x(load<int64_t>(row + apart));
  return _mm256_srlv_epi64(_mm256_blend_epi32(x, y, 0xf0), _mm256_setr_epi64x(0, 4, 0, 4));
}
inline __m256i high_nibbles(__m256i x) { return _mm256_srli_epi16(x, 4); }

// The next 16 values of NQ queries with those of four rows: first the even ones.
template <int NQ> INLINE void meet_half(S x, S y, const char*& q, int64_t D, I (&first)[NQ], I (&second)[NQ]) {
  for (int j = 0; j < NQ; j++) {
    S query = load<S>(q + 4 * j * D);
    SETTLE(query);
    I a = dot(first[j], x, query), b = dot(second[j], y, query);
    SETTLE(a);  // of an array it would keep the array in memory
    SETTLE(b);
    first[j] = a, second[j] = b;
  }
  q += 32;
}
template <int NQ> INLINE void meet(__m256i x, __m256i y, const char*& q, int64_t D, I (&first)[NQ], I (&second)[NQ]) {
  meet_half<NQ>(even_bytes(x), even_bytes(y), q, D, first, second);
  meet_half<NQ>(odd_bytes(x), odd_bytes(y), q, D, first, second);
}

// Scores of NQ queries with eight rows, two to a vector, the second of them four rows further on.  Of a packed row the
// first `strong` bytes are values, by sixteens.
template <int NQ, bool Packed>
INLINE void score_rows(const char* rows, int64_t stride, const float* queries, int64_t D, int64_t strong, Fetch& fetch,
                       char* out) {
  const int64_t bytes = Packed ? (D + strong) / 2 : D, whole = Packed ? strong : D;
  I pairs[NQ][2];
  for (int i = 0; i < 2; i++, rows += 2 * stride) {
    const char *q = (const char*)queries, *row = rows, *next = rows + stride;
    REREAD(q);
    I first[NQ], second[NQ];
    for (int j = 0; j < NQ; j++) first[j] = second[j] = I{};
    int64_t c = 0;
    for (; c < whole; c += 16, row += 16, next += 16) {
      fetch.next(1);
      meet<NQ>(sixteen(row, 4 * stride), sixteen(next, 4 * stride), q, D, first, second);
    }
    for (; Packed && c + 16 <= bytes; c += 16, row += 16, next += 16) {
      fetch.next(1);
      __m256i x = sixteen(row, 4 * stride), y = sixteen(next, 4 * stride);
      meet<NQ>(levels(x), levels(y), q, D, first, second);
      meet<NQ>(levels(high_nibbles(x)), levels(high_nibbles(y)), q, D, first, second);
    }
    if (Packed && c < bytes) {
      fetch.next(1);
      meet<NQ>(levels(eight_twice(row, 4 * stride)), levels(eight_twice(next, 4 * stride)), q, D, first, second);
    }
    for (int j = 0; j < NQ; j++) pairs[j][i] = add_pairs(first[j], second[j]);
  }
  for (int j = 0; j < NQ; j++) save(out + 4 * j * kTile, add_neighbours(pairs[j][0], pairs[j][1]));
}

// The same with the n filled rows of a tile: out [NQ][kTile], before any scale.  FixedD (0: any) unrolls the loops,
// over packed rows of kStrong.
template <int NQ, bool Packed, int FixedD> OUTLINE void scores_int8(Tile& t, const float* q, int64_t D, void* out) {
  if (FixedD) D = FixedD;
  const int64_t strong = FixedD ? kStrong : t.k_strong;
  Fetch soon = t.v_soon;
  auto score = [&](int64_t s, int64_t stride) {
    score_rows<NQ, Packed>(t.k + s * t.k_stride, stride, q, D, strong, soon, (char*)out + 4 * s);
  };
  if (t.n < 8) {  // no row past the filled ones is read: the same row eight times, the next one overwrites
    REREAD(D);
    for (int64_t s = 0; s < t.n; s++) score(s, 0);
    return;
  }
  for (int64_t s = 0; s < t.n; s += 8) {
    s = s < t.n - 8 ? s : t.n - 8;
    score(s, t.k_stride);
  }
}

template <int NQ> void Int8::scores(Tile& t, const float* q, int64_t D, void* out) {
  bool usual = t.k_strong == kStrong;
  auto run = t.k_strong < 0 ? D == 64 ? scores_int8<NQ, false, 64> : scores_int8<NQ, false, 0>
             : usual && D == 64 ? scores_int8<NQ, true, 64>
             : usual && D == 128 ? scores_int8<NQ, true, 128> : scores_int8<NQ, true, 0>;
  run(t, q, D, out);
}

// n probabilities times `up`, rounded.
inline void round_weights(const float* p, float up, int64_t n, int16_t* rounded) {
  auto whole = [&](int64_t s) { return (__m256i)__builtin_convertvector(load<F>(p + s) * up + 0.5f, I); };
  for (int64_t s = 0; s < n; s += 2 * W)  // what lies behind n matters to nobody
    save(rounded + s, _mm256_permute4x64_epi64(_mm256_packs_epi32(whole(s), whole(s + W)), 0xd8));
}

// Columns of two rows side by side, bytes by twos: of every 16 the first 8, or the last.
enum Columns { kBytes, kSixteenBytes, kLow, kHigh, kFirstLow, kFirstHigh };
template <bool Last> INLINE __m256i beside(__m256i x, __m256i y) {
  return Last ? _mm256_unpackhi_epi16(x, y) : _mm256_unpacklo_epi16(x, y);
}
// The first block of packed columns begins with the last four of eight values that are bytes; the first four of these
// take their place among the high nibbles.
template <Columns kind, bool Last> INLINE __m256i two_rows(const char* a, const char* b) {
  if (kind == kSixteenBytes)
    return beside<Last>(_mm256_castsi128_si256(load<__m128i>(a)), _mm256_castsi128_si256(load<__m128i>(b)));
  __m256i x = beside<Last>(load<__m256i>(a), load<__m256i>(b));
  if (kind == kBytes) return x;
  __m256i level = levels(kind == kHigh || kind == kFirstHigh ? _mm256_srli_epi16(x, 4) : x);
  if (kind == kFirstHigh && !Last) x = beside<Last>(load<__m256i>(a - 4), load<__m256i>(b - 4));
  bool some = !Last && (kind == kFirstLow || kind == kFirstHigh);
  return some ? _mm256_blend_epi32(level, x, 3) : level;
}

// Weighted sums of 16 columns: of the 32 from `rows` on, which are the values from `value` on, 8 of each 16.
template <int NQ, Columns kind, bool Last>
OUTLINE void values_of_columns(Tile& t, const Weights& w, const char* rows, int32_t* sums, int64_t value) {
  I even[NQ], odd[NQ];
  for (int j = 0; j < NQ; j++) even[j] = odd[j] = I{};
  Fetch soon = t.k_soon;
  auto add = [&](int64_t s, const char* row, const char* next) {
    __m256i x = two_rows<kind, Last>(row, next);
    S first = even_bytes(x), second = odd_bytes(x);
    for (int j = 0; j < NQ; j++) {
      S p = (S)(I{} + load<int32_t>(w.rounded[j] + s));
      I a = dot(even[j], first, p), b = dot(odd[j], second, p);
      SETTLE(a);
      SETTLE(b);
      even[j] = a, odd[j] = b;
    }
  };
  const int64_t stride = t.v_stride;
  int64_t s = 0;
  for (; s + 4 <= t.n; s += 4, rows += 4 * stride) {
    soon.next(1);
    add(s, rows, rows + stride);
    add(s + 2, rows + 2 * stride, rows + 3 * stride);
  }
  for (; s + 2 <= t.n; s += 2, rows += 2 * stride) add(s, rows, rows + stride);
  if (s < t.n) add(s, rows, rows);  // the weight past an odd end is zero
  t.k_soon = soon;
  for (int j = 0; j < NQ; j++, sums += kMaxHeadDim) {
    __m256i x = _mm256_unpacklo_epi32((__m256i)even[j], (__m256i)odd[j]);
    __m256i y = _mm256_unpackhi_epi32((__m256i)even[j], (__m256i)odd[j]);
    int32_t* to = sums + value + 8 * Last;
    save(kind == kFirstHigh && !Last ? sums : to, _mm256_castsi256_si128(x));
    save(to + 4, _mm256_castsi256_si128(y));
    if (kind == kSixteenBytes) continue;
    save(to + 16, _mm256_extracti128_si256(x, 1));
    save(to + 20, _mm256_extracti128_si256(y, 1));
  }
}

// Two halves of a block of columns.
template <int NQ, Columns kind>
void values_of_block(Tile& t, const Weights& w, const char* rows, int32_t* sums, int64_t value) {
  values_of_columns<NQ, kind, false>(t, w, rows, sums, value);
  values_of_columns<NQ, kind, true>(t, w, rows, sums, value);
}

template <int NQ> void values_int8(Tile& t, const Weights& w, int64_t D, float* y) {
  alignas(32) int32_t sums[NQ][kMaxHeadDim];
  int64_t c = 0;
  for (; c + 32 <= D; c += 32) values_of_block<NQ, kBytes>(t, w, t.v + c, sums[0], c);
  if (c < D) values_of_block<NQ, kSixteenBytes>(t, w, t.v + c, sums[0], c);
  add_sums<NQ>(y, D, w, sums);
}

// Packed values, of which the first eight are bytes.
template <int NQ> void values_packed(Tile& t, const Weights& w, int64_t D, float* y) {
  alignas(32) int32_t sums[NQ][kMaxHeadDim];
  for (int64_t c = 0; c < D / 2; c += 32) {
    auto low = c == 0 ? values_of_block<NQ, kFirstLow> : values_of_block<NQ, kLow>;
    auto high = c == 0 ? values_of_block<NQ, kFirstHigh> : values_of_block<NQ, kHigh>;
    low(t, w, t.v + 4 + c, sums[0], 4 + c);
    high(t, w, t.v + 4 + c, sums[0], D / 2 + c);
  }
  add_sums<NQ>(y, D, w, sums);
}

}  // namespace
