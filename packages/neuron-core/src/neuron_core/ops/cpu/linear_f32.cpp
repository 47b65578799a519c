// SPDX-License-Identifier: Apache-2.0
// Matrix product in float32 with a weight packed in panels of 32 columns, [columns/32, inner, 32, 1].
#include <algorithm>

#include "kernels.h"
#include "pool.h"
#include "tile_f32.h"

namespace neuron {
namespace {

constexpr int64_t kBlockRows = 4 * kTileRows;  // rows that stay in the second-level cache while panels pass by
constexpr int64_t kGroup = 4;                  // panels of one chunk, where there are blocks enough

}  // namespace

void packed_linear_float(const float* x, const float* weight, float* out, int64_t rows, int64_t inner, int64_t columns) {
  const int64_t panels = columns / kPanelColumns;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows, group = blocks > 1 ? kGroup : 1, groups = (panels + group - 1) / group;
  parallel_chunks(blocks * groups, [=](int64_t chunk) {
    const int64_t first = chunk % blocks * kBlockRows, last = std::min(rows, first + kBlockRows);
    const int64_t begin = chunk / blocks * group, end = std::min(panels, begin + group);
    for (int64_t p = begin; p < end; ++p)
      for (int64_t row = first; row < last; row += kTileRows)
        tile_rows_f32(std::min(kTileRows, last - row), x + row * inner, weight + p * inner * kPanelColumns, nullptr,
                      out + row * columns + p * kPanelColumns, inner, {inner, columns});
  });
}

}  // namespace neuron
