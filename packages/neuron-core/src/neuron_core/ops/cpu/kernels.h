// SPDX-License-Identifier: Apache-2.0
// Kernels of the CPU device: plain pointers in, no PyTorch headers, so that each file compiles in about a second.
#pragma once

#include <cstdint>

namespace neuron {

struct bf16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) {
  const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
  float result;
  __builtin_memcpy(&result, &wide, sizeof result);
  return result;
}
inline void store(float* place, float value) { *place = value; }
inline void store(bf16* place, float value) {  // round to nearest even; NaN stays NaN
  uint32_t wide;
  __builtin_memcpy(&wide, &value, sizeof wide);
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  place->bits = static_cast<uint16_t>(value != value ? (wide >> 16) | 0x40u : rounded);
}

// exp(x) for x <= 0 within 2 ulp; loops over it vectorise. Cephes expf (S. Moshier).
inline float exp_nonpositive(float x) {
  const float bounded = x < -87.0f ? -87.0f : x;
  const float n = __builtin_floorf(bounded * 1.44269504f + 0.5f);
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t biased = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  __builtin_memcpy(&power, &biased, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

// x [rows, inner] times a packed weight [columns/32, inner/2, 32, 2] -> out [rows, columns].
void packed_linear(const bf16* x, const bf16* weight, bf16* out, int64_t rows, int64_t inner, int64_t columns);
void packed_linear_f32(const bf16* x, const bf16* weight, float* out, int64_t rows, int64_t inner, int64_t columns);
bool has_packed_linear();

struct CacheShape {
  int64_t kv_heads, block_size, head_dim;
};

template <typename T>
void kv_write(T* kv, const T* key, const T* value, const int32_t* slots, int64_t tokens, int64_t key_stride,
              int64_t value_stride, CacheShape shape);

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t tokens, int64_t heads, int64_t width, int64_t token_stride,
              float eps);
template <typename T>
void add_rms_norm(const T* x, const T* residual, const T* weight, T* out, T* summed, int64_t rows, int64_t width, float eps);
template <typename T>
void rotary(const T* x, const float* cos, const float* sin, T* out, int64_t tokens, int64_t heads, int64_t dim,
            int64_t token_stride);
template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t width);

struct AttentionShape {
  int64_t tokens, heads, table_width, query_stride;
  CacheShape cache;
  float scale;
  int64_t window;
};

template <typename T>
void paged_attention(const T* query, const T* kv, const int32_t* block_tables, const int32_t* request_rows,
                     const int32_t* positions, T* out, AttentionShape shape);

void greedy(const float* logits, int32_t* out, int64_t rows, int64_t vocab);
void sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p,
            const float* min_p, const float* uniform, int32_t* out, int64_t rows, int64_t vocab);

void pin_threads(const int32_t* cpus, int64_t count);

}  // namespace neuron
