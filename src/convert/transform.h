// The orthogonal d×d matrices U that TPLA multiplies a latent by (model-math: TPLA), from what calibration collected.
// Everything in float64; matrices row-major. Latent columns become f·U, so that column j of U is the direction that
// column j of the new latent measures.
//
//   none          the identity
//   hadamard      diag(random signs)·H/√d, H Sylvester's: spreads the norm evenly over the columns; d a power of two
//   pca           eigenvectors of E[f fᵀ], f = c/RMS(c) before γ (f = c without a norm), largest first
//   pca-centred   the same of the covariance E[f fᵀ] − E[f] E[f]ᵀ
//   query-aware   eigenvectors of (QC + CQ)/2, largest magnitude first: C = E[f fᵀ], Q = E[q̃ q̃ᵀ] over tokens and heads
//                 of the absorbed queries q̃ = diag(γ)·W_UKᵀ·q_nope. For a query and a key drawn independently, with
//                 logit z = q̃·f and its part z_u = (q̃·u)(u·f) along a unit vector u, E[z·z_u] = uᵀ·(QC + CQ)/2·u; over
//                 any orthonormal basis these sum to E[z²]. A negative one is a direction along which the logit is
//                 cancelled rather than built up: to leave it out changes z as much, so that magnitude is what counts.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"
#include "model/tpla.h"

namespace isomer {

/// Sums over the tokens of a calibration text, of one layer.
struct LayerMoments {
  std::int64_t num_tokens = 0;
  std::vector<double> second;        // [d, d]: Σ f fᵀ
  std::vector<double> first;         // [d]: Σ f
  std::vector<double> query_second;  // [h, n, n]: Σ q_nope q_nopeᵀ of every head
};

/// Eigenvectors as columns [d, d], eigenvalues [d] descending. Each vector's component of largest magnitude (the first
/// of several) is positive, so that the result is one.
struct EigenSystem {
  std::vector<double> vectors, values;
};
EigenSystem symmetric_eigensystem(const std::vector<double>& matrix, std::int64_t size);

struct TransformInput {
  const ModelConfig& config;
  const LayerMoments& moments;
  const std::vector<double>& kv_b;   // [h(n + v), d], as in the checkpoint
  const std::vector<double>& gamma;  // [d]; empty without kv_a_layernorm
  std::uint64_t seed = 0;            // hadamard's signs, with the layer's number
  std::int64_t layer = 0;
};

/// U [d, d]. The same bits whatever the number of threads.
std::vector<double> tpla_transform(TplaTransform transform, const TransformInput& input);

/// Q = E[q̃ q̃ᵀ] [d, d] over tokens and heads.
std::vector<double> absorbed_query_moment(const TransformInput& input);

/// Second moments of the columns of f·U: [d], the diagonal of Uᵀ·E[f fᵀ]·U.
std::vector<double> column_moments(const LayerMoments& moments, const std::vector<double>& transform);

/// What follows from them under `options`: shares, a_i, and κ but for least squares, which stays 1 until it is measured
/// (head_meter.h).
TplaLayer tpla_layer(const TplaOptions& options, const ModelConfig& config, std::vector<double> moments);

}  // namespace isomer
