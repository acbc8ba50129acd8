// 4-bit rows on AVX-512: keys become bytes in registers and meet 8-bit queries there; values become bytes in pairs of
// slots, as the sums over slots want them.  Included by attention_cpu_kernels.cpp alone; head_dim a multiple of 64.
#pragma once

struct PackedKey : Int8 {  // a query of 8 bits errs by a tenth of what a 4-bit key does
  typedef int8_t Query;
  static constexpr float kLimit = 127;
};

#if defined(__AVX512VNNI__)
constexpr bool kFused = true;

// Reads rows of quantize4 (kv_cache.py), 64 values at a time.  A row's bytes are loaded where they belong: the packed
// ones twice, masked, the second time `half` bytes further on, where the high nibbles go.
struct RowReader {
  int64_t half;
  __mmask64 strong[kMaxPackedHeadDim / 64], low[kMaxPackedHeadDim / 64];  // low: the strong bytes and low nibbles
  __m512i levels;
  RowReader(int64_t D, int64_t n_strong, int8_t flip) : half((D - n_strong) / 2) {
    auto below = [](int64_t end) -> __mmask64 { return end <= 0 ? 0 : end >= 64 ? ~0ull : (1ull << end) - 1; };
    for (int64_t c = 0; c < D; c += 64) {
      strong[c / 64] = below(n_strong - c);
      low[c / 64] = below(n_strong + half - c);
    }
    __m128i all = _mm_xor_si128(load<__m128i>(kLevels), _mm_set1_epi8(flip));
    levels = _mm512_broadcast_i32x4(all);
  }
  INLINE __m512i index(const char* row, int64_t c, __m512i& bytes) const {
    bytes = _mm512_mask_loadu_epi8(_mm512_maskz_loadu_epi8(low[c / 64], row + c), ~low[c / 64], row + c - half);
    __m512i nibbles = _mm512_mask_blend_epi8(low[c / 64], _mm512_srli_epi16(bytes, 4), bytes);
    return _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
  }
  INLINE __m512i int8(const char* row, int64_t c) const {
    __m512i bytes, i = index(row, c, bytes);
    return _mm512_mask_shuffle_epi8(bytes, ~strong[c / 64], levels, i);
  }
  INLINE __m512i plus128(const char* row, int64_t c) const {  // wants flip = -128
    __m512i bytes, i = index(row, c, bytes);
    bytes = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
    return _mm512_mask_shuffle_epi8(bytes, ~strong[c / 64], levels, i);
  }
};

// Scores of NQ queries q [NQ][D] with eight packed rows: out [NQ][kTile], before any scale.  less: -128 times the
// sums of the queries' values.
template <int NQ>
INLINE void score_eight_packed(const RowReader& rows, const char* row, int64_t stride, const int8_t* q, int64_t D,
                               const I less[NQ], int32_t* out) {
  I pairs[NQ][4];
  for (int i = 0; i < 4; i++, row += 2 * stride) {
    I sum0[NQ], sum1[NQ];
    for (int j = 0; j < NQ; j++) sum0[j] = sum1[j] = less[j];
    for (int64_t c = 0; c < D; c += 64) {
      __m512i k0 = rows.plus128(row, c), k1 = rows.plus128(row + stride, c);
      for (int j = 0; j < NQ; j++) {
        __m512i x = load<__m512i>(q + j * D + c);
        sum0[j] = (I)_mm512_dpbusd_epi32((__m512i)sum0[j], k0, x);
        sum1[j] = (I)_mm512_dpbusd_epi32((__m512i)sum1[j], k1, x);
      }
    }
    for (int j = 0; j < NQ; j++) pairs[j][i] = add_pairs(sum0[j], sum1[j]);
  }
  for (int j = 0; j < NQ; j++) store_sums(pairs[j], out + j * kTile);
}
template <int NQ>
OUTLINE void scores_packed(const Tile& t, const int8_t* q, int64_t D, int64_t strong, int32_t* out) {
  RowReader rows(D, strong, -128);
  I less[NQ] = {};
  for (int j = 0; j < NQ; j++) {
    __m512i sum = {};
    for (int64_t c = 0; c < D; c += 64)
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), load<__m512i>(q + j * D + c));  // 128, unsigned
    less[j] = -(I)sum;
  }
  if (t.n < 8) {  // no row past the filled ones is read: the same row eight times, the next one overwrites
    for (int64_t s = 0; s < t.n; s++)
      score_eight_packed<NQ>(rows, t.k + s * t.k_stride, 0, q, D, less, out + s);
    return;
  }
  for (int64_t s = 0; s < t.n; s += 8) {
    s = s < t.n - 8 ? s : t.n - 8;
    score_eight_packed<NQ>(rows, t.k + s * t.k_stride, t.k_stride, q, D, less, out + s);
  }
}

// n packed rows become pairs of rows, byte by byte: for 64 values of a row 128 bytes, in the order of `paired`.
void unpack_pairs(const char* row, int64_t stride, int64_t n, int64_t strong, int64_t D, char* out) {
  RowReader rows(D, strong, 0);
  for (int64_t s = 0; s < n; s += 2, row += 2 * stride)
    for (int64_t c = 0; c < D; c += 64, out += 128) {
      __m512i a = rows.int8(row, c), b = rows.int8(s + 1 < n ? row + stride : row, c);
      save(out, _mm512_unpacklo_epi8(a, b));
      save(out + 64, _mm512_unpackhi_epi8(a, b));
    }
}
// Where value d of a row ends up: unpacking works within 128 bits.
inline int64_t paired(int64_t d) {
  int64_t vector = d / 32 % 2 + d / 8 % 2 * 2, lane = d / 16 % 2 * 8 + d % 8;
  return d / 64 * 64 + vector * 16 + lane;
}
template <int NQ> OUTLINE void values_paired(const Tile& t, const Weights& w, int64_t D, float* y) {
  for (int64_t c = 0; c < D; c += 64) {
    I x[NQ][4] = {};
    const char* pair = t.v + 2 * c;
    for (int64_t s = 0; s < t.n; s += 2, pair += 2 * D) {
      S v[4];
      for (int i = 0; i < 4; i++) v[i] = widen(pair + 32 * i);
      for (int j = 0; j < NQ; j++) {
        S p = (S)(I{} + load<int32_t>(w.rounded[j] + s));
        for (int i = 0; i < 4; i++) x[j][i] = dot(x[j][i], v[i], p);
      }
    }
    for (int j = 0; j < NQ; j++)
      for (int i = 0; i < 4; i++) {
        float* to = y + j * D + c + i * W;
        save(to, load<F>(to) * w.shrink[j] + to_float(x[j][i]) * w.factor[j]);
      }
  }
}
#else
constexpr bool kFused = false;
template <int NQ> void scores_packed(const Tile&, const int8_t*, int64_t, int64_t, int32_t*) {}
template <int NQ> void values_paired(const Tile&, const Weights&, int64_t, float*) {}
inline void unpack_pairs(const char*, int64_t, int64_t, int64_t, int64_t, char*) {}
inline int64_t paired(int64_t d) { return d; }
#endif

// Whether keys are read packed: few queries, so that no tile is unpacked often.
inline bool reads_packed_keys(const Attention& a) {
  return kFused && a.k_strong >= 0 && a.D % 64 == 0 && a.queries() <= 2 * kBlock;
}
inline bool pairs_values(const Attention& a) { return kFused && a.v_strong >= 0 && a.D % 64 == 0; }
