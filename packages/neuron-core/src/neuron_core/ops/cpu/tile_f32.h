// SPDX-License-Identifier: Apache-2.0
// The float32 product that several kernels are made of: a few rows times a panel of 32 columns.
// Every output element is one chain of fused products over `inner`, whatever the number of rows.
#pragma once

#include <cstdint>

namespace neuron {

constexpr int64_t kPanelColumns = 32;  // two vectors of 16
constexpr int64_t kTileRows = 12;      // 24 of 32 registers hold sums

using Floats [[gnu::vector_size(64), gnu::aligned(4), gnu::may_alias]] = float;

struct Strides {
  int64_t x, out;
};

// x [Rows, inner] times panel [inner, 32] -> out [Rows, 32], added to `start` [32] unless that is null.
template <int Rows>
inline void tile_f32(const float* x, const float* panel, const float* start, float* out, int64_t inner, Strides strides) {
  Floats low[Rows], high[Rows];
  for (int r = 0; r < Rows; ++r) {
    low[r] = start ? *reinterpret_cast<const Floats*>(start) : Floats{};
    high[r] = start ? *reinterpret_cast<const Floats*>(start + 16) : Floats{};
  }
  for (int64_t k = 0; k < inner; ++k) {
    const Floats first = *reinterpret_cast<const Floats*>(panel + k * kPanelColumns);
    const Floats second = *reinterpret_cast<const Floats*>(panel + k * kPanelColumns + 16);
    for (int r = 0; r < Rows; ++r) {
      const float value = x[r * strides.x + k];
      low[r] += first * value;
      high[r] += second * value;
    }
  }
  for (int r = 0; r < Rows; ++r) {
    *reinterpret_cast<Floats*>(out + r * strides.out) = low[r];
    *reinterpret_cast<Floats*>(out + r * strides.out + 16) = high[r];
  }
}

// As `tile_f32`, for `rows` of at most kTileRows.
inline void tile_rows_f32(int64_t rows, const float* x, const float* panel, const float* start, float* out, int64_t inner,
                          Strides strides) {
  switch (rows) {
    case 1: return tile_f32<1>(x, panel, start, out, inner, strides);
    case 2: return tile_f32<2>(x, panel, start, out, inner, strides);
    case 3: return tile_f32<3>(x, panel, start, out, inner, strides);
    case 4: return tile_f32<4>(x, panel, start, out, inner, strides);
    case 5: return tile_f32<5>(x, panel, start, out, inner, strides);
    case 6: return tile_f32<6>(x, panel, start, out, inner, strides);
    case 7: return tile_f32<7>(x, panel, start, out, inner, strides);
    case 8: return tile_f32<8>(x, panel, start, out, inner, strides);
    case 9: return tile_f32<9>(x, panel, start, out, inner, strides);
    case 10: return tile_f32<10>(x, panel, start, out, inner, strides);
    case 11: return tile_f32<11>(x, panel, start, out, inner, strides);
    case 12: return tile_f32<12>(x, panel, start, out, inner, strides);
    default: return;
  }
}

}  // namespace neuron
