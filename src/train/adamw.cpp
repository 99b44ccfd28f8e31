#include "train/adamw.h"

#include <cmath>
#include <numbers>

#include "cost/op_cost.h"
#include "kernels/dispatch.h"

namespace isomer {

namespace {

constexpr std::int64_t kBlock = 16384;  // elements a task; sums are split at its multiples only

std::int64_t num_blocks(std::int64_t elements) { return (elements + kBlock - 1) / kBlock; }

struct Factors {
  float clip, beta1, beta2, rate, correction1, correction2, epsilon;
};

void update(float* w, const float* g, float* m, float* v, std::int64_t count, const Factors& f, float decay) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float gradient = g[i] * f.clip;
    m[i] = f.beta1 * m[i] + (1 - f.beta1) * gradient;
    v[i] = f.beta2 * v[i] + (1 - f.beta2) * gradient * gradient;
    const float denominator = std::sqrt(v[i] * f.correction2) + f.epsilon;
    w[i] -= decay * w[i] + f.rate * (m[i] * f.correction1) / denominator;
  }
}

}  // namespace

double learning_rate(const AdamWOptions& options, std::int64_t step, std::int64_t total) {
  if (step < options.warmup_steps) {
    return options.learning_rate * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
  }
  const std::int64_t span = total - 1 - options.warmup_steps;
  if (span <= 0) return options.learning_rate;
  const double progress = std::min(1.0, static_cast<double>(step - options.warmup_steps) / static_cast<double>(span));
  return options.min_learning_rate +
         (options.learning_rate - options.min_learning_rate) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

double gradient_norm(RankContext& ctx, const Parameters& parameters) {
  const std::int64_t elements = parameters.gradient.numel();
  std::vector<double> sums(static_cast<std::size_t>(num_blocks(elements)), 0.0);
  run_kernel(ctx, "gradient norm", elementwise_cost(elements, 2, 1, 0, DType::f32), [&] {
    const float* g = parameters.gradient.data<float>();
    ctx.threads().parallel_for(num_blocks(elements), [&](std::int64_t block, int) {
      double lanes[8] = {};
      const std::int64_t end = std::min(elements, (block + 1) * kBlock);
      for (std::int64_t i = block * kBlock; i < end; ++i) {
        lanes[i % 8] += static_cast<double>(g[i]) * static_cast<double>(g[i]);
      }
      for (const double lane : lanes) sums[static_cast<std::size_t>(block)] += lane;
    });
  });
  double sum = 0;
  for (const double block : sums) sum += block;
  return std::sqrt(sum);
}

void adamw_step(RankContext& ctx, Parameters& parameters, const AdamWOptions& options, std::int64_t step, double rate,
                double norm) {
  const double t = static_cast<double>(step + 1);
  const Factors factors{
      .clip = static_cast<float>(options.clip_norm > 0 && norm > options.clip_norm ? options.clip_norm / norm : 1),
      .beta1 = static_cast<float>(options.beta1),
      .beta2 = static_cast<float>(options.beta2),
      .rate = static_cast<float>(rate),
      .correction1 = static_cast<float>(1 / (1 - std::pow(options.beta1, t))),
      .correction2 = static_cast<float>(1 / (1 - std::pow(options.beta2, t))),
      .epsilon = static_cast<float>(options.epsilon)};
  struct Task {
    std::int64_t begin, count;
    bool decays;
  };
  std::vector<Task> tasks;
  for (const Parameter& parameter : parameters.list()) {
    for (std::int64_t begin = 0; begin < parameter.count; begin += kBlock) {
      tasks.push_back({parameter.offset + begin, std::min(kBlock, parameter.count - begin), parameter.decays});
    }
  }
  const float decay = static_cast<float>(rate * options.weight_decay);
  run_kernel(ctx, "adamw", elementwise_cost(parameters.num_trained(), 14, 4, 3, DType::f32), [&] {
    float* w = parameters.master.data<float>();
    const float* g = parameters.gradient.data<float>();
    float* m = parameters.first_moment.data<float>();
    float* v = parameters.second_moment.data<float>();
    ctx.threads().parallel_for(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t index, int) {
      const Task& task = tasks[static_cast<std::size_t>(index)];
      const std::int64_t at = task.begin;
      update(w + at, g + at, m + at, v + at, task.count, factors, task.decays ? decay : 0.0F);
    });
  });
}

}  // namespace isomer
