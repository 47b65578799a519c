// SPDX-License-Identifier: Apache-2.0
// Draws from rows of every odd kind under every kind of limit; the sanitizers it is built with end it at a wrong access.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "kernels.h"

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMost = std::numeric_limits<float>::max();
constexpr int64_t kVocab = 77;  // a last word and a last vector that are not whole

std::vector<std::vector<float>> odd_rows() {
  const float fills[] = {0.0f, -kInf, kInf, kNan, -kNan, kMost, -kMost, 1e-40f};
  std::vector<std::vector<float>> rows;
  for (float fill : fills)
    for (float other : fills)
      for (int64_t place : {int64_t{0}, kVocab / 2, kVocab - 1}) {
        std::vector<float> row(kVocab, fill);
        row[place] = other;
        rows.push_back(row);
      }
  return rows;
}

}  // namespace

int main() {
  std::vector<float> logits, uniforms{0.0f, 0.99999994f};
  const std::vector<std::vector<float>> rows = odd_rows();
  for (const std::vector<float>& row : rows) logits.insert(logits.end(), row.begin(), row.end());
  const int64_t count = static_cast<int64_t>(rows.size()), words = (kVocab + 31) / 32;
  std::vector<int32_t> out(count), all(count * words, -1), none(count * words, 0), zeros(count), state(count * words);
  std::vector<float> bias(count * kVocab, 0.0f), penalties;
  for (int64_t i = 0; i < count; ++i) penalties.insert(penalties.end(), {1e-40f, kMost, -kMost});
  std::vector<int32_t> counts(count * kVocab, 1), states(count), never(count, -1);
  for (int64_t i = 0; i < count; ++i) states[i] = static_cast<int32_t>(i);
  const neuron::Edits edits{zeros.data(), states.data(), zeros.data(), never.data(), never.data(), 1,
                            penalties.data(), bias.data(), state.data(), state.data(), counts.data()};
  for (float temperature : {0.0f, 1.0f, kInf})
    for (int32_t top_k : {0, 5, std::numeric_limits<int32_t>::max()})
      for (float top_p : {0.9f, 1.0f})
        for (float min_p : {0.0f, 0.1f})
          for (float uniform : uniforms)
            for (const std::vector<int32_t>* allowed : {&all, &none}) {
              const std::vector<float> t(count, temperature), p(count, top_p), m(count, min_p), u(count, uniform);
              const std::vector<int32_t> k(count, top_k);
              for (bool edited : {false, true}) {
                if (edited)
                  neuron::sample_edited(logits.data(), t.data(), k.data(), p.data(), m.data(), u.data(), allowed->data(), edits,
                                        out.data(), count, kVocab);
                else
                  neuron::sample(logits.data(), t.data(), k.data(), p.data(), m.data(), u.data(), allowed->data(), out.data(),
                                 count, kVocab);
                for (int32_t token : out)
                  if (token < 0 || token >= kVocab) return std::printf("token %d\n", token), 1;
              }
            }
  return 0;
}
