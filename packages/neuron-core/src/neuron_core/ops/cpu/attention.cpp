// SPDX-License-Identifier: Apache-2.0
// Attention over the paged cache with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).
// Keys are taken in tiles of 16 aligned to the position, always in the same order: a token's result depends neither
// on its batch, nor on the block size, nor on whether it came in a prefill or in a decode step.
#include <algorithm>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace neuron {
namespace {

constexpr int64_t kKeys = 16;     // keys of one tile
constexpr int64_t kQueries = 16;  // consecutive tokens of one request that share a tile
constexpr int64_t kLanes = 16;
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
static_assert(kKeys == kLanes);

struct Run {  // consecutive tokens of one request at consecutive positions
  int64_t first, count;
};

std::vector<Run> runs_of(const int32_t* rows, const int32_t* positions, int64_t tokens) {
  std::vector<Run> runs;
  for (int64_t t = 0; t < tokens; ++t) {
    if (rows[t] < 0) continue;
    if (!runs.empty()) {
      Run& last = runs.back();
      const int64_t before = last.first + last.count - 1;
      if (before == t - 1 && last.count < kQueries && rows[before] == rows[t] && positions[before] + 1 == positions[t]) {
        ++last.count;
        continue;
      }
    }
    runs.push_back({t, 1});
  }
  return runs;
}

#if defined(__AVX512F__)
// 16 x 16 transpose of 32-bit lanes, in three rounds of shuffles.
inline void transpose16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

inline int64_t load_columns(const bf16* rows, int64_t stride, int64_t head_dim, float* columns) {
  int64_t d = 0;
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (; d + 32 <= head_dim; d += 32) {
    __m512i pairs[16];
    for (int64_t key = 0; key < kKeys; ++key) pairs[key] = _mm512_loadu_si512(rows + key * stride + d);
    transpose16(pairs);
    for (int64_t i = 0; i < 16; ++i) {
      _mm512_storeu_si512(columns + (d + 2 * i) * kKeys, _mm512_slli_epi32(pairs[i], 16));
      _mm512_storeu_si512(columns + (d + 2 * i + 1) * kKeys, _mm512_and_si512(pairs[i], upper));
    }
  }
  return d;
}
inline int64_t load_columns(const float* rows, int64_t stride, int64_t head_dim, float* columns) {
  int64_t d = 0;
  for (; d + 16 <= head_dim; d += 16) {
    __m512i lanes[16];
    for (int64_t key = 0; key < kKeys; ++key) lanes[key] = _mm512_loadu_si512(rows + key * stride + d);
    transpose16(lanes);
    for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(columns + (d + i) * kKeys, lanes[i]);
  }
  return d;
}
inline __m512i widened(const e4m3* place) {  // `to_float` of 16
  const __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(place)));
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(bits, magnitude), 24);
  __m512i wide = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
  const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
  wide = _mm512_mask_mov_epi32(wide, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8)), _mm512_castps_si512(small));
  const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
  wide = _mm512_mask_mov_epi32(wide, is_nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_or_si512(wide, sign);
}
inline int64_t load_columns(const e4m3* rows, int64_t stride, int64_t head_dim, float* columns) {
  int64_t d = 0;
  for (; d + 16 <= head_dim; d += 16) {
    __m512i lanes[16];
    for (int64_t key = 0; key < kKeys; ++key) lanes[key] = widened(rows + key * stride + d);
    transpose16(lanes);
    for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(columns + (d + i) * kKeys, lanes[i]);
  }
  return d;
}
#else
template <typename T>
inline int64_t load_columns(const T*, int64_t, int64_t, float*) { return 0; }
#endif

// Keys of one tile, `rows [16, head_dim]` with a stride, as `columns [head_dim, 16]` in float.
template <typename T>
void key_columns(const T* rows, int64_t stride, int64_t head_dim, float* columns) {
  for (int64_t d = load_columns(rows, stride, head_dim, columns); d < head_dim; ++d)
    for (int64_t key = 0; key < kKeys; ++key) columns[d * kKeys + key] = to_float(rows[key * stride + d]);
}

template <typename T, typename C>
class Tile {  // the queries of one run for one kv head
 public:
  Tile(const AttentionShape& shape, const C* kv, const int32_t* table, int64_t kv_head)
      : shape_(shape), kv_(kv), table_(table), kv_head_(kv_head), group_(shape.heads / shape.cache.kv_heads),
        dim_(shape.cache.head_dim) {
    const int64_t rows = kQueries * group_;
    static thread_local std::vector<float> scratch;  // grows to the largest model of the process and stays
    scratch.resize(2 * rows * dim_ + 2 * dim_ * kKeys + rows * kKeys + 3 * rows);
    float* place = scratch.data();
    for (auto [part, size] : {std::pair{&query_, rows * dim_}, {&mixed_, rows * dim_}, {&columns_, dim_ * kKeys},
                              {&values_, dim_ * kKeys}, {&scores_, rows * kKeys}, {&peak_, rows}, {&mass_, rows}, {&decay_, rows}}) {
      *part = place;
      place += size;
    }
  }

  void run(const T* query, const int32_t* positions, int64_t count, T* out) {
    load_queries(query, count);
    const int64_t last = positions[count - 1];
    const int64_t begin = shape_.window > 0 ? std::max<int64_t>(0, positions[0] - shape_.window + 1) : 0;
    for (int64_t place = begin / kKeys * kKeys; place <= last; place += kKeys) step(place, positions, count);
    finish(count, out);
  }

 private:
  void load_queries(const T* query, int64_t count) {
    const float scale = shape_.scale * shape_.k_scale.at(kv_head_);
    for (int64_t t = 0; t < count; ++t)
      for (int64_t g = 0; g < group_; ++g) {
        const T* from = query + t * shape_.query_stride + (kv_head_ * group_ + g) * dim_;
        float* to = &query_[(t * group_ + g) * dim_];
        for (int64_t d = 0; d < dim_; ++d) to[d] = to_float(from[d]) * scale;
      }
    std::fill_n(mixed_, count * group_ * dim_, 0.0f);
    std::fill_n(peak_, count * group_, -__builtin_inff());
    std::fill_n(mass_, count * group_, 0.0f);
  }

  void step(int64_t place, const int32_t* positions, int64_t count) {
    const auto& cache = shape_.cache;
    const int64_t block = table_[place / cache.block_size];
    const int64_t stride = 2 * dim_;
    const C* keys = kv_ + ((block * cache.kv_heads + kv_head_) * cache.block_size + place % cache.block_size) * stride;
    key_columns(keys, stride, dim_, columns_);
    // What lies beyond the run's last token is another request's, or was: not even times zero may it be read.
    const int64_t known = std::min<int64_t>(kKeys, positions[count - 1] - place + 1);
    for (int64_t key = 0; key < known; ++key)
      for (int64_t d = 0; d < dim_; ++d) values_[key * dim_ + d] = to_float(keys[key * stride + dim_ + d]);
    std::fill_n(values_ + known * dim_, (kKeys - known) * dim_, 0.0f);
    const int64_t rows = count * group_;
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) score<8>(row);
    for (; row + 3 <= rows; row += 3) score<3>(row);
    for (; row < rows; ++row) score<1>(row);
    for (row = 0; row < rows; ++row) weigh(row, positions[row / group_] - place);
    for (row = 0; row + 4 <= rows; row += 4) blend<4>(row);
    for (; row + 3 <= rows; row += 3) blend<3>(row);
    for (; row < rows; ++row) blend<1>(row);
  }

  template <int Rows>
  void score(int64_t row) {
    Vector sums[Rows] = {};
    const float* query = query_ + row * dim_;
    for (int64_t d = 0; d < dim_; ++d) {
      const Vector column = *reinterpret_cast<const Vector*>(columns_ + d * kKeys);
      for (int r = 0; r < Rows; ++r) sums[r] += query[r * dim_ + d] * column;
    }
    for (int r = 0; r < Rows; ++r) *reinterpret_cast<Vector*>(scores_ + (row + r) * kKeys) = sums[r];
  }

  // Scores to weights, in place, and what the row had to be scaled by. `reach`: offset of the row's own position from
  // the tile's first key; keys beyond it, or outside the window, weigh nothing.
  void weigh(int64_t row, int64_t reach) {
    float* scores = scores_ + row * kKeys;
    const int64_t from = shape_.window > 0 ? reach - shape_.window + 1 : 0;
    float peak = peak_[row];
#pragma omp simd reduction(max : peak)
    for (int64_t key = 0; key < kKeys; ++key) {
      scores[key] = key > reach || key < from ? -__builtin_inff() : scores[key];
      peak = scores[key] > peak ? scores[key] : peak;
    }
    if (peak == -__builtin_inff()) {
      std::fill_n(scores, kKeys, 0.0f);
      decay_[row] = 1.0f;
      return;
    }
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t key = 0; key < kKeys; ++key) {
      scores[key] = exp_nonpositive(scores[key] - peak);
      sum += scores[key];
    }
    decay_[row] = exp_nonpositive(peak_[row] - peak);
    mass_[row] = mass_[row] * decay_[row] + sum;
    peak_[row] = peak;
  }

  template <int Rows>
  void blend(int64_t row) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim_; d += 4 * kLanes) blend_columns<Rows, 4>(row, d);
    for (; d + kLanes <= dim_; d += kLanes) blend_columns<Rows, 1>(row, d);
    for (; d < dim_; ++d)
      for (int64_t r = row; r < row + Rows; ++r) {
        float sum = mixed_[r * dim_ + d] * decay_[r];
        for (int64_t key = 0; key < kKeys; ++key)
          sum = __builtin_fmaf(scores_[r * kKeys + key], values_[key * dim_ + d], sum);
        mixed_[r * dim_ + d] = sum;
      }
  }

  template <int Rows, int Vectors>
  void blend_columns(int64_t row, int64_t d) {
    Vector sums[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) sums[r][v] = load(mixed_ + (row + r) * dim_ + d + v * kLanes) * decay_[row + r];
    for (int64_t key = 0; key < kKeys; ++key) {
      Vector value[Vectors];
      for (int v = 0; v < Vectors; ++v) value[v] = load(values_ + key * dim_ + d + v * kLanes);
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) sums[r][v] += scores_[(row + r) * kKeys + key] * value[v];
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) __builtin_memcpy(mixed_ + (row + r) * dim_ + d + v * kLanes, &sums[r][v], sizeof(Vector));
  }

  static Vector load(const float* place) {
    Vector value;
    __builtin_memcpy(&value, place, sizeof value);
    return value;
  }

  void finish(int64_t count, T* out) {
    const float scale = shape_.v_scale.at(kv_head_);
    for (int64_t t = 0; t < count; ++t)
      for (int64_t g = 0; g < group_; ++g) {
        const int64_t row = t * group_ + g;
        T* to = out + (t * shape_.heads + kv_head_ * group_ + g) * dim_;
        for (int64_t d = 0; d < dim_; ++d) store(to + d, mixed_[row * dim_ + d] / mass_[row] * scale);
      }
  }

  const AttentionShape shape_;
  const C* kv_;
  const int32_t* table_;
  int64_t kv_head_, group_, dim_;
  float *query_, *mixed_, *columns_, *values_, *scores_, *peak_, *mass_, *decay_;
};

}  // namespace

template <typename T, typename C>
void paged_attention(const T* query, const C* kv, const int32_t* block_tables, const int32_t* request_rows,
                     const int32_t* positions, T* out, AttentionShape shape) {
  const std::vector<Run> runs = runs_of(request_rows, positions, shape.tokens);
  const int64_t width = shape.heads * shape.cache.head_dim;
  for (int64_t t = 0; t < shape.tokens; ++t)
    if (request_rows[t] < 0) std::fill_n(reinterpret_cast<char*>(out + t * width), width * sizeof(T), char{0});
  const int64_t tasks = static_cast<int64_t>(runs.size()) * shape.cache.kv_heads;
  parallel_chunks(tasks, [&](int64_t task) {
    const Run run = runs[runs.size() - 1 - task / shape.cache.kv_heads];  // the longest contexts first
    Tile<T, C> tile(shape, kv, block_tables + request_rows[run.first] * shape.table_width, task % shape.cache.kv_heads);
    tile.run(query + run.first * shape.query_stride, positions + run.first, run.count, out + run.first * width);
  });
}

template <typename T>
void kv_write(T* kv, const T* key, const T* value, const int32_t* slots, int64_t tokens, int64_t key_stride,
              int64_t value_stride, CacheShape shape) {
  const int64_t dim = shape.head_dim;
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    const int64_t block = slots[t] / shape.block_size, place = slots[t] % shape.block_size;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      T* to = kv + ((block * shape.kv_heads + head) * shape.block_size + place) * 2 * dim;
      std::copy_n(key + t * key_stride + head * dim, dim, to);
      std::copy_n(value + t * value_stride + head * dim, dim, to + dim);
    }
  }
}

template <typename T>
void kv_write_scaled(e4m3* kv, const T* key, const T* value, const int32_t* slots, int64_t tokens, int64_t key_stride,
                     int64_t value_stride, CacheShape shape, HeadScales k_scale, HeadScales v_scale, float fp8_max) {
  const int64_t dim = shape.head_dim;
  const auto write = [&](const T* from, float factor, e4m3* to) {
    for (int64_t d = 0; d < dim; ++d) {
      const float scaled = to_float(from[d]) * factor;
      store(to + d, scaled < -fp8_max ? -fp8_max : scaled > fp8_max ? fp8_max : scaled);
    }
  };
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    const int64_t block = slots[t] / shape.block_size, place = slots[t] % shape.block_size;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      e4m3* to = kv + ((block * shape.kv_heads + head) * shape.block_size + place) * 2 * dim;
      write(key + t * key_stride + head * dim, 1.0f / k_scale.at(head), to);
      write(value + t * value_stride + head * dim, 1.0f / v_scale.at(head), to + dim);
    }
  }
}

template void paged_attention(const float*, const float*, const int32_t*, const int32_t*, const int32_t*, float*, AttentionShape);
template void paged_attention(const bf16*, const bf16*, const int32_t*, const int32_t*, const int32_t*, bf16*, AttentionShape);
template void paged_attention(const float*, const e4m3*, const int32_t*, const int32_t*, const int32_t*, float*, AttentionShape);
template void paged_attention(const bf16*, const e4m3*, const int32_t*, const int32_t*, const int32_t*, bf16*, AttentionShape);
template void kv_write(float*, const float*, const float*, const int32_t*, int64_t, int64_t, int64_t, CacheShape);
template void kv_write(bf16*, const bf16*, const bf16*, const int32_t*, int64_t, int64_t, int64_t, CacheShape);
template void kv_write_scaled(e4m3*, const float*, const float*, const int32_t*, int64_t, int64_t, int64_t, CacheShape, HeadScales,
                              HeadScales, float);
template void kv_write_scaled(e4m3*, const bf16*, const bf16*, const int32_t*, int64_t, int64_t, int64_t, CacheShape, HeadScales,
                              HeadScales, float);

}  // namespace neuron
