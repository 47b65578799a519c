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

// 8-bit float: sign, four exponent bits (bias 7), three of mantissa; no infinity, NaN is 0x7f. Micikevicius et al. 2022.
struct e4m3 {
  uint8_t bits;
};

// Free of branches, so that loops over it vectorise, and of subnormal floats, which a process may flush to zero.
inline float to_float(e4m3 value) {
  const uint32_t magnitude = value.bits & 0x7fu;
  const uint32_t bits = magnitude == 0x7fu ? 0x7fc00000u : (magnitude << 20) + (120u << 23);
  float normal;
  __builtin_memcpy(&normal, &bits, sizeof normal);
  const float result = magnitude < 8 ? static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f : normal;
  return value.bits & 0x80u ? -result : result;
}

// Round to nearest even of a value no larger than 448; NaN stays NaN.
inline void store(e4m3* place, float value) {
  uint32_t wide;
  __builtin_memcpy(&wide, &value, sizeof wide);
  const uint32_t sign = (wide >> 24) & 0x80u, magnitude = wide & 0x7fffffffu;
  float absolute;
  __builtin_memcpy(&absolute, &magnitude, sizeof absolute);
  const float shifted = absolute + 0x1p14f;  // below 2^-6 the last kept bit is 2^-9, that of a number at 2^14
  uint32_t low;
  __builtin_memcpy(&low, &shifted, sizeof low);
  const uint32_t high = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  const uint32_t rounded = magnitude < (121u << 23) ? low - (141u << 23) : high;
  place->bits = static_cast<uint8_t>(sign | (magnitude > 0x7f800000u ? 0x7fu : rounded));
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

// x [rows, inner] times a packed weight [columns/32, inner, 32, 1] -> out [rows, columns].
void packed_linear_float(const float* x, const float* weight, float* out, int64_t rows, int64_t inner, int64_t columns);

struct CacheShape {
  int64_t kv_heads, block_size, head_dim;
};

// One scale for all kv heads (`step` 0) or one for each (`step` 1); no values stand for 1.
struct HeadScales {
  const float* values = nullptr;
  int64_t step = 0;
  float at(int64_t head) const { return values ? values[head * step] : 1.0f; }
};

template <typename T>
void kv_write(T* kv, const T* key, const T* value, const int32_t* slots, int64_t tokens, int64_t key_stride,
              int64_t value_stride, CacheShape shape);
template <typename T>
void kv_write_scaled(e4m3* kv, const T* key, const T* value, const int32_t* slots, int64_t tokens, int64_t key_stride,
                     int64_t value_stride, CacheShape shape, HeadScales k_scale, HeadScales v_scale, float fp8_max);

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
  HeadScales k_scale, v_scale;
};

template <typename T, typename C>
void paged_attention(const T* query, const C* kv, const int32_t* block_tables, const int32_t* request_rows,
                     const int32_t* positions, T* out, AttentionShape shape);

struct EncoderShape {
  int64_t tokens, heads, head_dim, stride;  // from a token's first head to the next token's, in query, key and value
  float scale;
};

// Each token over all tokens of its text: a run of equal request_rows; -1 is padding and gives zeros.
template <typename T>
void encoder_attention(const T* query, const T* key, const T* value, const int32_t* request_rows, T* out, EncoderShape shape);

void greedy(const float* logits, int32_t* out, int64_t rows, int64_t vocab);
// allowed may be null, or holds one bit per token, (vocab + 31) / 32 words a row; a token without its bit is not drawn.
void sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p,
            const float* min_p, const float* uniform, const int32_t* allowed, int32_t* out, int64_t rows,
            int64_t vocab);

// What changes a row's logits before it is drawn; shapes and meanings are in logit_edits.py.
struct Edits {
  const int32_t *last_tokens, *state_rows, *bans_stop, *ban_if, *ban_then;
  int64_t ban_slots;
  const float *penalties, *bias;
  const int32_t *prompt_tokens, *stop_tokens, *output_counts;
};
void sample_edited(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p,
                   const float* min_p, const float* uniform, const int32_t* allowed, const Edits& edits, int32_t* out,
                   int64_t rows, int64_t vocab);
void count_tokens(int32_t* counts, const int32_t* rows, const int32_t* tokens, int64_t count, int64_t vocab);

void pin_threads(const int32_t* cpus, int64_t count);

}  // namespace neuron
