// SPDX-License-Identifier: Apache-2.0
// The kernels as CPU implementations of the `neuron` ops, whose schemas and checks are in Python.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "kernels.h"

namespace {

using at::Tensor;
using neuron::bf16;
using neuron::e4m3;

const bf16* halves(const Tensor& t) { return static_cast<const bf16*>(t.const_data_ptr()); }
const float* floats(const Tensor& t) { return static_cast<const float*>(t.const_data_ptr()); }
const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.const_data_ptr()); }

void require(bool holds, const char* what) { TORCH_CHECK(holds, "neuron op: ", what); }

Tensor packed_linear_float(const Tensor& x, const Tensor& weight, int64_t columns) {
  require(x.dim() == 2 && x.is_contiguous() && weight.is_contiguous() && weight.scalar_type() == at::kFloat, "x and weight must be contiguous float32");
  require(weight.size(1) == x.size(1) && weight.size(3) == 1 && weight.size(0) * 32 == columns, "the packed weight does not fit x and the columns");
  Tensor out = at::empty({x.size(0), columns}, x.options());
  neuron::packed_linear_float(floats(x), floats(weight), static_cast<float*>(out.mutable_data_ptr()), x.size(0), x.size(1), columns);
  return out;
}

Tensor packed_linear(const Tensor& x, const Tensor& weight, int64_t columns, bool wide) {
  if (x.scalar_type() == at::kFloat) return packed_linear_float(x, weight, columns);
  require(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kBFloat16, "x must be contiguous bfloat16 [T, K]");
  require(weight.is_contiguous() && weight.size(1) * 2 == x.size(1) && weight.size(0) * 32 == columns,
          "the packed weight does not fit x and the columns");
  Tensor out = at::empty({x.size(0), columns}, x.options().dtype(wide ? at::kFloat : at::kBFloat16));
  if (wide)
    neuron::packed_linear_f32(halves(x), halves(weight), static_cast<float*>(out.mutable_data_ptr()), x.size(0), x.size(1), columns);
  else
    neuron::packed_linear(halves(x), halves(weight), static_cast<bf16*>(out.mutable_data_ptr()), x.size(0), x.size(1), columns);
  return out;
}

neuron::CacheShape cache_shape(const Tensor& kv) { return {kv.size(1), kv.size(2), kv.size(3) / 2}; }

bool is_scaled(const Tensor& kv) { return kv.scalar_type() == at::kFloat8_e4m3fn; }

neuron::HeadScales head_scales(const std::optional<Tensor>& scale, const Tensor& kv) {
  if (!scale) return {};
  require(is_scaled(kv), "only a float8_e4m3fn cache takes scales");
  const int64_t count = scale->numel();
  require(scale->dim() == 1 && scale->is_contiguous() && scale->scalar_type() == at::kFloat && (count == 1 || count == kv.size(1)),
          "scales must be contiguous float32 [1] or [kv heads]");
  return {static_cast<const float*>(scale->const_data_ptr()), count == 1 ? 0 : 1};
}

void require_rows(const Tensor& t, const Tensor& kv) {
  require(t.dim() == 3 && t.stride(2) == 1 && t.stride(1) == t.size(2), "heads of a token must be adjacent");
  require(kv.is_contiguous() && (is_scaled(kv) || kv.scalar_type() == t.scalar_type()) && kv.size(3) == 2 * t.size(2) && kv.size(2) % 16 == 0,
          "the cache must be contiguous [blocks, kv heads, multiple of 16, 2 * head_dim] of the same dtype or float8_e4m3fn");
  require(t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kFloat, "bfloat16 or float32 only");
}

void kv_write_(Tensor kv, const Tensor& key, const Tensor& value, const Tensor& slots, const std::optional<Tensor>& k_scale,
               const std::optional<Tensor>& v_scale, double fp8_max) {
  require_rows(key, kv);
  require_rows(value, kv);
  require(key.scalar_type() == value.scalar_type(), "key and value must be of one dtype");
  require(fp8_max > 0 && fp8_max <= 448, "fp8_max must be above 0 and at most 448");
  const auto shape = cache_shape(kv);
  const neuron::HeadScales keys = head_scales(k_scale, kv), values = head_scales(v_scale, kv);
  void* pool = kv.mutable_data_ptr();
  if (is_scaled(kv) && key.scalar_type() == at::kFloat)
    neuron::kv_write_scaled(static_cast<e4m3*>(pool), floats(key), floats(value), ints(slots), key.size(0), key.stride(0),
                            value.stride(0), shape, keys, values, static_cast<float>(fp8_max));
  else if (is_scaled(kv))
    neuron::kv_write_scaled(static_cast<e4m3*>(pool), halves(key), halves(value), ints(slots), key.size(0), key.stride(0),
                            value.stride(0), shape, keys, values, static_cast<float>(fp8_max));
  else if (kv.scalar_type() == at::kFloat)
    neuron::kv_write(static_cast<float*>(pool), floats(key), floats(value), ints(slots), key.size(0), key.stride(0), value.stride(0), shape);
  else
    neuron::kv_write(static_cast<bf16*>(pool), halves(key), halves(value), ints(slots), key.size(0), key.stride(0), value.stride(0), shape);
}

Tensor paged_attention(const Tensor& query, const Tensor& kv, const Tensor& block_tables, const Tensor& request_rows,
                       const Tensor& positions, double scale, int64_t window, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale) {
  require_rows(query, kv);
  require(block_tables.is_contiguous() && request_rows.is_contiguous() && positions.is_contiguous(), "indices must be contiguous");
  Tensor out = at::empty(query.sizes(), query.options());
  const neuron::AttentionShape shape{query.size(0), query.size(1), block_tables.size(1), query.stride(0), cache_shape(kv),
                                     static_cast<float>(scale), window, head_scales(k_scale, kv), head_scales(v_scale, kv)};
  if (is_scaled(kv) && query.scalar_type() == at::kFloat)
    neuron::paged_attention(floats(query), static_cast<const e4m3*>(kv.const_data_ptr()), ints(block_tables), ints(request_rows),
                            ints(positions), static_cast<float*>(out.mutable_data_ptr()), shape);
  else if (is_scaled(kv))
    neuron::paged_attention(halves(query), static_cast<const e4m3*>(kv.const_data_ptr()), ints(block_tables), ints(request_rows),
                            ints(positions), static_cast<bf16*>(out.mutable_data_ptr()), shape);
  else if (kv.scalar_type() == at::kFloat)
    neuron::paged_attention(floats(query), floats(kv), ints(block_tables), ints(request_rows), ints(positions),
                            static_cast<float*>(out.mutable_data_ptr()), shape);
  else
    neuron::paged_attention(halves(query), halves(kv), ints(block_tables), ints(request_rows), ints(positions),
                            static_cast<bf16*>(out.mutable_data_ptr()), shape);
  return out;
}

Tensor encoder_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& request_rows, double scale) {
  for (const Tensor* x : {&query, &key, &value}) {
    require(x->dim() == 3 && x->stride(2) == 1 && x->stride(1) == x->size(2), "heads of a token must be adjacent");
    require(x->sizes() == query.sizes() && x->stride(0) == query.stride(0) && x->scalar_type() == query.scalar_type(),
            "query, key and value must be alike");
  }
  require(request_rows.is_contiguous() && request_rows.scalar_type() == at::kInt && request_rows.numel() == query.size(0), "rows must be contiguous int32 [T]");
  require(query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kFloat, "bfloat16 or float32 only");
  Tensor out = at::empty(query.sizes(), query.options());
  const neuron::EncoderShape shape{query.size(0), query.size(1), query.size(2), query.stride(0), static_cast<float>(scale)};
  if (query.scalar_type() == at::kFloat)
    neuron::encoder_attention(floats(query), floats(key), floats(value), ints(request_rows), static_cast<float*>(out.mutable_data_ptr()), shape);
  else
    neuron::encoder_attention(halves(query), halves(key), halves(value), ints(request_rows), static_cast<bf16*>(out.mutable_data_ptr()), shape);
  return out;
}

// Calls `body` with a null pointer of the element type, from which it takes the type.
template <typename Body>
void with_type(const Tensor& t, Body body) {
  require(t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kFloat, "bfloat16 or float32 only");
  if (t.scalar_type() == at::kFloat)
    body(static_cast<float*>(nullptr));
  else
    body(static_cast<bf16*>(nullptr));
}

template <typename T>
const T* read(const Tensor& t, T*) { return static_cast<const T*>(t.const_data_ptr()); }
template <typename T>
T* write(Tensor& t, T*) { return static_cast<T*>(t.mutable_data_ptr()); }

void require_same(const Tensor& x, const Tensor& other, bool contiguous) {
  require(other.scalar_type() == x.scalar_type() && (!contiguous || other.is_contiguous()), "operands must be contiguous and of one dtype");
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t width = x.size(-1), heads = x.dim() == 3 ? x.size(1) : 1;
  require((x.dim() == 2 || x.dim() == 3) && x.stride(-1) == 1 && (x.dim() == 2 || x.stride(1) == width), "rows of a token must be adjacent");
  require_same(x, weight, true);
  Tensor out = at::empty(x.sizes(), x.options());
  with_type(x, [&](auto* type) {
    neuron::rms_norm(read(x, type), read(weight, type), write(out, type), x.size(0), heads, width, x.stride(0), static_cast<float>(eps));
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  require(x.dim() == 2 && x.is_contiguous() && residual.sizes() == x.sizes(), "x and residual must be contiguous [T, H]");
  require_same(x, residual, true);
  require_same(x, weight, true);
  Tensor out = at::empty(x.sizes(), x.options()), summed = at::empty(x.sizes(), x.options());
  with_type(x, [&](auto* type) {
    neuron::add_rms_norm(read(x, type), read(residual, type), read(weight, type), write(out, type), write(summed, type), x.size(0), x.size(1),
                         static_cast<float>(eps));
  });
  return {out, summed};
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  require(x.dim() == 3 && x.stride(2) == 1 && x.stride(1) == x.size(2), "heads of a token must be adjacent");
  require(cos.is_contiguous() && sin.is_contiguous() && cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat &&
              cos.size(0) == x.size(0) && 2 * cos.size(1) == x.size(2),
          "cos and sin must be contiguous float32 [T, D/2]");
  Tensor out = at::empty(x.sizes(), x.options());
  with_type(x, [&](auto* type) {
    neuron::rotary(read(x, type), floats(cos), floats(sin), write(out, type), x.size(0), x.size(1), x.size(2), x.stride(0));
  });
  return out;
}

Tensor silu_mul(const Tensor& gate_up) {
  require(gate_up.dim() == 2 && gate_up.is_contiguous() && gate_up.size(1) % 2 == 0, "gate_up must be contiguous [T, 2I]");
  Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  with_type(gate_up, [&](auto* type) { neuron::silu_mul(read(gate_up, type), write(out, type), out.size(0), out.size(1)); });
  return out;
}

Tensor greedy(const Tensor& logits) {
  require(logits.dim() == 2 && logits.is_contiguous() && logits.scalar_type() == at::kFloat, "logits must be contiguous float32 [R, V]");
  Tensor out = at::empty({logits.size(0)}, logits.options().dtype(at::kInt));
  neuron::greedy(floats(logits), static_cast<int32_t*>(out.mutable_data_ptr()), logits.size(0), logits.size(1));
  return out;
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
              const Tensor& min_p, const Tensor& uniform, const std::optional<Tensor>& allowed) {
  require(logits.dim() == 2 && logits.is_contiguous() && logits.scalar_type() == at::kFloat, "logits must be contiguous float32 [R, V]");
  Tensor out = at::empty({logits.size(0)}, logits.options().dtype(at::kInt));
  if (allowed) {
    require(allowed->dim() == 2 && allowed->is_contiguous() && allowed->scalar_type() == at::kInt &&
                allowed->size(0) == logits.size(0) && allowed->size(1) == (logits.size(1) + 31) / 32,
            "allowed must be contiguous int32 [R, ceil(V / 32)]");
  }
  neuron::sample(floats(logits), floats(temperature), ints(top_k), floats(top_p), floats(min_p), floats(uniform),
                 allowed ? ints(*allowed) : nullptr, static_cast<int32_t*>(out.mutable_data_ptr()), logits.size(0), logits.size(1));
  return out;
}

void require_ints(const Tensor& t, int64_t rows, int64_t columns) {
  require(t.is_contiguous() && t.scalar_type() == at::kInt && t.size(0) == rows && t.numel() == rows * columns,
          "a row input must be contiguous int32 of as many rows as the logits, a bit mask of as many words as the vocabulary");
}

Tensor sample_edited(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                     const Tensor& min_p, const Tensor& uniform, const Tensor& allowed, const Tensor& last_tokens,
                     const Tensor& state_rows, const Tensor& bans_stop, const Tensor& ban_if, const Tensor& ban_then,
                     const Tensor& penalties, const Tensor& bias, const Tensor& prompt_tokens, const Tensor& stop_tokens,
                     const Tensor& output_counts) {
  require(logits.dim() == 2 && logits.is_contiguous() && logits.scalar_type() == at::kFloat, "logits must be contiguous float32 [R, V]");
  const int64_t rows = logits.size(0), vocab = logits.size(1), words = (vocab + 31) / 32, states = output_counts.size(0);
  for (const Tensor* t : {&last_tokens, &state_rows, &bans_stop}) require_ints(*t, rows, 1);
  require_ints(allowed, rows, words);
  require(ban_if.dim() == 2 && ban_if.sizes() == ban_then.sizes(), "ban_if and ban_then must be of one shape [R, slots]");
  for (const Tensor* t : {&ban_if, &ban_then}) require_ints(*t, rows, ban_if.size(1));
  for (const Tensor* t : {&prompt_tokens, &stop_tokens}) require_ints(*t, states, words);
  require_ints(output_counts, states, vocab);
  require(penalties.is_contiguous() && penalties.numel() == 3 * states && bias.is_contiguous() && bias.sizes() == output_counts.sizes() &&
              penalties.scalar_type() == at::kFloat && bias.scalar_type() == at::kFloat,
          "penalties and bias must be contiguous float32 [S, 3] and [S, V]");
  Tensor out = at::empty({rows}, logits.options().dtype(at::kInt));
  const neuron::Edits edits{ints(last_tokens), ints(state_rows), ints(bans_stop), ints(ban_if), ints(ban_then), ban_if.size(1),
                            floats(penalties), floats(bias), ints(prompt_tokens), ints(stop_tokens), ints(output_counts)};
  neuron::sample_edited(floats(logits), floats(temperature), ints(top_k), floats(top_p), floats(min_p), floats(uniform), ints(allowed), edits,
                        static_cast<int32_t*>(out.mutable_data_ptr()), rows, vocab);
  return out;
}

void count_tokens_(Tensor counts, const Tensor& rows, const Tensor& tokens) {
  require(counts.dim() == 2 && counts.is_contiguous() && counts.scalar_type() == at::kInt, "counts must be contiguous int32 [S, V]");
  require_ints(rows, rows.size(0), 1);
  require_ints(tokens, rows.size(0), 1);
  neuron::count_tokens(static_cast<int32_t*>(counts.mutable_data_ptr()), ints(rows), ints(tokens), rows.size(0), counts.size(1));
}

bool has_packed_linear() { return neuron::has_packed_linear(); }
void pin_threads(const Tensor& cpus) { neuron::pin_threads(ints(cpus), cpus.size(0)); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(neuron, m) {
  m.def("has_packed_linear() -> bool", has_packed_linear);
  m.def("pin_threads(Tensor cpus) -> ()", pin_threads);
}

TORCH_LIBRARY_IMPL(neuron, CPU, m) {
  m.impl("packed_linear", packed_linear);
  m.impl("kv_write_", kv_write_);
  m.impl("paged_attention", paged_attention);
  m.impl("encoder_attention", encoder_attention);
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("rotary", rotary);
  m.impl("silu_mul", silu_mul);
  m.impl("greedy", greedy);
  m.impl("sample", sample);
  m.impl("sample_edited", sample_edited);
  m.impl("count_tokens_", count_tokens_);
}
