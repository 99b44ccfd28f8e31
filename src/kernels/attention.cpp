#include "kernels/attention.h"

#include <cmath>
#include <limits>
#include <optional>

#include "cost/op_cost.h"
#include "kernels/attention_registry.h"
#include "kernels/attention_run.h"
#include "kernels/dispatch.h"
#include "kernels/reference/attention.h"

namespace isomer {

namespace {

/// Positions below the processor-specific kernels are 32-bit differences.
constexpr std::int64_t kMaxPositionRange = std::int64_t{1} << 30;

void check_tensor(std::string_view name, const Tensor& x, const Shape& shape, std::initializer_list<DType> dtypes) {
  if (!x.defined()) invalid_argument("attention: {} is missing; it must be of shape {}", name, to_string(shape));
  if (x.shape() != shape)
    invalid_argument("attention: {} has shape {}, must have {}", name, to_string(x.shape()), to_string(shape));
  if (std::find(dtypes.begin(), dtypes.end(), x.dtype()) == dtypes.end())
    invalid_argument("attention: {} is {}, must be {}", name, name_of(x.dtype()), name_of(*dtypes.begin()));
  if (x.size(-1) > 1 && x.stride(-1) != 1)
    invalid_argument("attention: the innermost stride of {} is {}, must be 1: copy it", name, x.stride(-1));
}

std::int64_t check_runs(std::string_view name, const std::vector<TokenRun>& runs, std::int64_t num_rows) {
  std::int64_t tokens = 0;
  for (const TokenRun& run : runs) {
    if (run.length == 0) continue;
    const std::int64_t last = run.row + (run.length - 1) * run.row_stride;
    if (run.length < 0 || run.row < 0 || run.row_stride < 1 || last >= num_rows)
      invalid_argument("attention: a {} run of length {} from row {} by {} leaves the {} rows of the tensor", name,
                       run.length, run.row, run.row_stride, num_rows);
    tokens += run.length;
  }
  return tokens;
}

/// The smallest position of any run.
std::int64_t check_positions(const AttentionInputs& in) {
  std::int64_t low = std::numeric_limits<std::int64_t>::max();
  std::int64_t high = std::numeric_limits<std::int64_t>::min();
  for (const auto* runs : {&in.query_runs, &in.key_runs}) {
    for (const TokenRun& run : *runs) {
      if (run.length == 0) continue;
      low = std::min(low, run.position);
      high = std::max(high, run.position + run.length);
    }
  }
  if (low > high) return 0;
  if (high - low > kMaxPositionRange)
    invalid_argument("attention: positions span {} to {}, more than {}", low, high, kMaxPositionRange);
  return low;
}

AttentionShape check_inputs(const AttentionInputs& in) {
  for (const auto& [name, x] : {std::pair{"q", &in.q}, {"k", &in.k}, {"v", &in.v}})
    if (!x->defined() || x->dim() != 3)
      invalid_argument("attention: {} must have shape [rows, heads, width], has {}", name, to_string(x->shape()));
  AttentionShape s{.dtype = in.q.dtype(), .num_heads = in.q.size(1), .num_kv_heads = in.k.size(1)};
  s.key_width = in.q.size(2);
  s.value_width = in.v.size(2);
  if (s.key_width < 1 || s.value_width < 1)
    invalid_argument("attention: key width {} and value width {} must be at least 1", s.key_width, s.value_width);
  if (s.num_kv_heads == 0 ? s.num_heads != 0 : s.num_heads % s.num_kv_heads != 0)
    invalid_argument("attention: {} heads of q can't share {} heads of k and v evenly", s.num_heads, s.num_kv_heads);
  if (!(in.scale > 0) || !std::isfinite(in.scale)) invalid_argument("attention: scale = {} must be above 0", in.scale);
  check_tensor("q", in.q, in.q.shape(), {s.dtype});
  check_tensor("k", in.k, {in.k.size(0), s.num_kv_heads, s.key_width}, {s.dtype});
  check_tensor("v", in.v, {in.k.size(0), s.num_kv_heads, s.value_width}, {s.dtype});
  if (in.q_rope.defined() != in.k_rope.defined())
    invalid_argument("attention: q_rope is {} and k_rope is {}: give both or neither",
                     in.q_rope.defined() ? "given" : "missing", in.k_rope.defined() ? "given" : "missing");
  if (in.q_rope.defined()) {
    s.rope_width = in.q_rope.dim() == 3 ? in.q_rope.size(2) : 0;
    check_tensor("q_rope", in.q_rope, {in.q.size(0), s.num_heads, s.rope_width}, {s.dtype});
    check_tensor("k_rope", in.k_rope, {in.k.size(0), 1, s.rope_width}, {s.dtype});
  }
  s.num_queries = check_runs("query", in.query_runs, in.q.size(0));
  s.num_keys = check_runs("key", in.key_runs, in.k.size(0));
  return s;
}

void check_results(const AttentionInputs& in, const AttentionShape& s, const Tensor& out, const Tensor& lse) {
  check_tensor("out", out, {in.q.size(0), s.num_heads, s.value_width}, {s.dtype});
  check_tensor("lse", lse, {s.num_heads, in.q.size(0)}, {s.dtype == DType::f64 ? DType::f64 : DType::f32});
}

void check_gradients(const AttentionInputs& in, const AttentionShape& s, const AttentionGradients& g) {
  const auto check = [&](std::string_view name, const Tensor& gradient, const Tensor& like) {
    // A sum that others add to must not be rounded to bfloat16 in between.
    if (g.accumulate && s.dtype == DType::bf16) {
      check_tensor(name, gradient, like.shape(), {DType::f32});
    } else {
      check_tensor(name, gradient, like.shape(), {DType::f32, s.dtype});
    }
  };
  check("dq", g.dq, in.q);
  check("dk", g.dk, in.k);
  check("dv", g.dv, in.v);
  if (s.rope_width == 0) return;
  check("dq_rope", g.dq_rope, in.q_rope);
  check("dk_rope", g.dk_rope, in.k_rope);
}

std::int64_t count_pairs(const AttentionInputs& in) {
  std::int64_t pairs = 0;
  for (const TokenRun& query : in.query_runs)
    for (const TokenRun& key : in.key_runs)
      if (query.segment == key.segment)
        pairs += in.causal ? causal_pairs(query.position, query.length, key.position, key.length)
                           : query.length * key.length;
  return pairs;
}

/// Bytes of the runs' rows.
struct TouchedBytes {
  explicit TouchedBytes(const AttentionShape& s) {
    const auto size = static_cast<double>(size_of(s.dtype));
    const auto queries = static_cast<double>(s.num_queries * s.num_heads);
    const auto keys = static_cast<double>(s.num_keys);
    q = size * queries * static_cast<double>(s.key_width + s.rope_width);
    out = size * queries * static_cast<double>(s.value_width);
    kv = size * keys * static_cast<double>(s.num_kv_heads * (s.key_width + s.value_width) + s.rope_width);
    lse = queries * (s.dtype == DType::f64 ? 8 : 4);
  }
  double q, out, kv, lse;
};

HeadRows rows_of(const Tensor& x) {
  if (!x.defined() || x.size(2) == 0) return {};
  return {x.numel() > 0 ? x.raw() : nullptr, x.stride(0), x.stride(1), x.size(2), x.dtype()};
}

/// The tokens of runs with 32-bit positions from `base`.
struct Tokens {
  Tokens(const std::vector<TokenRun>& runs, std::int64_t base, bool at_smallest_position) {
    for (const TokenRun& run : runs) {
      for (std::int64_t i = 0; i < run.length; ++i) {
        row.push_back(run.row + i * run.row_stride);
        position.push_back(at_smallest_position ? std::numeric_limits<std::int32_t>::min()
                                                : static_cast<std::int32_t>(run.position + i - base));
        segment.push_back(run.segment);
      }
    }
  }
  TokenList list() const {
    return {row.data(), position.data(), segment.data(), static_cast<std::int64_t>(row.size())};
  }
  std::vector<std::int64_t> row;
  std::vector<std::int32_t> position;
  std::vector<std::int32_t> segment;
};

/// The problem of a forward pass; the token lists must outlive it.
AttentionProblem problem_of(const AttentionInputs& in, const AttentionShape& s, const Tensor& out, const Tensor& lse,
                            const Tokens& queries, const Tokens& keys) {
  AttentionProblem p{.shape = s, .scale = in.scale};
  p.q[0] = rows_of(in.q);
  p.q[1] = rows_of(in.q_rope);
  p.k[0] = rows_of(in.k);
  p.k[1] = rows_of(in.k_rope);
  p.v = rows_of(in.v);
  p.out = rows_of(out);
  p.lse = lse.numel() > 0 ? lse.raw() : nullptr;
  p.lse_head_stride = lse.stride(0);
  p.queries = queries.list();
  p.keys = keys.list();
  return p;
}

}  // namespace

void fused_attention_forward(RankContext& ctx, const AttentionInputs& in, const Tensor& out, const Tensor& lse,
                             std::string_view implementation_name) {
  const AttentionShape s = check_inputs(in);
  check_results(in, s, out, lse);
  const std::int64_t base = check_positions(in);
  const AttentionImplementation& implementation = find_attention_implementation(s, implementation_name);
  const TouchedBytes bytes(s);
  OpCost cost = attention_forward_cost(s.num_heads, count_pairs(in), s.key_width + s.rope_width, s.value_width,
                                       bytes.q + bytes.kv);
  cost.bytes_written = bytes.out + bytes.lse;
  std::optional<ForwardPlan> plan;
  if (implementation.kernels != nullptr) plan.emplace(ctx, s, *implementation.kernels);
  run_kernel(ctx, "fused_attention_forward", cost, [&] {
    if (!plan) return reference::attention_forward(in, out, lse);
    const Tokens queries(in.query_runs, base, false);
    const Tokens keys(in.key_runs, base, !in.causal);
    run_attention_forward(ctx, problem_of(in, s, out, lse, queries, keys), *implementation.kernels, *plan);
  });
}

void fused_attention_backward(RankContext& ctx, const AttentionInputs& in, const Tensor& out, const Tensor& lse,
                              const Tensor& dout, const AttentionGradients& gradients,
                              std::string_view implementation_name) {
  const AttentionShape s = check_inputs(in);
  check_results(in, s, out, lse);
  check_tensor("dout", dout, out.shape(), {s.dtype});
  check_gradients(in, s, gradients);
  const std::int64_t base = check_positions(in);
  const AttentionImplementation& implementation = find_attention_implementation(s, implementation_name);
  const TouchedBytes bytes(s);
  OpCost cost = attention_backward_cost(s.num_heads, count_pairs(in), s.key_width + s.rope_width, s.value_width,
                                        bytes.q + bytes.kv + 2 * bytes.out + bytes.lse);
  cost.bytes_written = bytes.q + bytes.kv;
  std::optional<BackwardPlan> plan;
  if (implementation.kernels != nullptr) plan.emplace(ctx, s, gradients, *implementation.kernels);
  run_kernel(ctx, "fused_attention_backward", cost, [&] {
    if (!plan) return reference::attention_backward(in, out, lse, dout, gradients);
    const Tokens queries(in.query_runs, base, false);
    const Tokens keys(in.key_runs, base, !in.causal);
    AttentionProblem p = problem_of(in, s, out, lse, queries, keys);
    p.dout = rows_of(dout);
    p.dq[0] = rows_of(gradients.dq);
    p.dk[0] = rows_of(gradients.dk);
    if (s.rope_width > 0) {
      p.dq[1] = rows_of(gradients.dq_rope);
      p.dk[1] = rows_of(gradients.dk_rope);
    }
    p.dv = rows_of(gradients.dv);
    p.accumulate = gradients.accumulate;
    run_attention_backward(ctx, p, *implementation.kernels, *plan);
  });
}

void fused_attention_forward(RankContext& ctx, const AttentionInputs& in, const Tensor& out, const Tensor& lse) {
  fused_attention_forward(ctx, in, out, lse, {});
}

void fused_attention_backward(RankContext& ctx, const AttentionInputs& in, const Tensor& out, const Tensor& lse,
                              const Tensor& dout, const AttentionGradients& gradients) {
  fused_attention_backward(ctx, in, out, lse, dout, gradients, {});
}

}  // namespace isomer
