#include "cost/scheme_bytes.h"

#include "core/error.h"

namespace isomer {

namespace {

/// How a rank's part and the whole enter the bytes of the direct algorithm, in elements of one rank.
struct Exchange {
  std::int64_t own_rows, all_rows;    // t_p·batch, S·batch
  std::int64_t own_heads, all_heads;  // h_p, h
  std::int64_t peers;                 // P − 1

  // An all-to-all of `width` elements a head: tokens to heads sends own tokens of foreign heads, heads to tokens
  // foreign tokens of own heads. What one direction sends the other receives.
  std::int64_t to_heads(std::int64_t width) const { return own_rows * (all_heads - own_heads) * width; }
  std::int64_t to_tokens(std::int64_t width) const { return (all_rows - own_rows) * own_heads * width; }
  std::int64_t gather_sent(std::int64_t width) const { return peers * own_rows * width; }
  std::int64_t gather_received(std::int64_t width) const { return (all_rows - own_rows) * width; }
};

Exchange exchange_of(const ModelConfig& config, const TokenShards& tokens, int rank) {
  const HeadShards heads{config.num_attention_heads, tokens.num_ranks};
  return {tokens.rows(rank).count, tokens.total_rows(), heads.per_rank(), heads.num_heads, tokens.num_ranks - 1};
}

/// What a scheme sends per head and per token: widths of tensors that go to heads in the forward (and come back as
/// gradients), and of rows that are gathered (their gradient sums scattered).
struct Traffic {
  std::int64_t to_heads;   // q, k, v, … a head
  std::int64_t to_tokens;  // o a head
  std::int64_t gathered;   // a token
};

Traffic traffic_of(std::string_view scheme, const ModelConfig& c) {
  const std::int64_t n = c.qk_nope_head_dim, r = c.qk_rope_head_dim, v = c.v_head_dim;
  if (scheme == "explicit") return {2 * (n + r) + v, v, 0};
  if (scheme == "explicit-shared-rope") return {(n + r) + n + v, v, r};
  if (scheme == "laga" || scheme == "absorbed" || scheme == "absorbed-two-product") return {n + r, v, c.latent_width()};
  invalid_argument("scheme '{}' has no closed form of its bytes", scheme);
}

std::int64_t statistic_size(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

}  // namespace

SchemeBytes scheme_bytes_sent(std::string_view scheme, const ModelConfig& config, const TokenShards& tokens,
                              DType activations, int rank) {
  const Exchange x = exchange_of(config, tokens, rank);
  const Traffic t = traffic_of(scheme, config);
  const std::int64_t e = size_of(activations), e_sum = statistic_size(activations);
  return {.forward = e * (x.to_heads(t.to_heads) + x.to_tokens(t.to_tokens) + x.gather_sent(t.gathered)),
          .backward = e * (x.to_tokens(t.to_heads) + x.to_heads(t.to_tokens)) + e_sum * x.gather_received(t.gathered)};
}

SchemeBytes scheme_bytes_received(std::string_view scheme, const ModelConfig& config, const TokenShards& tokens,
                                  DType activations, int rank) {
  const Exchange x = exchange_of(config, tokens, rank);
  const Traffic t = traffic_of(scheme, config);
  const std::int64_t e = size_of(activations), e_sum = statistic_size(activations);
  return {.forward = e * (x.to_tokens(t.to_heads) + x.to_heads(t.to_tokens) + x.gather_received(t.gathered)),
          .backward = e * (x.to_heads(t.to_heads) + x.to_tokens(t.to_tokens)) + e_sum * x.gather_sent(t.gathered)};
}

std::int64_t gradient_sync_bytes_sent(std::string_view scheme, const ModelConfig& config, int num_ranks, int rank) {
  constexpr std::int64_t kGradientBytes = 4;
  if (num_ranks == 1) return 0;
  const auto all_reduce = [&](std::int64_t elements) {
    const std::int64_t mine = balanced_part(elements, num_ranks, rank).count;
    return (elements - mine) + (num_ranks - 1) * mine;
  };
  const std::int64_t D = config.hidden_size, h = config.num_attention_heads, q_lora = config.q_lora_rank;
  const std::int64_t queries = h * config.qk_head_dim();
  const std::int64_t kv_b = h * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank;
  std::int64_t elements = all_reduce(D);  // input_layernorm; tensor by tensor, as they are sent
  if (q_lora > 0) {
    elements += all_reduce(q_lora * D) + all_reduce(q_lora) + all_reduce(queries * q_lora);
  } else {
    elements += all_reduce(queries * D);
  }
  elements += all_reduce(config.latent_width() * D) + all_reduce(D * h * config.v_head_dim);
  if (config.kv_a_layernorm) elements += all_reduce(config.kv_lora_rank);
  if (config.attention_bias) {
    elements += (q_lora > 0 ? all_reduce(q_lora) : 0) + all_reduce(config.latent_width()) + all_reduce(D);
  }
  const bool own_heads = traffic_of(scheme, config).gathered == config.latent_width();
  elements += own_heads ? (num_ranks - 1) * (kv_b / num_ranks) : all_reduce(kv_b);
  return elements * kGradientBytes;
}

}  // namespace isomer
