// Both ends of a language model: rows of the embedding and their gradient, and cross-entropy.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

/// out[i] = scale·table[ids[i]]. table [vocabulary, width], out [ids.size(), width], ids in range.
void embedding_rows(RankContext& ctx, std::string_view name, const Tensor& table, std::span<const std::int32_t> ids,
                    double scale, const Tensor& out);
/// dtable[ids[i]] += scale·dx[i], for each id in the order of i. dtable in the statistics' dtype.
void embedding_scatter(RankContext& ctx, std::string_view name, const Tensor& dx, std::span<const std::int32_t> ids,
                       double scale, const Tensor& dtable);

struct CrossEntropy {
  Tensor logits;                          // [num_rows, vocabulary] in the statistics' dtype; destroyed with dlogits
  std::span<const std::int32_t> targets;  // [num_rows]; negative: not scored
  double logit_scale = 1;                 // the logits count times this, > 0
  double gradient_scale = 1;
  Tensor dlogits;            // optional, out: gradient_scale · d loss / d logits; may be `logits`
  std::span<double> losses;  // [num_rows], out: −ln p(target) in nats, 0 where not scored
  std::span<char> hits;      // [num_rows], out: 1 where the target has the largest logit (the lowest index of equals)
};
void cross_entropy(RankContext& ctx, std::string_view name, const CrossEntropy& args);

}  // namespace isomer
