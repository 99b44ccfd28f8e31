// The kernels of one rank, timed over sizes.
#include <algorithm>

#include "comm/group.h"
#include "core/error.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "study/probe.h"

namespace isomer {

namespace {

constexpr int kFewestCalls = 3;

DType dtype_of(Precision precision) { return precision == Precision::bf16 ? DType::bf16 : DType::f32; }

/// Values of mixed sign and ordinary size: zeros and denormals would be slower or faster than what a model holds.
Tensor filled(DType dtype, Shape shape) {
  const Tensor x = Tensor::unrecorded("probe", dtype, std::move(shape));
  visit_dtype(dtype, [&]<class T>() {
    std::uint64_t state = 1;
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      x.data<T>()[i] = static_cast<T>(static_cast<double>(state >> 11) * 0x1p-52 - 1);
    }
  });
  return x;
}

class Sampler {
 public:
  Sampler(const ProbeOptions& options, RankContext& ctx, SampleFamilies& families)
      : options_(options), ctx_(ctx), families_(families) {}

  RankContext& ctx() { return ctx_; }

  /// The median time of body, entered as a sample of `op`.
  template <class Body>
  void sample(Operation op, const Body& body) {
    options_.progress(fmt::format("timing {} {}", name_of(op.kind), name_of(op.compute)));
    body();  // creates and caches the primitives
    std::vector<double> seconds;
    const double end_s = wall_clock_s() + options_.seconds_per_shape;
    while (seconds.size() < kFewestCalls || wall_clock_s() < end_s) {
      const double begin_s = now();
      body();
      seconds.push_back(now() - begin_s);
    }
    std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2), seconds.end());
    Curve identity{.kind = op.kind, .compute = op.compute, .storage = op.storage};
    add_sample(families_, identity, std::move(op), std::max(seconds[seconds.size() / 2], 1e-8));
  }

 private:
  /// What the virtual clock counts: processor time of a rank with one thread.
  double now() const { return options_.threads_per_rank == 1 ? thread_cpu_s() : wall_clock_s(); }

  const ProbeOptions& options_;
  RankContext& ctx_;
  SampleFamilies& families_;
};

Operation in_precision(Operation op, Precision precision) {
  op.compute = op.storage = precision;
  return op;
}

void sample_products(Sampler& sampler, Precision precision) {
  const DType dtype = dtype_of(precision);
  for (const std::int64_t m : {1, 4, 16, 64, 256, 1024}) {
    for (const std::int64_t n : {64, 256, 1024, 4096}) {
      for (const std::int64_t k : {64, 256, 1024, 4096}) {
        if (m * n * k > std::int64_t{1} << 31) continue;
        const Tensor a = filled(dtype, {m, k}), b = filled(dtype, {k, n}), c = filled(dtype, {m, n});
        sampler.sample(in_precision({.kind = OperationKind::gemm, .m = m, .n = n, .k = k}, precision),
                       [&] { matmul(sampler.ctx(), "probe", a, b, c); });
      }
    }
  }
}

/// W_UK and W_UV of `heads` heads, widths of DeepSeek-V3.
void sample_head_products(Sampler& sampler, Precision precision) {
  const DType dtype = dtype_of(precision);
  for (const std::int64_t heads : {2, 8, 32}) {
    for (const std::int64_t m : {1, 4, 16, 64}) {
      for (const bool pre : {true, false}) {
        const std::int64_t k = pre ? 128 : 512, n = pre ? 512 : 128;
        const Tensor a = filled(dtype, {heads, m, k}), b = filled(dtype, {heads, k, n});
        const Tensor c = filled(dtype, {heads, m, n});
        sampler.sample(
            in_precision({.kind = OperationKind::mla_bmm, .m = m, .n = n, .k = k, .heads = heads}, precision),
            [&] { matmul(sampler.ctx(), "probe", a, b, c); });
      }
    }
  }
}

AttentionInputs attention_inputs(const Operation& op, std::int64_t queries, std::int64_t kv_heads) {
  const bool absorbed = op.kind == OperationKind::decode_mla;
  const std::int64_t key = absorbed ? op.latent + op.rope : op.head_dim;
  const std::int64_t value = absorbed ? op.latent : (op.value_dim > 0 ? op.value_dim : op.head_dim);
  const DType dtype = dtype_of(op.compute);
  AttentionInputs in;
  in.q = filled(dtype, {queries, op.heads, key});
  in.k = filled(dtype, {op.context, kv_heads, key});
  in.v = absorbed ? in.k.slice(2, 0, value) : filled(dtype, {op.context, kv_heads, value});
  in.query_runs = {{.length = queries, .position = op.context - queries}};
  in.key_runs = {{.length = op.context}};
  in.scale = 0.1;
  return in;
}

void sample_attention(Sampler& sampler, const Operation& op, std::int64_t queries, std::int64_t kv_heads) {
  const AttentionInputs in = attention_inputs(op, queries, kv_heads);
  const Tensor out = filled(in.q.dtype(), {queries, op.heads, in.v.size(2)});
  const Tensor lse = Tensor::unrecorded("probe", DType::f32, {op.heads, queries});
  sampler.sample(op, [&] { fused_attention_forward(sampler.ctx(), in, out, lse); });
}

void sample_prefill(Sampler& sampler, Precision precision) {
  for (const std::int64_t heads : {2, 4, 16}) {
    for (const std::int64_t context : {16, 64, 256, 512, 1024}) {
      sample_attention(sampler,
                       in_precision({.kind = OperationKind::prefill_mla,
                                     .batch = 1,
                                     .heads = heads,
                                     .kv_heads = heads,
                                     .head_dim = 192,
                                     .value_dim = 128,
                                     .context = context},
                                    precision),
                       context, heads);
      sample_attention(sampler,
                       in_precision({.kind = OperationKind::prefill_gqa,
                                     .batch = 1,
                                     .heads = heads,
                                     .kv_heads = heads / 2,
                                     .head_dim = 128,
                                     .context = context},
                                    precision),
                       context, heads / 2);
    }
  }
}

void sample_decode(Sampler& sampler, Precision precision) {
  for (const std::int64_t context : {32, 128, 512, 2048, 8192, 32768}) {
    for (const std::int64_t heads : {1, 4, 16, 64}) {
      sample_attention(sampler,
                       in_precision({.kind = OperationKind::decode_mla,
                                     .batch = 1,
                                     .heads = heads,
                                     .context = context,
                                     .latent = 512,
                                     .rope = 64},
                                    precision),
                       1, 1);
    }
    for (const std::int64_t kv_heads : {1, 2, 8}) {
      for (const std::int64_t group : {1, 4}) {
        sample_attention(sampler,
                         in_precision({.kind = OperationKind::decode_gqa,
                                       .batch = 1,
                                       .heads = kv_heads * group,
                                       .kv_heads = kv_heads,
                                       .head_dim = 128,
                                       .context = context},
                                      precision),
                         1, kv_heads);
      }
    }
  }
}

void sample_elementwise(Sampler& sampler, Precision precision) {
  const DType dtype = dtype_of(precision);
  for (std::int64_t rows = 1; rows <= 16384; rows *= 4) {
    const Tensor a = filled(dtype, {rows, 1024}), b = filled(dtype, {rows, 1024}), out = filled(dtype, {rows, 1024});
    Operation op{.kind = OperationKind::elementwise, .bytes = static_cast<double>(3 * a.nbytes())};
    sampler.sample(in_precision(std::move(op), precision), [&] { add(sampler.ctx(), "probe", a, b, out); });
  }
}

}  // namespace

void sample_kernels(const ProbeOptions& options, SampleFamilies& families) {
  GroupOptions group;
  group.threads_per_rank = options.threads_per_rank;
  run_group(group, [&](RankContext& ctx) {
    Sampler sampler(options, ctx, families);
    for (const Precision precision : {Precision::f32, Precision::bf16}) {
      sample_products(sampler, precision);
      sample_head_products(sampler, precision);
      sample_prefill(sampler, precision);
      sample_decode(sampler, precision);
      sample_elementwise(sampler, precision);
    }
  });
}

}  // namespace isomer
