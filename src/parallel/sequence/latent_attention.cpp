#include "parallel/sequence/latent_attention.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "kernels/elementwise.h"

namespace isomer {

namespace {

constexpr std::int64_t kMinBlockRows = 512, kMaxBlockRows = 2048;
constexpr std::int64_t kBlockElements = std::int64_t{1} << 25;

/// Queries with their rope columns apart, so that keys need no concatenation.
PlacedQueries placed(const SequenceBlock& block, const Tensor& q) {
  const std::int64_t n = block.layer.config.qk_nope_head_dim, r = block.layer.config.qk_rope_head_dim;
  PlacedQueries queries{.q = q.slice(2, 0, n), .q_rope = {}, .positions = {}};
  if (r > 0) queries.q_rope = q.slice(2, n, r);
  queries.positions = block.tokens.group_positions(block.group());
  return queries;
}

PlacedKeys keys_of(const SequenceBlock& block, const Tensor& latent, const Tensor& kv, const IndexRange& positions) {
  const auto& config = block.layer.config;
  const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim;
  PlacedKeys keys{.k = kv.slice(2, 0, n), .v = kv.slice(2, n, config.v_head_dim), .k_rope = {}, .positions = {}};
  if (r > 0) keys.k_rope = latent.slice(1, config.kv_lora_rank, r).unflatten(1, {1, r});
  keys.positions = {positions};
  return keys;
}

/// Calls body(rows, positions) for blocks of at most `block_rows` rows that some query sees.
template <class Body>
void for_visible_blocks(const SequenceBlock& block, const std::vector<IndexRange>& positions, std::int64_t block_rows,
                        Body&& body) {
  const auto queries = block.tokens.group_positions(block.group());
  const std::int64_t batch = block.tokens.batch, tokens = std::max<std::int64_t>(1, block_rows / batch);
  std::int64_t row = 0;
  for (const IndexRange& range : positions) {
    for (std::int64_t begin = 0; begin < range.count; begin += tokens) {
      const std::int64_t count = std::min(tokens, range.count - begin);
      const IndexRange part{range.begin + begin, count};
      if (sees_any(queries, {part})) body(IndexRange{row, count * batch}, part);
      row += count * batch;
    }
  }
}

Tensor rows_of(const Tensor& tensor, const IndexRange& rows) {
  return tensor ? tensor.slice(0, rows.begin, rows.count) : Tensor();
}

}  // namespace

std::int64_t rebuilt_rows(const ModelConfig& config, std::int64_t heads, std::int64_t given) {
  if (given > 0) return given;
  const std::int64_t width = std::max<std::int64_t>(1, heads * (config.qk_nope_head_dim + config.v_head_dim));
  return std::clamp(kBlockElements / width, kMinBlockRows, kMaxBlockRows);
}

std::int64_t block_rows_of(const Layout& layout) {
  constexpr std::int64_t kMaxGiven = std::int64_t{1} << 20;
  const std::string text = layout.option("rows", "");
  if (text.empty()) return 0;
  std::int64_t rows = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rows);
  if (error != std::errc() || end != text.data() + text.size() || rows < 1 || rows > kMaxGiven)
    invalid_argument("layout '{}': rows={}; it takes a number of rows from 1 to {}", to_string(layout), text,
                     kMaxGiven);
  return rows;
}

LatentAttention::LatentAttention(RankContext& ctx, const SequenceBlock& block, Tensor q, std::int64_t block_rows)
    : ctx_(ctx), block_(block), queries_(placed(block, q)), block_rows_(block_rows), merged_(ctx, block, queries_) {}

void LatentAttention::add(const LatentRows& latent) {
  for_visible_blocks(block_, latent.positions, block_rows_, [&](const IndexRange& rows, const IndexRange& positions) {
    const Tensor part = rows_of(latent.rows, rows);
    const Tensor kv = latent.kv
                          ? rows_of(latent.kv, rows)
                          : up_project_forward(ctx_, block_.layer, part, block_.my_heads(), MemoryClass::workspace);
    merged_.add(keys_of(block_, part, kv, positions));
  });
}

LatentAttentionBackward::LatentAttentionBackward(RankContext& ctx, const SequenceBlock& block, Tensor q, CoreSaved core,
                                                 Tensor dout, std::int64_t block_rows, BlockGradients& gradients)
    : ctx_(ctx),
      block_(block),
      q_(std::move(q)),
      dout_(std::move(dout)),
      dq_(ctx.zeros("dq sum", MemoryClass::workspace, statistic_dtype(q_.dtype()), q_.shape())),
      core_(std::move(core)),
      block_rows_(block_rows),
      gradients_(gradients) {
  zero_up_projection_gradient(ctx, block.layer, block.my_heads(), gradients);
}

void LatentAttentionBackward::add(const LatentRows& latent, const Tensor& dlatent) {
  for_visible_blocks(block_, latent.positions, block_rows_, [&](const IndexRange& rows, const IndexRange& positions) {
    add_block(rows_of(latent.rows, rows), rows_of(latent.kv, rows), positions, rows_of(dlatent, rows));
  });
}

void LatentAttentionBackward::add_block(const Tensor& rows, const Tensor& kept_kv, const IndexRange& positions,
                                        const Tensor& dlatent) {
  const auto& config = block_.layer.config;
  const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim, v = config.v_head_dim;
  const IndexRange heads = block_.my_heads();
  Tensor kv = kept_kv ? kept_kv : up_project_forward(ctx_, block_.layer, rows, heads, MemoryClass::workspace);
  Tensor dkv = ctx_.zeros("d kv_b output sum", MemoryClass::workspace, dq_.dtype(), kv.shape());
  PartGradients gradients{
      .dq = dq_.slice(2, 0, n), .dq_rope = {}, .dk = dkv.slice(2, 0, n), .dv = dkv.slice(2, n, v), .dk_rope = {}};
  if (r > 0) {
    gradients.dq_rope = dq_.slice(2, n, r);
    gradients.dk_rope = dlatent.slice(1, config.kv_lora_rank, r).unflatten(1, {1, r});
  }
  attention_part_backward(ctx_, block_, placed(block_, q_), keys_of(block_, rows, kv, positions), core_, dout_,
                          gradients);
  kv = Tensor();
  gradients = {};
  dkv = rounded(ctx_, "d kv_b output", dkv, q_.dtype());
  up_project_backward(ctx_, block_.layer, rows, heads, dkv, dlatent, gradients_, true);
}

Tensor LatentAttentionBackward::finish() {
  const DType dtype = q_.dtype();
  core_ = {};
  q_ = dout_ = Tensor();
  return rounded(ctx_, "dq", std::exchange(dq_, Tensor()), dtype);
}

}  // namespace isomer
