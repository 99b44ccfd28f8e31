#include "layers/reference/gqa_block.h"

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
class GqaBlock {
 public:
  GqaBlock(const ModelConfig& config, const GqaReferenceInput& input, int num_threads);

  void forward();
  void backward();
  GqaReferenceResult take_result() { return std::move(result_); }

 private:
  /// A weight or bias; empty where it is absent.
  const Values& weight(const std::string& name) const {
    static const Values kAbsent;
    const auto found = in_.weights.find(name);
    return found == in_.weights.end() ? kAbsent : found->second;
  }
  Values linear(const Values& x, const std::string& name) const {
    return reference::linear(x, weight(name + ".weight"), weight(name + ".bias"), num_rows_, num_threads_);
  }
  void linear_backward(const Values& dy, const Values& x, const std::string& name, Values& dx) {
    reference::linear_backward({.dy = dy,
                                .x = x,
                                .weight = weight(name + ".weight"),
                                .bias = weight(name + ".bias"),
                                .name = name,
                                .num_rows = num_rows_},
                               dx, result_.gradients, num_threads_);
  }
  /// What query head `head` of sequence `b` reads, its rotated key taken as one part.
  reference::AttentionHead attention_head(std::int64_t b, std::int64_t head) const;
  reference::AttentionHeadOutput attention_output(std::int64_t b, std::int64_t head);
  void attention_backward(const Values& dattention, Values& dq, Values& dk, Values& dv);
  /// Rotates heads [rows, heads, w], or takes their gradient back.
  void rotate(Values& heads, bool backward) const;

  std::int64_t kv_head_of(std::int64_t head) const { return head * kv_heads_ / h_; }

  const ModelConfig& config_;
  const GqaReferenceInput& in_;
  const std::int64_t num_rows_, h_, kv_heads_, w_;
  const int num_threads_;
  RopeTable rope_;
  GqaReferenceResult result_;
  Values u_;  // RMSNorm(x) [rows, D]
};

GqaBlock::GqaBlock(const ModelConfig& config, const GqaReferenceInput& input, int num_threads)
    : config_(config),
      in_(input),
      num_rows_(input.seq * input.batch),
      h_(config.num_attention_heads),
      kv_heads_(config.num_key_value_heads),
      w_(config.head_dim),
      num_threads_(num_threads) {
  std::vector<std::int64_t> positions(static_cast<std::size_t>(input.seq));
  std::iota(positions.begin(), positions.end(), input.first_position);
  const std::int64_t run_length = input.run_length > 0 ? input.run_length : input.first_position + input.seq;
  rope_ = rope_table(config.rope, w_, positions, run_length);
}

void GqaBlock::forward() {
  u_ = reference::norm(in_.x, weight("input_layernorm.weight"), config_.rms_norm_eps);
  result_.q = linear(u_, "self_attn.q_proj");
  result_.k = linear(u_, "self_attn.k_proj");
  result_.v = linear(u_, "self_attn.v_proj");
  rotate(result_.q, false);
  rotate(result_.k, false);
  result_.attention.resize(static_cast<std::size_t>(num_rows_ * h_ * w_));
  result_.lse.resize(static_cast<std::size_t>(num_rows_ * h_));
  reference::parallel_tasks(in_.batch * h_, num_threads_, [&](std::int64_t task) {
    reference::attention_head_forward(attention_head(task / h_, task % h_), attention_output(task / h_, task % h_));
  });
  result_.y = linear(result_.attention, "self_attn.o_proj");
  const double scale = config_.residual_scale();
  for (std::size_t i = 0; i < result_.y.size(); ++i) result_.y[i] = in_.x[i] + scale * result_.y[i];
}

reference::AttentionHead GqaBlock::attention_head(std::int64_t b, std::int64_t head) const {
  const std::int64_t kv = (b * kv_heads_ + kv_head_of(head)) * w_;
  return {.seq = in_.seq,
          .nope_dim = w_,
          .rope_dim = 0,
          .v_dim = w_,
          .scale = softmax_scale(config_),
          .q = result_.q.data() + (b * h_ + head) * w_,
          .q_stride = in_.batch * h_ * w_,
          .k_nope = result_.k.data() + kv,
          .k_nope_stride = in_.batch * kv_heads_ * w_,
          .v = result_.v.data() + kv,
          .v_stride = in_.batch * kv_heads_ * w_};
}

reference::AttentionHeadOutput GqaBlock::attention_output(std::int64_t b, std::int64_t head) {
  return {.out = result_.attention.data() + (b * h_ + head) * w_,
          .out_stride = in_.batch * h_ * w_,
          .lse = result_.lse.data() + b * h_ + head,
          .lse_stride = in_.batch * h_};
}

void GqaBlock::backward() {
  Values du(u_.size());
  Values dq(result_.q.size()), dk(result_.k.size()), dv(result_.v.size());
  {
    Values dattention(result_.attention.size());
    Values dbranch = in_.dy;
    for (double& d : dbranch) d *= config_.residual_scale();
    linear_backward(dbranch, result_.attention, "self_attn.o_proj", dattention);
    attention_backward(dattention, dq, dk, dv);
  }
  rotate(dq, true);
  rotate(dk, true);
  linear_backward(dq, u_, "self_attn.q_proj", du);
  linear_backward(dk, u_, "self_attn.k_proj", du);
  linear_backward(dv, u_, "self_attn.v_proj", du);
  result_.dx = reference::norm_backward(du, in_.x, weight("input_layernorm.weight"), config_.rms_norm_eps,
                                        "input_layernorm", result_.gradients);
  for (std::size_t i = 0; i < in_.dy.size(); ++i) result_.dx[i] += in_.dy[i];
}

void GqaBlock::attention_backward(const Values& dattention, Values& dq, Values& dk, Values& dv) {
  // A KV head collects from its query heads in their order, so that the sum does not depend on the threads.
  reference::parallel_tasks(in_.batch * kv_heads_, num_threads_, [&](std::int64_t task) {
    const std::int64_t b = task / kv_heads_, kv = task % kv_heads_;
    for (std::int64_t head = 0; head < h_; ++head) {
      if (kv_head_of(head) != kv) continue;
      const std::int64_t query = (b * h_ + head) * w_, key = (b * kv_heads_ + kv) * w_;
      reference::attention_head_backward(attention_head(b, head), attention_output(b, head),
                                         {.dout = dattention.data() + query,
                                          .dq = dq.data() + query,
                                          .dk_nope = dk.data() + key,
                                          .dv = dv.data() + key});
    }
  });
}

void GqaBlock::rotate(Values& heads, bool backward) const {
  const auto pairs = config_.rope.interleave ? reference::RopePairs::interleaved : reference::RopePairs::halves;
  const auto apply = backward ? reference::rope_rotate_backward : reference::rope_rotate;
  const std::int64_t per_position = static_cast<std::int64_t>(heads.size()) / in_.seq / w_;
  for (std::int64_t i = 0; i < in_.seq * per_position; ++i) {
    const std::int64_t table_row = i / per_position * (w_ / 2);
    apply(heads.data() + i * w_, rope_.cos.data() + table_row, rope_.sin.data() + table_row, w_, pairs);
  }
}

void validate(const ModelConfig& config, const GqaReferenceInput& input) {
  if (config.attention != AttentionKind::gqa) {
    invalid_argument("{} is not a model with grouped-query attention", config.name);
  }
  if (input.seq < 1 || input.batch < 1) {
    invalid_argument("seq {} and batch {} must be at least 1", input.seq, input.batch);
  }
  for (const GqaReferenceWeight& weight : gqa_reference_weights(config)) {
    const auto found = input.weights.find(std::string(weight.name));
    reference::check_size(weight.name, found == input.weights.end() ? Values{} : found->second, weight.shape,
                          weight.optional);
  }
  const Shape data_shape = {input.seq, input.batch, config.hidden_size};
  reference::check_size("x", input.x, data_shape, false);
  reference::check_size("dy", input.dy, data_shape, true);
}

}  // namespace

std::vector<GqaReferenceWeight> gqa_reference_weights(const ModelConfig& config) {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t q_width = config.num_attention_heads * config.head_dim;
  const std::int64_t kv_width = config.num_key_value_heads * config.head_dim;
  return {{"input_layernorm.weight", {hidden}, false}, {"self_attn.q_proj.weight", {q_width, hidden}, false},
          {"self_attn.q_proj.bias", {q_width}, true},  {"self_attn.k_proj.weight", {kv_width, hidden}, false},
          {"self_attn.k_proj.bias", {kv_width}, true}, {"self_attn.v_proj.weight", {kv_width, hidden}, false},
          {"self_attn.v_proj.bias", {kv_width}, true}, {"self_attn.o_proj.weight", {hidden, q_width}, false},
          {"self_attn.o_proj.bias", {hidden}, true}};
}

GqaReferenceResult gqa_block_reference(const ModelConfig& config, const GqaReferenceInput& input, int num_threads) {
  validate(config, input);
  GqaBlock block(config, input, num_threads);
  block.forward();
  if (!input.dy.empty()) block.backward();
  return block.take_result();
}

}  // namespace isomer
