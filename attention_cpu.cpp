// PyTorch operators around the kernels of attention_cpu_kernels.cpp: gpt_long_cpu::write, attend, and both at once.
#include "attention_cpu.h"
#include "cpu_operators.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

using at::Tensor;
typedef const std::optional<Tensor>& MaybeTensor;

extern "C" const Kernels gpt_long_portable;
#ifdef GPT_LONG_X86
extern "C" const Kernels gpt_long_avx2, gpt_long_avx512;
#endif

namespace {

// What this processor has, 0 portable, 1 AVX2, 2 AVX-512 with VNNI.
int64_t level() {
#ifdef GPT_LONG_X86
  if (has_avx512()) return 2;
  if (has_avx2()) return 1;
#endif
  return 0;
}

const Kernels& kernels(int64_t most, int64_t D) {
  int64_t best = level();
  if (most < best) best = most;
#ifdef GPT_LONG_X86
  if (best >= 2 && D % 64 == 0) return gpt_long_avx512;
  if (best >= 1) return gpt_long_avx2;
#endif
  return gpt_long_portable;
}

Kind kind_of(const Tensor& t) {
  if (t.scalar_type() == at::kChar || t.scalar_type() == at::kByte) return kInt8;  // bytes: 4-bit rows
  if (t.scalar_type() == at::kBFloat16) return kBFloat16;
  TORCH_CHECK(t.scalar_type() == at::kFloat, "attention_cpu: tensors are int8, bfloat16 or float32");
  return kFloat32;
}

View view(const Tensor& t) {
  static const int64_t bytes[] = {1, 2, 4};
  int64_t size = bytes[kind_of(t)];
  auto s = t.strides();
  TORCH_CHECK(s.size() == 4, "attention_cpu: values are [B, H, S, D]");
  return {(char*)t.data_ptr(), s[0] * size, s[1] * size, s[2] * size, s[3] * size};
}

int64_t strong_of(const Tensor& values, int64_t D) {
  return values.scalar_type() == at::kByte ? 2 * values.size(3) - D : -1;
}

// The first or the second matrices of 4-bit rows: into their basis, or for queries into it and for outputs back.
const uint16_t* basis_of(MaybeTensor m, int64_t strong, int64_t which, int64_t H, int64_t D) {
  TORCH_CHECK(m.has_value() == (strong >= 0), "attention_cpu: 4-bit rows come with bases, others without");
  if (!m.has_value()) return nullptr;
  TORCH_CHECK(m->scalar_type() == at::kBFloat16 && m->is_contiguous() && m->numel() == 2 * H * D * D,
              "attention_cpu: bases are bfloat16 [2, H, D, D]");
  return (const uint16_t*)m->data_ptr() + which * H * D * D;
}

View scale_view(MaybeTensor t, const Tensor& values) {
  TORCH_CHECK(t.has_value() == (kind_of(values) == kInt8), "attention_cpu: int8 values come with scales");
  if (!t.has_value()) return {};
  TORCH_CHECK(t->dim() == 3 && kind_of(*t) == kBFloat16 && t->size(2) == values.size(2),
              "attention_cpu: scales are bfloat16 [B, H or 1, S]");
  auto s = t->strides();
  return {(char*)t->data_ptr(), s[0] * 2, t->size(1) == 1 ? 0 : s[1] * 2, s[2] * 2, 0};
}

void check(const Tensor& x, const Tensor& start, const Tensor& values) {
  int64_t D = x.size(3), T = x.size(2), S = values.size(2);
  TORCH_CHECK(D % 16 == 0 && D <= kMaxHeadDim && kind_of(x) != kInt8,
              "attention_cpu: wants head_dim a multiple of 16 and bfloat16 or float32 input");
  TORCH_CHECK(start.scalar_type() == at::kLong && start.dim() == 1 && start.is_contiguous() &&
                  start.size(0) == x.size(0) && values.size(0) == x.size(0),
              "attention_cpu: wants start int64 [B] and input of the cache's B");
  int64_t strong = strong_of(values, D);
  TORCH_CHECK(strong < 0 ? values.scalar_type() == at::kByte ? false : values.size(3) == D
                         : strong < D && D <= kMaxPackedHeadDim,
              "attention_cpu: rows of ", values.size(3), " do not hold vectors of ", D);
  auto* p = (const int64_t*)start.data_ptr();
  for (int64_t b = 0; b < x.size(0); b++)
    TORCH_CHECK(p[b] >= 0 && p[b] + T <= S, "attention_cpu: tokens ", p[b], " to ", p[b] + T,
                " do not fit in a cache of ", S, " slots");
}

struct Stored {  // K or V of a cache
  const Tensor& values;
  MaybeTensor scales, bases;
};
struct Cache { Stored k, v; };

Store store_of(const Tensor& start, const Tensor& x, const Stored& stored) {
  auto& [values, scales, bases] = stored;
  check(x, start, values);
  TORCH_CHECK(values.size(1) == x.size(1), x.size(1), " heads for a cache of ", values.size(1));
  Store a = {view(x), view(values), scale_view(scales, values), kind_of(x), kind_of(values),
             (const int64_t*)start.data_ptr(), x.size(1), x.size(2), x.size(3),
             scales.has_value() && scales->size(1) == 1 && x.size(1) > 1, strong_of(values, x.size(3))};
  a.basis = basis_of(bases, a.strong, 0, a.H, a.D);
  return a;
}

struct Writing {  // K and V of new tokens
  Store both[2];
  int64_t B;
  Writing(const Tensor& start, const Tensor& k, const Tensor& v, const Cache& cache)
      : both{store_of(start, k, cache.k), store_of(start, v, cache.v)}, B(k.size(0)) {
    TORCH_CHECK(k.sizes() == v.sizes(), "attention_cpu: K of shape ", k.sizes(), ", V of ", v.sizes());
  }
};

struct Attending {
  Attention a;
  int64_t B;
  Tensor y;
  std::unique_ptr<float[]> rotated;  // the queries in K's basis, if it has one

  Attending(const Tensor& q, const Tensor& start, const Cache& cache) : B(q.size(0)) {
    const Tensor &k = cache.k.values, &v = cache.v.values;
    check(q, start, k);
    check(q, start, v);
    int64_t Hq = q.size(1), T = q.size(2), D = q.size(3), H = k.size(1);
    TORCH_CHECK(k.stride(3) == 1 && v.stride(3) == 1 && Hq % H == 0 && H == v.size(1) && k.size(2) == v.size(2),
                "attention_cpu: wants K and V of one shape, a slot's values contiguous, heads a multiple");
    // The order [B, T, Hq, D], so that joining the heads of a token is a view.
    y = at::empty_strided({B, Hq, T, D}, {T * Hq * D, D, Hq * D, 1}, q.options());
    a = {view(q), view(k), view(v), scale_view(cache.k.scales, k), scale_view(cache.v.scales, v), view(y),
         kind_of(q), kind_of(k), kind_of(v), (const int64_t*)start.data_ptr(), H, Hq / H, T, D,
         strong_of(k, D), strong_of(v, D), kind_of(q)};
    a.v_out = basis_of(cache.v.bases, a.v_strong, 1, H, D);
    a.q_in = basis_of(cache.k.bases, a.k_strong, 1, H, D);
    if (a.q_in) rotated.reset(new float[q.numel()]);
  }
};

// Before attention: new tokens into the cache and queries into its basis, each if there are any.
void prepare(const Kernels& run, const Writing* writing, Attending* attending) {
  const Store* both = writing ? writing->both : nullptr;
  bool rotates = attending && attending->rotated;
  int64_t vectors = writing ? writing->B * both->T * both->H : 0;
  int64_t groups = rotates ? attending->B * attending->a.H * attending->a.T : 0;
  int64_t n = 2 * vectors + groups;
  if (n == 0) return;
  auto work = [&](int64_t first, int64_t last) {  // K's vectors, V's, then the queries
    auto part = [&](int64_t from, int64_t size, auto call) {
      int64_t lo = std::max(first - from, (int64_t)0), hi = std::min(last - from, size);
      if (lo < hi) call(lo, hi);
    };
    for (int64_t i = 0; i < 2; i++)
      part(i * vectors, vectors, [&](int64_t lo, int64_t hi) { run.store(both[i], lo, hi); });
    part(2 * vectors, groups,
         [&](int64_t lo, int64_t hi) { run.rotate(attending->a, lo, hi, attending->rotated.get()); });
  };
  // Reading a basis takes longer than waking a thread.
  bool bases = rotates || (writing && (both[0].basis || both[1].basis));
  in_parallel(n, bases ? 1 : 16384 / both->D + 1, work);
  if (!rotates) return;
  Attention& a = attending->a;
  int64_t row = 4 * a.D;
  a.q = {(char*)attending->rotated.get(), a.H * a.G * a.T * row, a.T * row, row, 4};
  a.q_kind = kFloat32;
}

constexpr int64_t kTokens = 16;  // of a call that are computed at a time

constexpr int64_t kGrain = 256;  // slots; a part has a multiple of them

// How the slots of a row are cut: by its length alone, so that the number of threads does not change results.
struct Parts {
  int64_t slots, count;
  Parts(int64_t filled, int64_t T) {
    int64_t most = T > 4 ? 4 : 16, grains = (filled + kGrain - 1) / kGrain;
    slots = (grains + most - 1) / most * kGrain;
    count = (filled + slots - 1) / slots;
  }
};

struct Item { Slots slots; int64_t part, parts; };

void attend_items(const Attention& a, const Kernels& run, int64_t B) {
  std::vector<Item> items;
  int64_t slots = 0;
  for (int64_t b = 0; b < B; b++) {
    int64_t filled = a.start[b] + a.T;
    Parts parts(filled, a.T);
    slots += filled;
    for (int64_t h = 0; h < a.H; h++)
      for (int64_t i = 0; i < parts.count; i++)
        items.push_back({{b, h, i * parts.slots, std::min((i + 1) * parts.slots, filled)}, i, parts.count});
  }
  int64_t n = items.size(), floats = a.part_floats();
  std::unique_ptr<float[]> state(new float[n * floats]);
  std::unique_ptr<std::atomic<int64_t>[]> done(new std::atomic<int64_t>[B * a.H + 1]());
  std::atomic<int64_t>& next = done[B * a.H];
  auto work = [&](int64_t, int64_t) {
    for (int64_t i = next++, soon; i < n; i = soon) {
      soon = next++;
      const Item& item = items[i];
      const int64_t b = item.slots.b, h = item.slots.h;
      run.attend(a, item.slots, items[soon < n ? soon : i].slots, state.get() + i * floats);
      if (done[b * a.H + h].fetch_add(1) + 1 == item.parts)  // the last part combines them all
        run.combine(a, b, h, item.parts, state.get() + (i - item.part) * floats);
    }
  };
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  int64_t workers = n < threads ? n : threads;
  bool small = slots * a.H * a.queries() * a.D < (1 << 18);  // waking the other threads would cost more
  if (workers < 2 || small) return work(0, 1);
  in_parallel(workers, 1, work);
}

Tensor attend_all(const Kernels& run, const Attending& all) {
  const Attention& a = all.a;
  std::vector<int64_t> starts(all.B);
  for (int64_t t = 0; t < a.T; t += kTokens) {  // a block's queries and outputs stay in the core's own cache
    Attention part = a;
    part.T = a.T - t < kTokens ? a.T - t : kTokens;
    part.q.data += t * a.q.s;
    part.out.data += t * a.out.s;
    for (int64_t b = 0; b < all.B; b++) starts[b] = a.start[b] + t;
    part.start = starts.data();
    attend_items(part, run, all.B);
  }
  return all.y;
}

void write_op(const Tensor& start, const Tensor& k, const Tensor& v, const Tensor& k_values, MaybeTensor k_scales,
              const Tensor& v_values, MaybeTensor v_scales, MaybeTensor k_bases, MaybeTensor v_bases, int64_t level) {
  Writing writing(start, k, v, {{k_values, k_scales, k_bases}, {v_values, v_scales, v_bases}});
  prepare(kernels(level, k.size(3)), &writing, nullptr);
}

Tensor attend_op(const Tensor& start, const Tensor& q, const Tensor& k_values, MaybeTensor k_scales,
                 const Tensor& v_values, MaybeTensor v_scales, MaybeTensor k_bases, MaybeTensor v_bases,
                 int64_t level) {
  Attending attending(q, start, {{k_values, k_scales, k_bases}, {v_values, v_scales, v_bases}});
  const Kernels& run = kernels(level, q.size(3));
  prepare(run, nullptr, &attending);
  return attend_all(run, attending);
}

Tensor both_op(const Tensor& start, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_values,
               MaybeTensor k_scales, const Tensor& v_values, MaybeTensor v_scales, MaybeTensor k_bases,
               MaybeTensor v_bases, int64_t level) {
  TORCH_CHECK(q.size(2) == k.size(2) && q.size(3) == k.size(3), "attention_cpu: other tokens in q than in k");
  Cache cache = {{k_values, k_scales, k_bases}, {v_values, v_scales, v_bases}};
  Writing writing(start, k, v, cache);
  Attending attending(q, start, cache);
  const Kernels& run = kernels(level, q.size(3));
  prepare(run, &writing, &attending);
  return attend_all(run, attending);
}

}  // namespace

#define GPT_LONG_READ "Tensor k_values, Tensor? k_scales, Tensor v_values, Tensor? v_scales, "
#define GPT_LONG_CHANGED "Tensor(a!) k_values, Tensor(b!)? k_scales, Tensor(c!) v_values, Tensor(d!)? v_scales, "
#define GPT_LONG_REST "Tensor? k_bases, Tensor? v_bases, int level=2) -> "

TORCH_LIBRARY(gpt_long_cpu, m) {
  m.def("write(Tensor start, Tensor k, Tensor v, " GPT_LONG_CHANGED GPT_LONG_REST "()");
  m.def("attend(Tensor start, Tensor q, " GPT_LONG_READ GPT_LONG_REST "Tensor");
  m.def("write_and_attend(Tensor start, Tensor q, Tensor k, Tensor v, " GPT_LONG_CHANGED GPT_LONG_REST "Tensor");
  m.def("level() -> int", &level);
}
TORCH_LIBRARY_IMPL(gpt_long_cpu, CPU, m) {
  m.impl("write", &write_op);
  m.impl("attend", &attend_op);
  m.impl("write_and_attend", &both_op);
}
