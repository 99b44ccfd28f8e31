#include "convert/head_meter.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "kernels/reference/blocked_ops.h"

namespace isomer {

namespace {

using Values = std::vector<double>;

constexpr std::int64_t kQueryBlock = 128;

struct Columns {
  const Values& rows;  // [tokens, stride]
  std::int64_t stride, begin, count;
};

/// scores [count, keys] = a[first … , columns] · b[keys, columns]ᵀ; 0 where there are no columns.
void multiply(const Columns& a, std::int64_t first, std::int64_t count, const Columns& b, std::int64_t keys,
              Values& scores) {
  scores.assign(static_cast<std::size_t>(count * keys), 0);
  if (a.count == 0) return;
  reference::gemm({.m = count,
                   .n = keys,
                   .k = a.count,
                   .a = a.rows.data() + first * a.stride + a.begin,
                   .a_stride = a.stride,
                   .b = b.rows.data() + b.begin,
                   .b_stride = b.stride,
                   .b_transposed = true,
                   .c = scores.data(),
                   .c_stride = keys});
}

void centre(std::span<double> values) {
  double mean = 0;
  for (const double value : values) mean += value;
  mean /= static_cast<double>(values.size());
  for (double& value : values) value -= mean;
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// ln Σ e^z.
double log_sum_exp(std::span<const double> z) {
  const double largest = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (const double value : z) sum += std::exp(value - largest);
  return largest + std::log(sum);
}

/// KL(softmax a ‖ softmax b).
double divergence(std::span<const double> a, std::span<const double> b) {
  const double lse_a = log_sum_exp(a), lse_b = log_sum_exp(b);
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::exp(a[i] - lse_a) * ((a[i] - lse_a) - (b[i] - lse_b));
  return std::max(sum, 0.0);
}

Values ratio(const Values& above, const Values& below, double otherwise) {
  Values result(above.size());
  for (std::size_t i = 0; i < above.size(); ++i) result[i] = below[i] > 0 ? above[i] / below[i] : otherwise;
  return result;
}

}  // namespace

/// ĉ as the exact norm gives it, and as every rank does; where each token's segment begins.
struct HeadMeter::Sequence {
  const MeteredRows& rows;
  std::int64_t tokens = 0;
  Values exact;               // [T, d]
  std::vector<Values> local;  // [g] of [T, d]: only the rank's columns are read
  std::vector<std::int64_t> begins;
};

Values HeadSums::least_squares_kappa() const { return ratio(target_own, own_own, 1); }
Values HeadSums::mean_divergence() const {
  Values result = divergence;
  for (double& value : result) value /= static_cast<double>(std::max<std::int64_t>(num_queries, 1));
  return result;
}
Values HeadSums::cosine() const {
  Values product(cross.size());
  for (std::size_t i = 0; i < product.size(); ++i) product[i] = std::sqrt(whole_whole[i] * local_local[i]);
  return ratio(cross, product, 1);
}

HeadMeter::HeadMeter(const ModelConfig& config, const TplaOptions& options, const TplaLayer& layer, const Values& kv_b,
                     const Values& gamma)
    : config_(config), options_(options), layer_(layer), kv_b_(kv_b), gamma_(gamma) {
  const auto size = static_cast<std::size_t>(config.num_attention_heads * options.num_shards);
  for (Values* sum :
       {&sums_.target_own, &sums_.own_own, &sums_.cross, &sums_.whole_whole, &sums_.local_local, &sums_.divergence}) {
    sum->assign(size, 0);
  }
}

void HeadMeter::add(const MeteredRows& rows, int num_threads) {
  const std::int64_t d = config_.kv_lora_rank, tokens = static_cast<std::int64_t>(rows.segments.size());
  ISOMER_CHECK(static_cast<std::int64_t>(rows.c.size()) == tokens * d, "{} values for {} tokens", rows.c.size(),
               tokens);
  Sequence sequence{.rows = rows, .tokens = tokens, .exact = rows.c};
  sequence.local.assign(static_cast<std::size_t>(options_.num_shards), rows.c);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto at = static_cast<std::size_t>(t);
    const bool first = t == 0 || rows.segments[at] != rows.segments[at - 1];
    sequence.begins.push_back(first ? t : sequence.begins.back());
    if (gamma_.empty()) continue;
    const std::span<const double> c(rows.c.data() + t * d, static_cast<std::size_t>(d));
    const auto part = [&](TplaRange range) {
      const auto columns = c.subspan(static_cast<std::size_t>(range.begin), static_cast<std::size_t>(range.count));
      return dot(columns, columns) / static_cast<double>(d);
    };
    const double whole = part({0, d}), shared = part(options_.shared());
    const auto normalise = [&](Values& out, double mean_square) {
      const double scale = 1 / std::sqrt(mean_square + ModelConfig::kInnerNormEps);
      for (std::size_t j = 0; j < c.size(); ++j) out[at * c.size() + j] = c[j] * scale * gamma_[j];
    };
    normalise(sequence.exact, whole);
    for (int i = 0; i < options_.num_shards; ++i) {
      const auto shard = static_cast<std::size_t>(i);
      const double sliced = layer_.rms_scale[shard] * (shared + part(options_.shard(i, d)));
      normalise(sequence.local[shard], options_.rms == TplaRms::exact ? whole : sliced);
    }
  }
  reference::parallel_tasks(config_.num_attention_heads, num_threads,
                            [&](std::int64_t head) { add_head(sequence, head); });
  sums_.num_queries += tokens;
}

void HeadMeter::add_head(const Sequence& sequence, std::int64_t head) {
  const std::int64_t n = config_.qk_nope_head_dim, d = config_.kv_lora_rank;
  Values absorbed(static_cast<std::size_t>(sequence.tokens * d), 0);  // q̃ [T, d]
  if (n > 0) {
    reference::gemm({.m = sequence.tokens,
                     .n = d,
                     .k = n,
                     .a = sequence.rows.q.data() + head * config_.qk_head_dim(),
                     .a_stride = config_.num_attention_heads * config_.qk_head_dim(),
                     .b = kv_b_.data() + head * (n + config_.v_head_dim) * d,
                     .b_stride = d,
                     .c = absorbed.data(),
                     .c_stride = d});
  }
  for (std::int64_t first = 0; first < sequence.tokens; first += kQueryBlock) {
    add_queries(sequence, head, absorbed, first, std::min(kQueryBlock, sequence.tokens - first));
  }
}

void HeadMeter::add_queries(const Sequence& sequence, std::int64_t head, const Values& absorbed, std::int64_t first,
                            std::int64_t count) {
  const std::int64_t d = config_.kv_lora_rank, r = config_.qk_rope_head_dim, width = config_.qk_head_dim();
  const std::int64_t keys = first + count;
  const double scale = softmax_scale(config_);
  Values whole, rope, shared, own;
  multiply({absorbed, d, 0, d}, first, count, {sequence.exact, d, 0, d}, keys, whole);
  multiply({sequence.rows.q, config_.num_attention_heads * width, (head + 1) * width - r, r}, first, count,
           {sequence.rows.k_pe, r, 0, r}, keys, rope);
  for (int i = 0; i < options_.num_shards; ++i) {
    const auto at = static_cast<std::size_t>(head * options_.num_shards + i);
    const TplaRange columns = options_.shard(i, d);
    const Values& local = sequence.local[static_cast<std::size_t>(i)];
    multiply({absorbed, d, 0, options_.shared_columns}, first, count, {local, d, 0, options_.shared_columns}, keys,
             shared);
    multiply({absorbed, d, columns.begin, columns.count}, first, count, {local, d, columns.begin, columns.count}, keys,
             own);
    for (std::int64_t query = 0; query < count; ++query) {
      const std::int64_t begin = sequence.begins[static_cast<std::size_t>(first + query)];
      const auto seen = static_cast<std::size_t>(first + query + 1 - begin);
      const auto offset = static_cast<std::size_t>(query * keys + begin);
      Values target(seen), b(seen), global(seen), sharded(seen);
      for (std::size_t t = 0; t < seen; ++t) {
        const double z = whole[offset + t], a = shared[offset + t];
        b[t] = own[offset + t];
        target[t] = z - a;
        global[t] = scale * (z + rope[offset + t]);
        sharded[t] = scale * (a + layer_.kappa[at] * b[t] + rope[offset + t]);
      }
      sums_.divergence[at] += divergence(global, sharded);
      for (Values* values : {&target, &b, &global, &sharded}) centre(*values);
      sums_.target_own[at] += dot(target, b);
      sums_.own_own[at] += dot(b, b);
      sums_.cross[at] += dot(global, sharded);
      sums_.whole_whole[at] += dot(global, global);
      sums_.local_local[at] += dot(sharded, sharded);
    }
  }
}

}  // namespace isomer
