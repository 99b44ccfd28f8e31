// What a shard of the latent sees of every head's logits, summed over text (claims T10): the least-squares κ, the
// cosine of a rank's logits and the whole ones, and the KL divergence of their softmax. A softmax ignores what is added
// to all logits of a query, so sums are over values centred per query, keys being those that the query may see.
//
//   Z = q̃·ĉ (exact)   A_i = q̃_S·ĉ_S   B_i = q̃_i·ĉ_i (as rank i normalises them)   rope = q_pe·k_pe
//   κ (least squares) = ΣΣ (Z − A_i)°·B_i° / ΣΣ B_i°²           ° centred per query
//   G = s(Z + rope),  L_i = s(A_i + κ_i·B_i + rope)
//   cosine = ΣΣ G°·L_i° / sqrt(ΣΣ G°² · ΣΣ L_i°²);   KL = mean over queries of KL(softmax G ‖ softmax L_i), nats
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/config.h"
#include "model/tpla.h"

namespace isomer {

/// One sequence's rows of one layer, float64. Latents are those of the rewritten model, before its norm.
struct MeteredRows {
  std::vector<double> q;                   // [T, h, n + r], rotated
  std::vector<double> c;                   // [T, d], before kv_a_layernorm
  std::vector<double> k_pe;                // [T, r], rotated
  std::span<const std::int32_t> segments;  // [T]: a token sees those of its segment up to itself
};

/// Sums of one layer; all vectors [h, g].
struct HeadSums {
  std::vector<double> target_own, own_own;              // ΣΣ (Z − A)°·B°, ΣΣ B°²
  std::vector<double> cross, whole_whole, local_local;  // ΣΣ G°·L°, ΣΣ G°², ΣΣ L°²
  std::vector<double> divergence;                       // Σ KL
  std::int64_t num_queries = 0;

  std::vector<double> least_squares_kappa() const;  // 1 where a shard adds nothing
  std::vector<double> cosine() const;               // 1 where nothing varies
  std::vector<double> mean_divergence() const;
};

class HeadMeter {
 public:
  /// `kv_b` [h(n + v), d] of the rewritten layer, `gamma` its norm's weight (1, or empty without a norm), `layer` its
  /// scalars: all must stay alive.
  HeadMeter(const ModelConfig& config, const TplaOptions& options, const TplaLayer& layer,
            const std::vector<double>& kv_b, const std::vector<double>& gamma);

  /// Adds a sequence. The same bits whatever `num_threads`.
  void add(const MeteredRows& rows, int num_threads);
  const HeadSums& sums() const { return sums_; }

 private:
  struct Sequence;
  void add_head(const Sequence& sequence, std::int64_t head);
  void add_queries(const Sequence& sequence, std::int64_t head, const std::vector<double>& absorbed, std::int64_t first,
                   std::int64_t count);

  const ModelConfig& config_;
  const TplaOptions& options_;
  const TplaLayer& layer_;
  const std::vector<double>& kv_b_;
  const std::vector<double>& gamma_;
  HeadSums sums_;
};

}  // namespace isomer
