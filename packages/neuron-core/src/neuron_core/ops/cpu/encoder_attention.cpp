// SPDX-License-Identifier: Apache-2.0
// Attention of texts that lie one after another, each token over all tokens of its text and over no others.
// Both products are chains over a text's own tokens in order: a token's result does not depend on its neighbours.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "tile_f32.h"

namespace neuron {
namespace {

struct Text {
  int64_t first, count;
};

// Runs of equal rows; -1 is padding, whose output is zeros.
std::vector<Text> texts_of(const int32_t* request_rows, int64_t tokens) {
  std::vector<Text> texts;
  for (int64_t token = 0; token < tokens;) {
    int64_t end = token + 1;
    while (end < tokens && request_rows[end] == request_rows[token]) ++end;
    if (request_rows[token] >= 0) texts.push_back({token, end - token});
    token = end;
  }
  return texts;
}

int64_t whole_panels(int64_t size) { return (size + kPanelColumns - 1) / kPanelColumns * kPanelColumns; }

// Keys of one head as panels of the first product, values as panels of the second, queries in float, and the scores
// of one tile; kept by each thread from task to task.
struct Scratch {
  std::vector<float> keys, values, queries, scores, result;
};

// scores [count] of `padded` places -> weights whose sum is returned; places beyond `count` weigh nothing.
inline float exponentials(float* scores, int64_t count, int64_t padded, float scale) {
  float largest = scores[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, scores[i]);
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = exp_nonpositive((scores[i] - largest) * scale);
    sum += scores[i];
  }
  for (int64_t i = count; i < padded; ++i) scores[i] = 0.0f;
  return sum;
}

template <typename T>
class Head {
 public:
  Head(Scratch& scratch, EncoderShape shape, Text text, int64_t head)
      : s_(scratch), shape_(shape), text_(text), head_(head), keys_(whole_panels(text.count)), width_(whole_panels(shape.head_dim)) {}

  void run(const T* query, const T* key, const T* value, T* out) {
    fill(query, key, value);
    s_.scores.resize(kTileRows * keys_);
    s_.result.resize(kTileRows * width_);
    for (int64_t row = 0; row < text_.count; row += kTileRows) run_tile(row, std::min(kTileRows, text_.count - row), out);
  }

 private:
  const T* at(const T* x, int64_t token) const { return x + (text_.first + token) * shape_.stride + head_ * shape_.head_dim; }

  void fill(const T* query, const T* key, const T* value) {
    const int64_t dim = shape_.head_dim, count = text_.count;
    s_.keys.assign(keys_ * dim, 0.0f);
    s_.values.assign(count * width_, 0.0f);
    s_.queries.resize(count * dim);
    for (int64_t token = 0; token < count; ++token) {
      const T *q = at(query, token), *k = at(key, token), *v = at(value, token);
      float* panel = s_.keys.data() + token / kPanelColumns * kPanelColumns * dim + token % kPanelColumns;
      for (int64_t d = 0; d < dim; ++d) {
        s_.queries[token * dim + d] = to_float(q[d]);
        panel[d * kPanelColumns] = to_float(k[d]);
        s_.values[(d / kPanelColumns * count + token) * kPanelColumns + d % kPanelColumns] = to_float(v[d]);
      }
    }
  }

  void run_tile(int64_t row, int64_t rows, T* out) {
    const int64_t dim = shape_.head_dim, count = text_.count;
    for (int64_t p = 0; p < keys_; p += kPanelColumns)
      tile_rows_f32(rows, s_.queries.data() + row * dim, s_.keys.data() + p * dim, nullptr, s_.scores.data() + p, dim, {dim, keys_});
    float sums[kTileRows];
    for (int64_t r = 0; r < rows; ++r) sums[r] = exponentials(s_.scores.data() + r * keys_, count, keys_, shape_.scale);
    for (int64_t p = 0; p < width_; p += kPanelColumns)
      tile_rows_f32(rows, s_.scores.data(), s_.values.data() + p * count, nullptr, s_.result.data() + p, count, {keys_, width_});
    for (int64_t r = 0; r < rows; ++r) {
      T* to = out + ((text_.first + row + r) * shape_.heads + head_) * dim;
      for (int64_t d = 0; d < dim; ++d) store(to + d, s_.result[r * width_ + d] / sums[r]);
    }
  }

  Scratch& s_;
  EncoderShape shape_;
  Text text_;
  int64_t head_, keys_, width_;
};

}  // namespace

template <typename T>
void encoder_attention(const T* query, const T* key, const T* value, const int32_t* request_rows, T* out, EncoderShape shape) {
  const std::vector<Text> texts = texts_of(request_rows, shape.tokens);
  const int64_t width = shape.heads * shape.head_dim;
  for (int64_t token = 0; token < shape.tokens; ++token)
    if (request_rows[token] < 0) std::fill_n(out + token * width, width, T{});
  parallel_chunks(static_cast<int64_t>(texts.size()) * shape.heads, [&](int64_t task) {
    static thread_local Scratch scratch;
    Head<T>(scratch, shape, texts[task / shape.heads], task % shape.heads).run(query, key, value, out);
  });
}

template void encoder_attention(const float*, const float*, const float*, const int32_t*, float*, EncoderShape);
template void encoder_attention(const bf16*, const bf16*, const bf16*, const int32_t*, bf16*, EncoderShape);

}  // namespace neuron
