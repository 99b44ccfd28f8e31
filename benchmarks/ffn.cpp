// Where the time of a layer's second half and of the head goes: every operation of forward and backward with its share
// of the machine's multiply-add peak, on one rank. With one thread all times are its processor time, with more they
// are wall time. Results are checked against the float64 reference first.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "fma_peak.h"
#include "kernels/elementwise.h"
#include "layers/ffn.h"
#include "layers/head.h"
#include "layers/reference/ffn.h"
#include "model/random.h"
#include "study/machine.h"

namespace {

using namespace isomer;

struct Arguments {
  std::string model = "tiny-mla", part = "moe";
  std::int64_t tokens = 4096;
  int threads = 1, steps = 6;
  DType dtype = DType::f32;
  bool zipf = false;
};

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i], value = argv[i + 1];
    if (option == "--model") a.model = value;
    if (option == "--part") a.part = value;  // dense, moe or head
    if (option == "--tokens") a.tokens = std::stoll(value);
    if (option == "--threads") a.threads = std::stoi(value);
    if (option == "--steps") a.steps = std::stoi(value);
    if (option == "--dtype") a.dtype = value == "bf16" ? DType::bf16 : DType::f32;
    if (option == "--routing") a.zipf = value == "zipf";
  }
  return a;
}

Tensor seeded(std::string_view name, Shape shape, DType dtype, double stddev) {
  Tensor tensor = Tensor::unrecorded(name, dtype, std::move(shape));
  fill_seeded(1, name, {.mean = 0, .stddev = stddev}, tensor);
  return tensor;
}

/// One layer of the model: a dense one or one of experts.
struct Layer {
  ModelConfig config;
  LayerWeights weights;
};

Layer make_layer(ModelConfig config, bool moe, DType dtype) {
  config.num_hidden_layers = 1;
  config.moe.first_k_dense_replace = moe ? 0 : 1;
  ModelWeights model = initial_model_weights(config, 1, dtype, 0.06);
  return {config, model.layers.at(0)};
}

double largest_error(const Tensor& actual, const std::vector<double>& expected) {
  double error = 0, largest = 0;
  visit_dtype(actual.dtype(), [&]<class T>() {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      error = std::max(error, std::abs(static_cast<double>(actual.data<T>()[i]) - expected[i]));
      largest = std::max(largest, std::abs(expected[i]));
    }
  });
  return error / largest;
}

std::vector<double> widened(const Tensor& t) {
  std::vector<double> values(static_cast<std::size_t>(t.numel()));
  visit_dtype(t.dtype(), [&]<class T>() {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(t.data<T>()[i]);
  });
  return values;
}

struct Step {
  Tensor y, dx;
  Routing routing;
};

/// A step with its gradients kept, as a trainer keeps them.
Step run_layer(RankContext& ctx, const Layer& layer, const Tensor& x, const Tensor& dy, const RoutingSource& source,
               FfnGradients& gradients) {
  FfnSaved saved;
  Step step;
  {
    PhaseScope phase(ctx, Phase::forward);
    step.y = ffn_forward(ctx, {layer.config, layer.weights}, x, source, saved);
  }
  PhaseScope phase(ctx, Phase::backward);
  step.routing = saved.routing;
  step.dx = ffn_backward(ctx, {layer.config, layer.weights}, std::move(saved), dy, gradients);
  return step;
}

void check(const Layer& layer, DType dtype) {
  const Tensor x = seeded("x", {40, layer.config.hidden_size}, dtype, 1);
  const Tensor dy = seeded("dy", {40, layer.config.hidden_size}, dtype, 1);
  RankContext ctx({});
  FfnGradients gradients;
  const Step step = run_layer(ctx, layer, x, dy, {}, gradients);
  const auto expected =
      ffn_reference(layer.config, widened_ffn_weights(layer.weights), widened(x), widened(dy), step.routing.experts);
  const double bound = dtype == DType::bf16 ? 0.05 : 1e-5;
  if (largest_error(step.y, expected.y) > bound || largest_error(step.dx, expected.dx) > bound) {
    throw Error("the layer disagrees with the reference");
  }
}

void print_operations(const OpRecord& record, int steps, double peak) {
  struct Line {
    std::string name;
    double seconds, flops;
  };
  std::vector<Line> lines;
  for (const auto& [key, summary] : record.summaries()) {
    lines.push_back({key.name, summary.cpu_s / steps, summary.cost.flops / steps});
  }
  std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) { return a.seconds > b.seconds; });
  fmt::print("{:<40} {:>10} {:>10} {:>8}\n", "operation", "ms", "GFLOP/s", "of peak");
  for (const Line& line : lines) {
    const double rate = line.flops / line.seconds;
    fmt::print("{:<40} {:>10.3f} {:>10.1f} {:>7.1f}%\n", line.name, line.seconds * 1e3, rate / 1e9, 100 * rate / peak);
  }
}

/// Runs `step` once to warm up, then a.steps times, and prints.
template <class Body>
void measure(const Arguments& a, const std::string& title, RankContext& ctx, Body&& step) {
  step(-1);
  ctx.ops().clear();
  const auto now = a.threads == 1 ? thread_cpu_s : wall_clock_s;
  const double begin = now();
  for (int i = 0; i < a.steps; ++i) step(i);
  const double seconds = (now() - begin) / a.steps;
  const double peak = 1e9 * fma_peak_gflops(a.dtype) * a.threads;
  const double flops = (ctx.ops().flops(Phase::forward) + ctx.ops().flops(Phase::backward)) / a.steps;
  fmt::print("{}, {} tokens, {}, {} threads; {}\n", title, a.tokens, name_of(a.dtype), a.threads, processor_name());
  print_operations(ctx.ops(), a.steps, peak);
  fmt::print("{:.2f} ms a step, {:.1f} GFLOP/s, {:.1f} % of the peak ({:.1f}); kernels {:.1f} %\n", seconds * 1e3,
             flops / seconds / 1e9, 100 * flops / seconds / peak, peak / 1e9,
             100 * ctx.ops().cpu_s() / a.steps / seconds);
}

void run_ffn(const Arguments& a) {
  const Layer layer = make_layer(load_model_config(a.model), a.part == "moe", a.dtype);
  if (layer.config.hidden_size <= 512) check(layer, a.dtype);
  const Shape rows{a.tokens, layer.config.hidden_size};
  const Tensor dy = seeded("dy", rows, a.dtype, 1);
  std::vector<Tensor> inputs;  // other tokens every step, hence other routings
  for (int i = 0; i <= a.steps; ++i) inputs.push_back(seeded(fmt::format("x{}", i), rows, a.dtype, 1));
  RankContext ctx({.num_threads = a.threads});
  FfnGradients gradients;
  measure(a, fmt::format("{} {}", a.model, a.part), ctx, [&](int i) {
    const RoutingSource source{.kind = a.zipf ? RoutingSource::Kind::zipf : RoutingSource::Kind::computed,
                               .seed = static_cast<std::uint64_t>(i + 1)};
    run_layer(ctx, layer, inputs[static_cast<std::size_t>(i + 1)], dy, source, gradients);
  });
}

void run_head(const Arguments& a) {
  const ModelConfig config = load_model_config(a.model);
  const std::int64_t hidden = config.hidden_size;
  const Tensor x = seeded("x", {a.tokens, hidden}, a.dtype, 1), norm = seeded("norm", {hidden}, a.dtype, 1);
  const Tensor lm_head = seeded("lm_head", {config.vocab_size, hidden}, a.dtype, 0.1);
  std::vector<std::int32_t> targets;
  for (std::int64_t t = 0; t < a.tokens; ++t)
    targets.push_back(static_cast<std::int32_t>(t * 7919 % config.vocab_size));
  RankContext ctx({.num_threads = a.threads});
  const DType wide = statistic_dtype(a.dtype);
  const HeadGradients gradients{.dx = ctx.empty("dx", MemoryClass::workspace, a.dtype, x.shape()),
                                .dnorm = ctx.empty("dnorm", MemoryClass::gradient, wide, norm.shape()),
                                .dlm_head = ctx.zeros("dlm_head", MemoryClass::gradient, wide, lm_head.shape())};
  PhaseScope phase(ctx, Phase::forward);
  measure(a, fmt::format("{} head", a.model), ctx, [&](int) {
    head_loss_and_gradients(ctx, {config, norm, lm_head}, x, targets, 1.0 / static_cast<double>(a.tokens), gradients);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments a = parse(argc, argv);
  a.part == "head" ? run_head(a) : run_ffn(a);
  return 0;
}
