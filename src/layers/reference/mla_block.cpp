#include "layers/reference/mla_block.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "kernels/reference/blocked_ops.h"
#include "kernels/reference/plain_ops.h"
#include "layers/reference/linear_ops.h"
#include "layers/rope.h"

namespace isomer {
namespace {

using reference::Values;

/// Forward and backward of the block over one set of inputs. Rows are tokens: row = position in sequence · batch + b.
class MlaBlock {
 public:
  MlaBlock(const ModelConfig& config, const MlaReferenceWeights& weights, std::int64_t seq, std::int64_t batch,
           std::int64_t first_position, std::int64_t run_length, const Values& x, int num_threads);

  void forward();
  void backward(const Values& dy);
  MlaReferenceResult take_result() { return std::move(result_); }

 private:
  void project_queries();
  void project_latent();
  /// What head `head` of sequence `b` reads; `task` = b · h + head.
  reference::AttentionHead attention_head(std::int64_t task) const;
  reference::AttentionHeadOutput attention_output(std::int64_t task);
  /// Adds to the gradients of q and the shared rope key before rotation, and of [k_nope | v] per head.
  void attention_backward(const Values& dattention, Values& dq, Values& dkv, Values& dk_rope);
  void latent_backward(const Values& dkv, const Values& dk_rope, Values& du);
  void queries_backward(const Values& dq, Values& du);

  Values linear(const Values& x_rows, const Values& weight, const Values& bias) const {
    return reference::linear(x_rows, weight, bias, num_rows_, num_threads_);
  }
  void linear_backward(const Values& dy_rows, const Values& x_rows, const Values& weight, const Values& bias,
                       const std::string& name, Values& dx) {
    reference::linear_backward(
        {.dy = dy_rows, .x = x_rows, .weight = weight, .bias = bias, .name = name, .num_rows = num_rows_}, dx,
        result_.gradients, num_threads_);
  }
  Values norm_backward(const Values& dy_rows, const Values& x_rows, const Values& weight, double eps,
                       const std::string& name) {
    return reference::norm_backward(dy_rows, x_rows, weight, eps, name, result_.gradients);
  }
  /// Rotates the last r of every `width` elements; the first of them belong to the first token.
  void rotate(Values& values, std::int64_t width, bool backward) const;

  const ModelConfig& config_;
  const MlaReferenceWeights& weights_;
  const Values& x_;
  const std::int64_t seq_, batch_, num_rows_;
  const std::int64_t h_, n_, r_, v_, d_;
  const int num_threads_;
  RopeTable rope_;
  MlaReferenceResult result_;
  Values u_;                 // RMSNorm(x) [rows, D]
  Values c_q_, c_q_normed_;  // [rows, q_lora]
  Values c_, c_normed_;      // [rows, d]
  Values k_rope_;            // [rows, r], rotated
  Values kv_;                // [rows, h, n + v]
};

MlaBlock::MlaBlock(const ModelConfig& config, const MlaReferenceWeights& weights, std::int64_t seq, std::int64_t batch,
                   std::int64_t first_position, std::int64_t run_length, const Values& x, int num_threads)
    : config_(config),
      weights_(weights),
      x_(x),
      seq_(seq),
      batch_(batch),
      num_rows_(seq * batch),
      h_(config.num_attention_heads),
      n_(config.qk_nope_head_dim),
      r_(config.qk_rope_head_dim),
      v_(config.v_head_dim),
      d_(config.kv_lora_rank),
      num_threads_(num_threads) {
  std::vector<std::int64_t> positions(static_cast<std::size_t>(seq));
  std::iota(positions.begin(), positions.end(), first_position);
  rope_ = rope_table(config.rope, r_, positions, run_length > 0 ? run_length : first_position + seq);
}

void MlaBlock::forward() {
  u_ = reference::norm(x_, weights_.input_layernorm, config_.rms_norm_eps);
  project_queries();
  project_latent();
  kv_ = linear(c_normed_, weights_.kv_b_proj, {});
  result_.attention.resize(static_cast<std::size_t>(num_rows_ * h_ * v_));
  result_.lse.resize(static_cast<std::size_t>(num_rows_ * h_));
  reference::parallel_tasks(batch_ * h_, num_threads_, [&](std::int64_t task) {
    reference::attention_head_forward(attention_head(task), attention_output(task));
  });
  result_.y = linear(result_.attention, weights_.o_proj, weights_.o_proj_bias);
  const double scale = config_.residual_scale();
  for (std::size_t i = 0; i < result_.y.size(); ++i) result_.y[i] = x_[i] + scale * result_.y[i];
}

void MlaBlock::project_queries() {
  if (config_.q_lora_rank > 0) {
    c_q_ = linear(u_, weights_.q_a_proj, weights_.q_a_proj_bias);
    c_q_normed_ = reference::norm(c_q_, weights_.q_a_layernorm, ModelConfig::kInnerNormEps);
    result_.q = linear(c_q_normed_, weights_.q_b_proj, {});
  } else {
    result_.q = linear(u_, weights_.q_proj, {});
  }
  rotate(result_.q, n_ + r_, false);
}

void MlaBlock::project_latent() {
  const Values kv_a = linear(u_, weights_.kv_a_proj_with_mqa, weights_.kv_a_proj_bias);
  for (std::int64_t row = 0; row < num_rows_; ++row) {
    const auto begin = kv_a.begin() + row * (d_ + r_);
    c_.insert(c_.end(), begin, begin + d_);
    k_rope_.insert(k_rope_.end(), begin + d_, begin + d_ + r_);
  }
  c_normed_ =
      weights_.kv_a_layernorm.empty() ? c_ : reference::norm(c_, weights_.kv_a_layernorm, ModelConfig::kInnerNormEps);
  rotate(k_rope_, r_, false);
  for (std::int64_t row = 0; row < num_rows_; ++row) {
    auto& latent = result_.latent;
    latent.insert(latent.end(), c_normed_.begin() + row * d_, c_normed_.begin() + (row + 1) * d_);
    latent.insert(latent.end(), k_rope_.begin() + row * r_, k_rope_.begin() + (row + 1) * r_);
  }
}

reference::AttentionHead MlaBlock::attention_head(std::int64_t task) const {
  const std::int64_t b = task / h_, head = task % h_;
  const double* kv = kv_.data() + (b * h_ + head) * (n_ + v_);
  return {.seq = seq_,
          .nope_dim = n_,
          .rope_dim = r_,
          .v_dim = v_,
          .scale = softmax_scale(config_),
          .q = result_.q.data() + (b * h_ + head) * (n_ + r_),
          .q_stride = batch_ * h_ * (n_ + r_),
          .k_nope = kv,
          .k_nope_stride = batch_ * h_ * (n_ + v_),
          .k_rope = k_rope_.data() + b * r_,
          .k_rope_stride = batch_ * r_,
          .v = kv + n_,
          .v_stride = batch_ * h_ * (n_ + v_)};
}

reference::AttentionHeadOutput MlaBlock::attention_output(std::int64_t task) {
  return {.out = result_.attention.data() + task * v_,
          .out_stride = batch_ * h_ * v_,
          .lse = result_.lse.data() + task,
          .lse_stride = batch_ * h_};
}

void MlaBlock::backward(const Values& dy) {
  Values du(u_.size());
  {
    Values dq(result_.q.size()), dkv(kv_.size()), dk_rope(k_rope_.size());
    {
      Values dattention(result_.attention.size());
      Values dbranch = dy;
      for (double& d : dbranch) d *= config_.residual_scale();
      linear_backward(dbranch, result_.attention, weights_.o_proj, weights_.o_proj_bias, "self_attn.o_proj",
                      dattention);
      attention_backward(dattention, dq, dkv, dk_rope);
    }
    latent_backward(dkv, dk_rope, du);
    queries_backward(dq, du);
  }
  result_.dx = norm_backward(du, x_, weights_.input_layernorm, config_.rms_norm_eps, "input_layernorm");
  for (std::size_t i = 0; i < dy.size(); ++i) result_.dx[i] += dy[i];
}

void MlaBlock::attention_backward(const Values& dattention, Values& dq, Values& dkv, Values& dk_rope) {
  Values dk_rope_of_task(static_cast<std::size_t>(batch_ * h_ * seq_ * r_));
  reference::parallel_tasks(batch_ * h_, num_threads_, [&](std::int64_t task) {
    double* dkv_head = dkv.data() + task * (n_ + v_);
    reference::attention_head_backward(attention_head(task), attention_output(task),
                                       {.dout = dattention.data() + task * v_,
                                        .dq = dq.data() + task * (n_ + r_),
                                        .dk_nope = dkv_head,
                                        .dk_rope = dk_rope_of_task.data() + task * seq_ * r_,
                                        .dv = dkv_head + n_});
  });
  for (std::int64_t task = 0; task < batch_ * h_; ++task) {  // one rope key for all heads: summed in head order
    for (std::int64_t i = 0; i < seq_; ++i) {
      double* row = dk_rope.data() + (i * batch_ + task / h_) * r_;
      for (std::int64_t j = 0; j < r_; ++j)
        row[j] += dk_rope_of_task[static_cast<std::size_t>((task * seq_ + i) * r_ + j)];
    }
  }
  rotate(dq, n_ + r_, true);
  rotate(dk_rope, r_, true);
}

void MlaBlock::latent_backward(const Values& dkv, const Values& dk_rope, Values& du) {
  Values dc(c_.size());
  linear_backward(dkv, c_normed_, weights_.kv_b_proj, {}, "self_attn.kv_b_proj", dc);
  if (!weights_.kv_a_layernorm.empty()) {
    dc = norm_backward(dc, c_, weights_.kv_a_layernorm, ModelConfig::kInnerNormEps, "self_attn.kv_a_layernorm");
  }
  Values dkv_a;
  for (std::int64_t row = 0; row < num_rows_; ++row) {
    dkv_a.insert(dkv_a.end(), dc.begin() + row * d_, dc.begin() + (row + 1) * d_);
    dkv_a.insert(dkv_a.end(), dk_rope.begin() + row * r_, dk_rope.begin() + (row + 1) * r_);
  }
  linear_backward(dkv_a, u_, weights_.kv_a_proj_with_mqa, weights_.kv_a_proj_bias, "self_attn.kv_a_proj_with_mqa", du);
}

void MlaBlock::queries_backward(const Values& dq, Values& du) {
  if (config_.q_lora_rank == 0) {
    linear_backward(dq, u_, weights_.q_proj, {}, "self_attn.q_proj", du);
    return;
  }
  Values dc_q(c_q_.size());
  linear_backward(dq, c_q_normed_, weights_.q_b_proj, {}, "self_attn.q_b_proj", dc_q);
  dc_q = norm_backward(dc_q, c_q_, weights_.q_a_layernorm, ModelConfig::kInnerNormEps, "self_attn.q_a_layernorm");
  linear_backward(dc_q, u_, weights_.q_a_proj, weights_.q_a_proj_bias, "self_attn.q_a_proj", du);
}

void MlaBlock::rotate(Values& values, std::int64_t width, bool backward) const {
  if (r_ == 0) return;
  const auto pairs = config_.rope.interleave ? reference::RopePairs::interleaved : reference::RopePairs::halves;
  const std::int64_t per_position = static_cast<std::int64_t>(values.size()) / seq_ / width;
  for (std::int64_t i = 0; i < seq_ * per_position; ++i) {
    const std::int64_t table_row = i / per_position * (r_ / 2);
    double* x = values.data() + (i + 1) * width - r_;
    const auto apply = backward ? reference::rope_rotate_backward : reference::rope_rotate;
    apply(x, rope_.cos.data() + table_row, rope_.sin.data() + table_row, r_, pairs);
  }
}

void validate(const ModelConfig& config, const MlaReferenceWeights& weights, std::int64_t seq, std::int64_t batch,
              const Values& x, const Values& dy) {
  if (config.attention != AttentionKind::mla) invalid_argument("{} is not an MLA model", config.name);
  if (seq < 1 || batch < 1) invalid_argument("seq {} and batch {} must be at least 1", seq, batch);
  for (const MlaReferenceWeight& weight : mla_reference_weights(config)) {
    reference::check_size(weight.name, weights.*weight.member, weight.shape, weight.optional);
  }
  const Shape data_shape = {seq, batch, config.hidden_size};
  reference::check_size("x", x, data_shape, false);
  reference::check_size("dy", dy, data_shape, true);
}

}  // namespace

std::vector<MlaReferenceWeight> mla_reference_weights(const ModelConfig& config) {
  using W = MlaReferenceWeights;
  const std::int64_t hidden = config.hidden_size, h = config.num_attention_heads, q_lora = config.q_lora_rank;
  const std::int64_t q_width = h * config.qk_head_dim();
  std::vector<MlaReferenceWeight> list = {{"input_layernorm.weight", &W::input_layernorm, {hidden}, false}};
  if (q_lora > 0) {
    list.push_back({"self_attn.q_a_proj.weight", &W::q_a_proj, {q_lora, hidden}, false});
    list.push_back({"self_attn.q_a_proj.bias", &W::q_a_proj_bias, {q_lora}, true});
    list.push_back({"self_attn.q_a_layernorm.weight", &W::q_a_layernorm, {q_lora}, false});
    list.push_back({"self_attn.q_b_proj.weight", &W::q_b_proj, {q_width, q_lora}, false});
  } else {
    list.push_back({"self_attn.q_proj.weight", &W::q_proj, {q_width, hidden}, false});
  }
  list.push_back(
      {"self_attn.kv_a_proj_with_mqa.weight", &W::kv_a_proj_with_mqa, {config.latent_width(), hidden}, false});
  list.push_back({"self_attn.kv_a_proj_with_mqa.bias", &W::kv_a_proj_bias, {config.latent_width()}, true});
  list.push_back(
      {"self_attn.kv_a_layernorm.weight", &W::kv_a_layernorm, {config.kv_lora_rank}, !config.kv_a_layernorm});
  const Shape kv_b_shape = {h * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank};
  list.push_back({"self_attn.kv_b_proj.weight", &W::kv_b_proj, kv_b_shape, false});
  list.push_back({"self_attn.o_proj.weight", &W::o_proj, {hidden, h * config.v_head_dim}, false});
  list.push_back({"self_attn.o_proj.bias", &W::o_proj_bias, {hidden}, true});
  return list;
}

MlaReferenceResult mla_block_reference(const ModelConfig& config, const MlaReferenceWeights& weights, std::int64_t seq,
                                       std::int64_t batch, std::int64_t first_position, const std::vector<double>& x,
                                       const std::vector<double>& dy, int num_threads, std::int64_t run_length) {
  validate(config, weights, seq, batch, x, dy);
  MlaBlock block(config, weights, seq, batch, first_position, run_length, x, num_threads);
  block.forward();
  if (!dy.empty()) block.backward(dy);
  return block.take_result();
}

}  // namespace isomer
