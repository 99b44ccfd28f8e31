#include "convert/transform.h"

#include <Eigen/Dense>
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "kernels/reference/blocked_ops.h"
#include "model/random.h"

namespace isomer {

namespace {

using Values = std::vector<double>;
using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Values identity(std::int64_t d) {
  Values u(static_cast<std::size_t>(d * d), 0);
  for (std::int64_t i = 0; i < d; ++i) u[static_cast<std::size_t>(i * (d + 1))] = 1;
  return u;
}

/// Row i is sign_i · H_i / √d; H_ij = (−1)^popcount(i & j).
Values hadamard(std::int64_t d, std::uint64_t seed, std::int64_t layer) {
  Values signs(static_cast<std::size_t>(d)), u(static_cast<std::size_t>(d * d));
  fill_seeded(seed, fmt::format("tpla.hadamard.{}", layer), 0, d, {}, DType::f64, signs.data());
  const double unit = 1 / std::sqrt(static_cast<double>(d));
  for (std::int64_t i = 0; i < d; ++i) {
    const double value = signs[static_cast<std::size_t>(i)] < 0 ? -unit : unit;
    for (std::int64_t j = 0; j < d; ++j) {
      const bool odd = std::popcount(static_cast<std::uint64_t>(i & j)) % 2 != 0;
      u[static_cast<std::size_t>(i * d + j)] = odd ? -value : value;
    }
  }
  return u;
}

/// E[f fᵀ], less the mean's part where centred.
Values key_moment(const LayerMoments& moments, bool centred) {
  ISOMER_CHECK(moments.num_tokens > 0, "moments of {} tokens", moments.num_tokens);
  const double count = static_cast<double>(moments.num_tokens);
  const std::size_t d = moments.first.size();
  Values result = moments.second;
  for (std::size_t i = 0; i < d; ++i) {
    for (std::size_t j = 0; j < d; ++j) {
      double& value = result[i * d + j];
      value /= count;
      if (centred) value -= moments.first[i] / count * (moments.first[j] / count);
    }
  }
  return result;
}

/// (QC + CQ)/2.
Values symmetrised_product(const Values& q, const Values& c, std::int64_t d) {
  Values product(q.size()), result(q.size());
  reference::gemm({.m = d,
                   .n = d,
                   .k = d,
                   .a = q.data(),
                   .a_stride = d,
                   .b = c.data(),
                   .b_stride = d,
                   .c = product.data(),
                   .c_stride = d});
  const auto size = static_cast<std::size_t>(d);
  for (std::size_t i = 0; i < size; ++i) {
    for (std::size_t j = 0; j < size; ++j) result[i * size + j] = (product[i * size + j] + product[j * size + i]) / 2;
  }
  return result;
}

double sum_of(const Values& values, TplaRange range) {
  return std::accumulate(values.begin() + range.begin, values.begin() + range.end(), 0.0);
}

}  // namespace

EigenSystem symmetric_eigensystem(const Values& matrix, std::int64_t size) {
  ISOMER_CHECK(static_cast<std::int64_t>(matrix.size()) == size * size, "{} values for {}²", matrix.size(), size);
  const Eigen::Map<const RowMajor> view(matrix.data(), size, size);
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(view);
  if (solver.info() != Eigen::Success) {
    throw Error(fmt::format("the eigenvectors of a {}×{} second moment were not found: are there NaN in the weights?",
                            size, size));
  }
  EigenSystem result{Values(matrix.size()), Values(static_cast<std::size_t>(size))};
  for (std::int64_t j = 0; j < size; ++j) {
    const std::int64_t from = size - 1 - j;  // Eigen's are ascending
    const auto vector = solver.eigenvectors().col(from);
    std::int64_t largest = 0;
    for (std::int64_t i = 1; i < size; ++i) {
      if (std::abs(vector[i]) > std::abs(vector[largest])) largest = i;
    }
    const double sign = vector[largest] < 0 ? -1 : 1;
    for (std::int64_t i = 0; i < size; ++i) result.vectors[static_cast<std::size_t>(i * size + j)] = sign * vector[i];
    result.values[static_cast<std::size_t>(j)] = solver.eigenvalues()[from];
  }
  return result;
}

Values absorbed_query_moment(const TransformInput& input) {
  const ModelConfig& config = input.config;
  const std::int64_t d = config.kv_lora_rank, n = config.qk_nope_head_dim, h = config.num_attention_heads;
  const std::int64_t stride = (n + config.v_head_dim) * d;
  Values result(static_cast<std::size_t>(d * d), 0), product(static_cast<std::size_t>(n * d));
  for (std::int64_t head = 0; head < h && n > 0; ++head) {  // summed in the order of heads
    const double* w_uk = input.kv_b.data() + head * stride;
    reference::gemm({.m = n,
                     .n = d,
                     .k = n,
                     .a = input.moments.query_second.data() + head * n * n,
                     .a_stride = n,
                     .b = w_uk,
                     .b_stride = d,
                     .c = product.data(),
                     .c_stride = d});
    reference::gemm({.m = d,
                     .n = d,
                     .k = n,
                     .a = w_uk,
                     .a_stride = d,
                     .a_transposed = true,
                     .b = product.data(),
                     .b_stride = d,
                     .c = result.data(),
                     .c_stride = d,
                     .alpha = 1 / static_cast<double>(input.moments.num_tokens * h),
                     .beta = 1});
  }
  const auto size = static_cast<std::size_t>(d);
  for (std::size_t i = 0; i < size && !input.gamma.empty(); ++i) {
    for (std::size_t j = 0; j < size; ++j) result[i * size + j] *= input.gamma[i] * input.gamma[j];
  }
  return result;
}

namespace {

/// Columns in the order of |eigenvalue|, largest first; equal ones stay as they are.
Values by_magnitude(const EigenSystem& system) {
  const std::size_t d = system.values.size();
  std::vector<std::size_t> order(d);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::abs(system.values[a]) > std::abs(system.values[b]);
  });
  Values result(system.vectors.size());
  for (std::size_t i = 0; i < d; ++i) {
    for (std::size_t j = 0; j < d; ++j) result[i * d + j] = system.vectors[i * d + order[j]];
  }
  return result;
}

}  // namespace

Values tpla_transform(TplaTransform transform, const TransformInput& input) {
  const std::int64_t d = input.config.kv_lora_rank;
  switch (transform) {
    case TplaTransform::none: break;
    case TplaTransform::hadamard: return hadamard(d, input.seed, input.layer);
    case TplaTransform::pca: return symmetric_eigensystem(key_moment(input.moments, false), d).vectors;
    case TplaTransform::pca_centred: return symmetric_eigensystem(key_moment(input.moments, true), d).vectors;
    case TplaTransform::query_aware:
      return by_magnitude(symmetric_eigensystem(
          symmetrised_product(absorbed_query_moment(input), key_moment(input.moments, false), d), d));
  }
  return identity(d);
}

Values column_moments(const LayerMoments& moments, const Values& transform) {
  const auto d = static_cast<std::int64_t>(moments.first.size());
  const Values second = key_moment(moments, false);
  Values product(second.size());
  reference::gemm({.m = d,
                   .n = d,
                   .k = d,
                   .a = second.data(),
                   .a_stride = d,
                   .b = transform.data(),
                   .b_stride = d,
                   .c = product.data(),
                   .c_stride = d});
  Values result(static_cast<std::size_t>(d), 0);
  for (std::size_t i = 0; i < product.size(); ++i) {
    result[i % static_cast<std::size_t>(d)] += transform[i] * product[i];
  }
  for (double& value : result) value = std::max(value, 0.0);  // a rounding below zero is none
  return result;
}

TplaLayer tpla_layer(const TplaOptions& options, const ModelConfig& config, Values moments) {
  const std::int64_t d = config.kv_lora_rank;
  const int g = options.num_shards;
  const double shared = sum_of(moments, options.shared()), all = sum_of(moments, {0, d}), split = all - shared;
  TplaLayer layer{.moments = std::move(moments)};
  for (int i = 0; i < g; ++i) {
    const double own = sum_of(layer.moments, options.shard(i, d));
    // Nothing to share out: every shard counts the same.
    layer.shares.push_back(split > 0 && own > 0 ? own / split : 1.0 / g);
    layer.rms_scale.push_back(options.rms == TplaRms::sliced && own + shared > 0 ? all / (own + shared) : 1);
  }
  for (std::int64_t head = 0; head < config.num_attention_heads; ++head) {
    for (const double share : layer.shares) {
      const bool by_share = options.kappa == TplaKappa::share, inverse = options.kappa == TplaKappa::inverse_share;
      layer.kappa.push_back(by_share ? share : inverse ? 1 / share : 1);
    }
  }
  return layer;
}

}  // namespace isomer
