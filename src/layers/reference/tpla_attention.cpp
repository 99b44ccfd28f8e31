#include "layers/reference/tpla_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "layers/reference/linear_ops.h"

namespace isomer {
namespace {

using reference::Values;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

class ShardedAttention {
 public:
  explicit ShardedAttention(const TplaReferenceInput& in)
      : in_(in),
        h_(in.config.num_attention_heads),
        n_(in.config.qk_nope_head_dim),
        r_(in.config.qk_rope_head_dim),
        v_(in.config.v_head_dim),
        d_(in.config.kv_lora_rank),
        queries_(static_cast<std::int64_t>(in.q.size()) / (h_ * (n_ + r_))),
        keys_(static_cast<std::int64_t>(in.c.size()) / d_) {}

  TplaReferenceResult run();

 private:
  bool gla() const { return in_.sharding == LatentSharding::gla; }
  void check() const;
  /// ĉ of the columns that rank `shard` has [keys, d]; the others 0.
  Values normed_rows(int shard) const;
  double rms(int shard, std::int64_t key) const;
  void run_head(int shard, std::int64_t head);
  /// logit(t), t ≤ first_query + query; `absorbed` is q̃ [d].
  double logit(int shard, std::int64_t head, const Values& absorbed, std::int64_t query, std::int64_t key) const;
  Values absorb(std::int64_t head, std::int64_t query) const;
  /// Adds W_UV[:, range]·Σ p ĉ to the head's output.
  void add_values(std::int64_t head, std::int64_t query, const Values& p, TplaRange range);

  const double* kv_b_row(std::int64_t head, std::int64_t row) const {
    return in_.kv_b.data() + (head * (n_ + v_) + row) * d_;
  }

  const TplaReferenceInput& in_;
  const std::int64_t h_, n_, r_, v_, d_, queries_, keys_;
  Values c_hat_;  // of the shard at work
  TplaReferenceResult result_;
};

void ShardedAttention::check() const {
  check_tpla_options(in_.options, in_.config);
  const std::int64_t g = in_.options.num_shards;
  if (gla() && (h_ % g != 0 || in_.options.shared_columns != 0)) {
    invalid_argument("gla: {} groups with {} heads and {} shared columns: groups divide heads, and share nothing", g,
                     h_, in_.options.shared_columns);
  }
  reference::check_size("q", in_.q, {queries_, h_, n_ + r_}, false);
  reference::check_size("c", in_.c, {keys_, d_}, false);
  reference::check_size("k_pe", in_.k_pe, {keys_, r_}, false);
  reference::check_size("kv_b", in_.kv_b, {h_, n_ + v_, d_}, false);
  reference::check_size("gamma", in_.gamma, {d_}, !in_.config.kv_a_layernorm);
  if (!gla()) {
    reference::check_size("kappa", in_.scalars.kappa, {h_, g}, false);
    reference::check_size("rms_scale", in_.scalars.rms_scale, {g}, false);
  }
  if (in_.first_query < 0 || in_.first_query + queries_ > keys_) {
    invalid_argument("queries {} to {} of {} keys", in_.first_query, in_.first_query + queries_ - 1, keys_);
  }
}

double ShardedAttention::rms(int shard, std::int64_t key) const {
  const double* c = in_.c.data() + key * d_;
  const TplaRange own = in_.options.shard(shard, d_), shared = in_.options.shared();
  double whole = 0, local = 0;
  for (std::int64_t j = 0; j < d_; ++j) {
    const bool is_local = (j >= own.begin && j < own.end()) || j < shared.end();
    whole += c[j] * c[j];
    if (is_local) local += c[j] * c[j];
  }
  const double d = static_cast<double>(d_);
  if (key < in_.exact_keys) return std::sqrt(whole / d + ModelConfig::kInnerNormEps);
  if (gla()) return std::sqrt(local / static_cast<double>(own.count) + ModelConfig::kInnerNormEps);
  if (in_.options.rms == TplaRms::exact) return std::sqrt(whole / d + ModelConfig::kInnerNormEps);
  return std::sqrt(in_.scalars.rms_scale[static_cast<std::size_t>(shard)] * local / d + ModelConfig::kInnerNormEps);
}

Values ShardedAttention::normed_rows(int shard) const {
  const TplaRange own = in_.options.shard(shard, d_), shared = in_.options.shared();
  Values rows(in_.c.size(), 0);
  for (std::int64_t t = 0; t < keys_; ++t) {
    const double* c = in_.c.data() + t * d_;
    const double scale = in_.gamma.empty() ? 1 : 1 / rms(shard, t);
    for (std::int64_t j = 0; j < d_; ++j) {
      if ((j < own.begin || j >= own.end()) && j >= shared.end()) continue;
      const double gamma = in_.gamma.empty() ? 1 : in_.gamma[static_cast<std::size_t>(j)];
      rows[static_cast<std::size_t>(t * d_ + j)] = c[j] * scale * gamma;
    }
  }
  return rows;
}

Values ShardedAttention::absorb(std::int64_t head, std::int64_t query) const {
  Values absorbed(static_cast<std::size_t>(d_), 0);
  const double* q = in_.q.data() + (query * h_ + head) * (n_ + r_);
  for (std::int64_t i = 0; i < n_; ++i) {
    for (std::int64_t j = 0; j < d_; ++j) absorbed[static_cast<std::size_t>(j)] += q[i] * kv_b_row(head, i)[j];
  }
  return absorbed;
}

double ShardedAttention::logit(int shard, std::int64_t head, const Values& absorbed, std::int64_t query,
                               std::int64_t key) const {
  const TplaRange own = in_.options.shard(shard, d_), shared = in_.options.shared();
  const double* c = c_hat_.data() + key * d_;
  double z_own = 0, z_shared = 0, z_rope = 0;
  for (std::int64_t j = own.begin; j < own.end(); ++j) z_own += absorbed[static_cast<std::size_t>(j)] * c[j];
  for (std::int64_t j = 0; j < shared.end(); ++j) z_shared += absorbed[static_cast<std::size_t>(j)] * c[j];
  const double* q_pe = in_.q.data() + (query * h_ + head) * (n_ + r_) + n_;
  for (std::int64_t j = 0; j < r_; ++j) z_rope += q_pe[j] * in_.k_pe[static_cast<std::size_t>(key * r_ + j)];
  const auto at = static_cast<std::size_t>(head * in_.options.num_shards + shard);
  const double kappa = gla() ? 1 : in_.scalars.kappa[at];
  return softmax_scale(in_.config) * (z_shared + kappa * z_own + z_rope);
}

void ShardedAttention::add_values(std::int64_t head, std::int64_t query, const Values& p, TplaRange range) {
  double* out = result_.attention.data() + (query * h_ + head) * v_;
  for (std::int64_t j = range.begin; j < range.end(); ++j) {
    double o = 0;
    for (std::int64_t t = 0; t < keys_; ++t) {
      o += p[static_cast<std::size_t>(t)] * c_hat_[static_cast<std::size_t>(t * d_ + j)];
    }
    for (std::int64_t i = 0; i < v_; ++i) out[i] += kv_b_row(head, n_ + i)[j] * o;
  }
}

void ShardedAttention::run_head(int shard, std::int64_t head) {
  for (std::int64_t query = 0; query < queries_; ++query) {
    const Values absorbed = absorb(head, query);
    double* z = result_.logits.data() + ((shard * h_ + head) * queries_ + query) * keys_;
    for (std::int64_t t = 0; t <= in_.first_query + query; ++t) z[t] = logit(shard, head, absorbed, query, t);
    const double largest = *std::max_element(z, z + keys_);
    Values p(static_cast<std::size_t>(keys_));
    double sum = 0;
    for (std::int64_t t = 0; t < keys_; ++t) sum += p[static_cast<std::size_t>(t)] = std::exp(z[t] - largest);
    for (double& value : p) value /= sum;
    result_.lse[static_cast<std::size_t>((shard * queries_ + query) * h_ + head)] = largest + std::log(sum);
    add_values(head, query, p, in_.options.shard(shard, d_));
    if (shard == 0) add_values(head, query, p, in_.options.shared());
  }
}

TplaReferenceResult ShardedAttention::run() {
  check();
  const int g = in_.options.num_shards;
  result_.attention.assign(static_cast<std::size_t>(queries_ * h_ * v_), 0);
  result_.logits.assign(static_cast<std::size_t>(g * h_ * queries_ * keys_), kMinusInfinity);
  result_.lse.assign(static_cast<std::size_t>(g * queries_ * h_), kMinusInfinity);
  for (int shard = 0; shard < g; ++shard) {
    c_hat_ = normed_rows(shard);
    for (std::int64_t head = 0; head < h_; ++head) {
      if (gla() && head / (h_ / g) != shard) continue;
      run_head(shard, head);
    }
  }
  return std::move(result_);
}

}  // namespace

TplaReferenceResult tpla_attention_reference(const TplaReferenceInput& input) { return ShardedAttention(input).run(); }

Values tpla_block_reference(const ModelConfig& config, const MlaReferenceWeights& weights, const TplaOptions& options,
                            const TplaLayer& scalars, const Values& x, std::int64_t first_sharded,
                            LatentSharding sharding, int num_threads) {
  const std::int64_t hidden = config.hidden_size, seq = static_cast<std::int64_t>(x.size()) / hidden;
  const std::int64_t d = config.kv_lora_rank, r = config.qk_rope_head_dim;
  if (first_sharded < 0 || first_sharded >= seq) {
    invalid_argument("first_sharded {}: a position of the {} tokens", first_sharded, seq);
  }
  MlaReferenceResult exact = mla_block_reference(config, weights, seq, 1, 0, x, {}, num_threads);
  const Values u = reference::norm(x, weights.input_layernorm, config.rms_norm_eps);
  const Values kv_a = reference::linear(u, weights.kv_a_proj_with_mqa, weights.kv_a_proj_bias, seq, num_threads);
  Values c, k_pe;
  for (std::int64_t t = 0; t < seq; ++t) {
    c.insert(c.end(), kv_a.begin() + t * (d + r), kv_a.begin() + t * (d + r) + d);
    k_pe.insert(k_pe.end(), exact.latent.begin() + t * (d + r) + d, exact.latent.begin() + (t + 1) * (d + r));
  }
  const std::int64_t q_width = config.num_attention_heads * config.qk_head_dim();
  const Values q(exact.q.begin() + first_sharded * q_width, exact.q.end());
  const TplaReferenceResult sharded = tpla_attention_reference({.config = config,
                                                                .options = options,
                                                                .scalars = scalars,
                                                                .kv_b = weights.kv_b_proj,
                                                                .gamma = weights.kv_a_layernorm,
                                                                .q = q,
                                                                .c = c,
                                                                .k_pe = k_pe,
                                                                .first_query = first_sharded,
                                                                .exact_keys = first_sharded,
                                                                .sharding = sharding});
  const Values branch =
      reference::linear(sharded.attention, weights.o_proj, weights.o_proj_bias, seq - first_sharded, num_threads);
  for (std::size_t i = 0; i < branch.size(); ++i) {
    const auto at = static_cast<std::size_t>(first_sharded * hidden) + i;
    exact.y[at] = x[at] + config.residual_scale() * branch[i];
  }
  return std::move(exact.y);
}

}  // namespace isomer
