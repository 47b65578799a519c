// SPDX-License-Identifier: Apache-2.0
// Sampling of one token per row. A sampled row costs two passes over the vocabulary: weights with a histogram of
// their magnitudes, then a gather of those that can still be kept; everything after works on the few gathered.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace neuron {
namespace {

constexpr int kBins = 1 << 13;  // bins by the upper bits of a positive float: magnitude and five bits of fraction

inline int bin_of(float weight) {
  uint32_t bits;
  __builtin_memcpy(&bits, &weight, sizeof bits);
  return static_cast<int>(bits >> 18);  // weights are in [0, 1]: below 1 << 12
}

// Of what is a number: a row of NaN gives minus infinity.
float largest(const float* values, int64_t count) {
  float best = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < count; ++i) best = values[i] > best ? values[i] : best;
  return best;
}

int32_t first_largest(const float* values, int64_t count) {
  const float best = largest(values, count);
  for (int64_t i = 0; i < count; ++i)
    if (values[i] == best) return static_cast<int32_t>(i);
  return 0;  // a row of NaN
}

struct Limits {
  int64_t top_k;
  double top_p;
  float min_p;
};

class Sampler {
 public:
  int32_t draw(const float* logits, int64_t vocab, float temperature, Limits limits, double uniform) {
    weights_.resize(vocab);
    counts_.resize(kBins);
    masses_.resize(kBins);
    weigh(logits, vocab, 1.0f / temperature);
    if (limits.top_k > 0 || limits.top_p < 1.0) {
      gather(vocab, limits);
    } else {
      kept_.clear();
      for (int64_t i = 0; i < vocab; ++i)
        if (weights_[i] > 0.0f && weights_[i] >= limits.min_p) kept_.push_back({weights_[i], static_cast<int32_t>(i)});
    }
    return invert(uniform);
  }

 private:
  struct Entry {
    float weight;
    int32_t token;
  };

  // Unnormalised probabilities, 1 for the likeliest token: in [0, 1], or NaN where the logit is.
  void weigh(const float* logits, int64_t vocab, float inverse) {
    const float peak = largest(logits, vocab);
    float* weights = weights_.data();
    if (std::isinf(peak)) {  // the difference of two infinities is no number
      for (int64_t i = 0; i < vocab; ++i) weights[i] = peak > 0.0f && logits[i] == peak ? 1.0f : 0.0f;
      return;
    }
#pragma omp simd
    for (int64_t i = 0; i < vocab; ++i) weights[i] = exp_nonpositive((logits[i] - peak) * inverse);
  }

  void gather(int64_t vocab, const Limits& limits) {
    std::fill(counts_.begin(), counts_.end(), 0);
    std::fill(masses_.begin(), masses_.end(), 0.0);
    for (int64_t i = 0; i < vocab; ++i) {
      if (!(weights_[i] >= limits.min_p)) continue;  // NaN has no bin
      const int bin = bin_of(weights_[i]);
      ++counts_[bin];
      masses_[bin] += weights_[i];
    }
    const float edge = lower_edge(limits);
    kept_.clear();
    for (int64_t i = 0; i < vocab; ++i)
      if (weights_[i] >= edge && weights_[i] >= limits.min_p && weights_[i] > 0.0f)
        kept_.push_back({weights_[i], static_cast<int32_t>(i)});
    trim(limits);
  }

  // Smallest weight of the bin in which the limits are reached: nothing below it can be kept.
  float lower_edge(const Limits& limits) const {
    double total = 0.0;
    for (double mass : masses_) total += mass;
    int64_t count = 0;
    double mass = 0.0;
    const double target = limits.top_k > 0 ? 2.0 * total : limits.top_p * total;
    for (int bin = kBins - 1; bin >= 0; --bin) {
      count += counts_[bin];
      mass += masses_[bin];
      if ((limits.top_k > 0 && count >= limits.top_k) || (limits.top_k <= 0 && mass >= target)) return edge_of(bin);
    }
    return 0.0f;
  }

  static float edge_of(int bin) {
    const uint32_t bits = static_cast<uint32_t>(bin) << 18;
    float edge;
    __builtin_memcpy(&edge, &bits, sizeof edge);
    return edge;
  }

  // Applies top-k, then top-p to what top-k left; ties with the last one kept stay.
  void trim(const Limits& limits) {
    ordered_.clear();
    for (const Entry& entry : kept_) ordered_.push_back(entry.weight);
    const double beyond = limits.top_k > 0 ? 0.0 : outside();
    std::sort(ordered_.begin(), ordered_.end(), std::greater<float>());
    float floor = 0.0f;
    if (limits.top_k > 0 && limits.top_k < static_cast<int64_t>(ordered_.size())) {
      floor = ordered_[limits.top_k - 1];
      while (ordered_.back() < floor) ordered_.pop_back();
    }
    if (limits.top_p < 1.0) {
      double total = beyond, mass = 0.0;
      for (float weight : ordered_) total += weight;
      for (float weight : ordered_) {
        mass += weight;
        floor = weight;
        if (mass >= limits.top_p * total) break;
      }
    }
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [floor](const Entry& e) { return e.weight < floor; }),
                kept_.end());
  }

  // Mass that passed min-p but was left out of the gathered ones.
  double outside() const {
    double total = 0.0;
    for (double mass : masses_) total += mass;
    for (const Entry& entry : kept_) total -= entry.weight;
    return std::max(total, 0.0);
  }

  int32_t invert(double uniform) const {
    double total = 0.0;
    for (const Entry& entry : kept_) total += entry.weight;
    const double target = uniform * total;
    double mass = 0.0;
    for (const Entry& entry : kept_) {
      mass += entry.weight;
      if (mass > target) return entry.token;
    }
    return kept_.empty() ? 0 : kept_.back().token;
  }

  std::vector<float> weights_;
  std::vector<int64_t> counts_;
  std::vector<double> masses_;
  std::vector<Entry> kept_;
  std::vector<float> ordered_;
};

// What a row without a grammar holds; a row with one may too, and is then masked to no effect.
bool allows_all(const int32_t* allowed, int64_t words) {
  int32_t all = -1;
  for (int64_t i = 0; i < words; ++i) all &= allowed[i];
  return all == -1;
}

void mask(const float* logits, const int32_t* allowed, int64_t vocab, std::vector<float>& masked) {
  masked.resize(vocab);
  for (int64_t begin = 0; begin < vocab; begin += 32) {
    const uint32_t bits = static_cast<uint32_t>(allowed[begin / 32]);
    const int64_t count = std::min<int64_t>(32, vocab - begin);
    for (int64_t i = 0; i < count; ++i)
      masked[begin + i] = bits >> i & 1u ? logits[begin + i] : -std::numeric_limits<float>::infinity();
  }
}

constexpr float kBanned = -std::numeric_limits<float>::infinity();
constexpr int32_t kAfterAny = -2;

inline bool has_bit(const int32_t* words, int64_t token) {
  return static_cast<uint32_t>(words[token / 32]) >> (token % 32) & 1u;
}

// The logits of a row as it is drawn: those given, or a copy with what the mask and the edits make of them.
class EditedRow {
 public:
  const float* read(const float* logits, const int32_t* allowed, const Edits& edits, int64_t row, int64_t vocab) {
    const int64_t words = (vocab + 31) / 32, state = edits.state_rows[row];
    const float* given = logits + row * vocab;
    const bool masked = !allows_all(allowed + row * words, words);
    if (!masked && state < 0) return given;
    if (masked)
      mask(given, allowed + row * words, vocab, values_);
    else
      values_.assign(given, given + vocab);
    if (state >= 0) {
      const float* bias = edits.bias + state * vocab;
      for (int64_t i = 0; i < vocab; ++i) values_[i] += bias[i];
      ban_ends(edits, row, vocab);
      if (edits.bans_stop[row]) ban_stops(edits.stop_tokens + state * words, vocab);
      penalise(edits, state, words, vocab);
    }
    return values_.data();
  }

 private:
  void ban_ends(const Edits& edits, int64_t row, int64_t vocab) {
    for (int64_t slot = row * edits.ban_slots; slot < (row + 1) * edits.ban_slots; ++slot) {
      const int32_t token = edits.ban_then[slot], after = edits.ban_if[slot];
      if (token >= 0 && token < vocab && (after == kAfterAny || after == edits.last_tokens[row])) values_[token] = kBanned;
    }
  }

  void ban_stops(const int32_t* stops, int64_t vocab) {
    bool others = false;
    for (int64_t i = 0; i < vocab && !others; ++i) others = values_[i] != kBanned && !has_bit(stops, i);
    if (!others) return;
    for (int64_t i = 0; i < vocab; ++i)
      if (has_bit(stops, i)) values_[i] = kBanned;
  }

  void penalise(const Edits& edits, int64_t state, int64_t words, int64_t vocab) {
    const float* penalties = edits.penalties + state * 3;
    const float repetition = penalties[0], presence = penalties[1], frequency = penalties[2];
    if (repetition == 1.0f && presence == 0.0f && frequency == 0.0f) return;
    const int32_t* counts = edits.output_counts + state * vocab;
    const int32_t* prompt = edits.prompt_tokens + state * words;
    for (int64_t i = 0; i < vocab; ++i) {
      const int32_t count = counts[i];
      if (count == 0 && !has_bit(prompt, i)) continue;
      float value = values_[i];
      value = value > 0.0f ? value / repetition : value * repetition;
      value -= frequency * static_cast<float>(count);
      values_[i] = value - (count > 0 ? presence : 0.0f);
    }
  }

  std::vector<float> values_;
};

}  // namespace

void greedy(const float* logits, int32_t* out, int64_t rows, int64_t vocab) {
  parallel_chunks(rows, [=](int64_t row) { out[row] = first_largest(logits + row * vocab, vocab); });
}

void sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p,
            const float* min_p, const float* uniform, const int32_t* allowed, int32_t* out, int64_t rows,
            int64_t vocab) {
  const int64_t words = (vocab + 31) / 32;
  parallel_chunks(rows, [=](int64_t row) {
    static thread_local Sampler sampler;
    static thread_local std::vector<float> masked;
    const float* values = logits + row * vocab;
    if (allowed != nullptr && !allows_all(allowed + row * words, words)) {
      mask(values, allowed + row * words, vocab, masked);
      values = masked.data();
    }
    const Limits limits{top_k[row] >= vocab ? 0 : top_k[row], top_p[row], min_p[row]};
    out[row] = temperature[row] < 1e-5f ? first_largest(values, vocab)
                                        : sampler.draw(values, vocab, temperature[row], limits, uniform[row]);
  });
}

void sample_edited(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p,
                   const float* min_p, const float* uniform, const int32_t* allowed, const Edits& edits, int32_t* out,
                   int64_t rows, int64_t vocab) {
  parallel_chunks(rows, [=](int64_t row) {
    static thread_local Sampler sampler;
    static thread_local EditedRow edited;
    const float* values = edited.read(logits, allowed, edits, row, vocab);
    const Limits limits{top_k[row] >= vocab ? 0 : top_k[row], top_p[row], min_p[row]};
    out[row] = temperature[row] < 1e-5f ? first_largest(values, vocab)
                                        : sampler.draw(values, vocab, temperature[row], limits, uniform[row]);
  });
}

void count_tokens(int32_t* counts, const int32_t* rows, const int32_t* tokens, int64_t count, int64_t vocab) {
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] >= 0) ++counts[rows[i] * vocab + tokens[i]];
}

}  // namespace neuron
