// SPDX-License-Identifier: Apache-2.0
// Norms, rotary embedding and the gate of the MLP: float arithmetic, one rounding at the end, rows shared out in
// pieces worth a thread's while.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "pool.h"

namespace neuron {
namespace {

constexpr int64_t kPiece = 1 << 14;  // elements; some microseconds of work

template <typename Body>
void for_rows(int64_t rows, int64_t width, Body body) {
  const int64_t step = std::max<int64_t>(1, kPiece / width);
  parallel_chunks((rows + step - 1) / step, [=](int64_t piece) {
    for (int64_t row = piece * step; row < std::min(rows, (piece + 1) * step); ++row) body(row);
  });
}

template <typename T>
void normalise(const T* x, const T* weight, T* out, int64_t width, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) sum += to_float(x[i]) * to_float(x[i]);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) store(out + i, to_float(x[i]) * scale * to_float(weight[i]));
}

inline float sigmoid(float x) {
  const float e = exp_nonpositive(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

}  // namespace

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t tokens, int64_t heads, int64_t width, int64_t token_stride,
              float eps) {
  for_rows(tokens * heads, width, [=](int64_t row) {
    normalise(x + row / heads * token_stride + row % heads * width, weight, out + row * width, width, eps);
  });
}

template <typename T>
void add_rms_norm(const T* x, const T* residual, const T* weight, T* out, T* summed, int64_t rows, int64_t width, float eps) {
  for_rows(rows, width, [=](int64_t row) {
    const int64_t begin = row * width;
#pragma omp simd
    for (int64_t i = begin; i < begin + width; ++i) store(summed + i, to_float(x[i]) + to_float(residual[i]));
    normalise(summed + begin, weight, out + begin, width, eps);
  });
}

template <typename T>
void rotary(const T* x, const float* cos, const float* sin, T* out, int64_t tokens, int64_t heads, int64_t dim,
            int64_t token_stride) {
  const int64_t half = dim / 2;
  for_rows(tokens, heads * dim, [=](int64_t token) {
    const float *c = cos + token * half, *s = sin + token * half;
    for (int64_t head = 0; head < heads; ++head) {
      const T* from = x + token * token_stride + head * dim;
      T* to = out + (token * heads + head) * dim;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float first = to_float(from[i]), second = to_float(from[half + i]);
        store(to + i, first * c[i] - second * s[i]);
        store(to + half + i, second * c[i] + first * s[i]);
      }
    }
  });
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t width) {
  for_rows(rows, width, [=](int64_t row) {
    const T *gate = gate_up + 2 * row * width, *up = gate + width;
    T* to = out + row * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float g = to_float(gate[i]);
      store(to + i, g * sigmoid(g) * to_float(up[i]));
    }
  });
}

#define NEURON_FOR(T)                                                                                              \
  template void rms_norm(const T*, const T*, T*, int64_t, int64_t, int64_t, int64_t, float);                       \
  template void add_rms_norm(const T*, const T*, const T*, T*, T*, int64_t, int64_t, float);                       \
  template void rotary(const T*, const float*, const float*, T*, int64_t, int64_t, int64_t, int64_t);              \
  template void silu_mul(const T*, T*, int64_t, int64_t);
NEURON_FOR(float)
NEURON_FOR(bf16)
#undef NEURON_FOR

}  // namespace neuron
