// SPDX-License-Identifier: Apache-2.0
// Matrix product with a weight packed for bfloat16 pair products, [columns/32, inner/2, 32, 2].
// Every output element is one chain of fused products over `inner`, whatever the number of rows: a row's result does
// not depend on its batch.
#include "kernels.h"
#include "pool.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

namespace neuron {
namespace {

constexpr int64_t kColumns = 32;  // columns of one packed panel: two vectors of 16

inline void put(float* out, __m512 low, __m512 high) {
  _mm512_storeu_ps(out, low);
  _mm512_storeu_ps(out + 16, high);
}
inline void put(bf16* out, __m512 low, __m512 high) {
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

template <int Rows, typename Out>
inline void tile(const bf16* x, const bf16* panel, Out* out, int64_t inner, int64_t columns) {
  __m512 low[Rows], high[Rows];
  for (int r = 0; r < Rows; ++r) low[r] = high[r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inner; k += 2) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(panel + k * kColumns);
    const __m512bh second = (__m512bh)_mm512_loadu_si512(panel + k * kColumns + 32);
    for (int r = 0; r < Rows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * inner + k, sizeof pair);
      const __m512bh spread = (__m512bh)_mm512_set1_epi32(pair);
      low[r] = _mm512_dpbf16_ps(low[r], first, spread);
      high[r] = _mm512_dpbf16_ps(high[r], second, spread);
    }
  }
  for (int r = 0; r < Rows; ++r) put(out + r * columns, low[r], high[r]);
}

template <typename Out>
void panel_rows(const bf16* x, const bf16* panel, Out* out, int64_t rows, int64_t inner, int64_t columns) {
  int64_t row = 0;
  for (; row + 12 <= rows; row += 12) tile<12>(x + row * inner, panel, out + row * columns, inner, columns);
  const bf16* rest = x + row * inner;
  Out* place = out + row * columns;
  switch (rows - row) {
    case 1: return tile<1>(rest, panel, place, inner, columns);
    case 2: return tile<2>(rest, panel, place, inner, columns);
    case 3: return tile<3>(rest, panel, place, inner, columns);
    case 4: return tile<4>(rest, panel, place, inner, columns);
    case 5: return tile<5>(rest, panel, place, inner, columns);
    case 6: return tile<6>(rest, panel, place, inner, columns);
    case 7: return tile<7>(rest, panel, place, inner, columns);
    case 8: return tile<8>(rest, panel, place, inner, columns);
    case 9: return tile<9>(rest, panel, place, inner, columns);
    case 10: return tile<10>(rest, panel, place, inner, columns);
    case 11: return tile<11>(rest, panel, place, inner, columns);
    default: return;
  }
}

template <typename Out>
void product(const bf16* x, const bf16* weight, Out* out, int64_t rows, int64_t inner, int64_t columns) {
  const int64_t panels = columns / kColumns;
  parallel_chunks(panels, [=](int64_t p) {
    panel_rows(x, weight + p * inner * kColumns, out + p * kColumns, rows, inner, columns);
  });
}

}  // namespace

bool has_packed_linear() { return true; }
void packed_linear(const bf16* x, const bf16* weight, bf16* out, int64_t rows, int64_t inner, int64_t columns) {
  product(x, weight, out, rows, inner, columns);
}
void packed_linear_f32(const bf16* x, const bf16* weight, float* out, int64_t rows, int64_t inner, int64_t columns) {
  product(x, weight, out, rows, inner, columns);
}

}  // namespace neuron

#else

namespace neuron {
bool has_packed_linear() { return false; }
void packed_linear(const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t) { __builtin_trap(); }
void packed_linear_f32(const bf16*, const bf16*, float*, int64_t, int64_t, int64_t) { __builtin_trap(); }
}  // namespace neuron

#endif
