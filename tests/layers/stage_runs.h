// Blocks run as schemes run them, for tests of the stages: golden problems, intermediates, derivatives.
#pragma once

#include <gtest/gtest.h>

#include <map>

#include "golden/golden_file.h"
#include "study/block_run.h"
#include "tensor_values.h"

namespace isomer::testing {

using Intermediates = std::map<std::string, std::vector<double>>;

struct Outcome {
  BlockRun run;
  Intermediates shown;  // of rank 0
};

inline Outcome run_layout(const BlockProblem& problem, const BlockData& data, const std::string& layout,
                          int num_ranks = 1) {
  Outcome outcome;
  BlockRunOptions options;
  options.group.num_ranks = num_ranks;
  options.group.threads_per_rank = 1;
  options.group.timeout_s = 60;
  options.repetitions = 1;
  options.poison_memory = true;
  options.dump = [&](int rank, const std::string& name, const Tensor& tensor) {
    if (rank == 0) outcome.shown[name] = values_of(tensor);
  };
  outcome.run = run_block(problem, data, parse_layout(layout), options);
  return outcome;
}

inline BlockProblem golden_problem(const golden::GoldenFile& file, DType dtype, AttentionCore core) {
  return {.config = golden::make_model_config(file),
          .dtype = dtype,
          .seq = file.seq(),
          .batch = file.batch(),
          .first_position = file.position_offset(),
          .core = core};
}

inline BlockData golden_data(const golden::GoldenFile& file, const BlockProblem& problem) {
  BlockData data;
  data.weights.for_each_slot([&](std::string_view name, Tensor& tensor) {
    const std::string key(name);
    if (!file.has(key)) return;
    tensor = tensor_of(file.values(key), problem.dtype, file.tensors.at(key).shape);
  });
  const Shape rows{problem.seq * problem.batch, problem.config.hidden_size};
  data.x = tensor_of(file.values("x"), problem.dtype, rows);
  data.dy = tensor_of(file.values("dy"), problem.dtype, rows);
  return data;
}

/// [h, rows] as [rows, h].
inline std::vector<double> transposed(const std::vector<double>& values, std::int64_t h) {
  std::vector<double> result(values.size());
  const std::size_t heads = static_cast<std::size_t>(h), rows = values.size() / heads;
  for (std::size_t i = 0; i < heads; ++i) {
    for (std::size_t row = 0; row < rows; ++row) result[row * heads + i] = values[i * rows + row];
  }
  return result;
}

/// float64: sums of a hundred terms and an exp of logits around 10 cost some hundred ε; an angle costs position · ε,
/// which the logits amplify (mla_reference_test.cpp). float32: angles are float64, so only the sums and the exp
/// remain. bfloat16: weights, inputs and every tensor between stages round to 8 bits, half an ε each, about ten deep;
/// logits of 10 turn that into tens of ε of a probability.
inline double bound_of(DType dtype, const golden::GoldenFile& file) {
  const auto last_position = static_cast<double>(file.position_offset() + file.seq());
  if (dtype == DType::f64) return epsilon_of(dtype) * (512 + 4 * last_position);
  return dtype == DType::f32 ? 64 * epsilon_of(dtype) : 16 * epsilon_of(dtype);
}

/// Every optional part, dimensions that differ from each other, in float64.
struct DifferenceCase {
  BlockProblem problem;
  BlockData data;
};

/// Fourth-order central differences of Σ y·dy along `direction` of one tensor.
inline double difference_quotient(const DifferenceCase& c, const Tensor& tensor, const std::vector<double>& direction,
                                  const std::string& layout, int num_ranks) {
  const std::vector<double> saved = values_of(tensor), dy = values_of(c.data.dy);
  const auto loss_at = [&](double step) {
    std::vector<double> moved = saved;
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += step * direction[i];
    set_values(tensor, moved);
    const std::vector<double> y = values_of(run_layout(c.problem, c.data, layout, num_ranks).run.y);
    double loss = 0;
    for (std::size_t i = 0; i < y.size(); ++i) loss += y[i] * dy[i];
    return loss;
  };
  constexpr double kStep = 1e-3;
  const double quotient =
      (8 * (loss_at(kStep) - loss_at(-kStep)) - (loss_at(2 * kStep) - loss_at(-2 * kStep))) / (12 * kStep);
  set_values(tensor, saved);
  return quotient;
}

/// Every gradient along one random direction against a difference quotient.
inline void expect_derivatives(const DifferenceCase& c, const std::string& layout, int num_ranks) {
  const BlockRun run = run_layout(c.problem, c.data, layout, num_ranks).run;
  std::map<std::string, Tensor> gradients{{"x", run.dx}};
  run.gradients.for_each([&](std::string_view name, const Tensor& g) { gradients[std::string(name)] = g; });
  std::uint64_t seed = 20;
  const auto expect_derivative = [&](const std::string& name, const Tensor& tensor) {
    ASSERT_TRUE(gradients.contains(name)) << name;
    const std::vector<double> gradient = values_of(gradients.at(name));
    const auto direction = noise_values(++seed, tensor.numel(), 1 / std::sqrt(static_cast<double>(tensor.numel())));
    double expected = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) expected += gradient[i] * direction[i];
    // Truncation step⁴ = 1e-12 times a fifth derivative; cancellation ε/step = 1e-13 of a loss of some hundreds.
    EXPECT_NEAR(difference_quotient(c, tensor, direction, layout, num_ranks), expected,
                1e-8 * (1 + max_magnitude(gradient)))
        << name;
  };
  expect_derivative("x", c.data.x);
  c.data.weights.for_each(
      [&](std::string_view name, const Tensor& tensor) { expect_derivative(std::string(name), tensor); });
}

}  // namespace isomer::testing
