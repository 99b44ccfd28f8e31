#include "study/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "cost/scheme_bytes.h"
#include "layers/reference/attention_block.h"
#include "parallel/sequence/scheme.h"
#include "sharding/sequence_layout.h"
#include "study/machine.h"

namespace isomer {

namespace {

std::vector<double> widened(const Tensor& tensor) {
  std::vector<double> wide(static_cast<std::size_t>(tensor.numel()));
  visit_dtype(tensor.dtype(), [&]<class T>() {
    const T* values = tensor.data<T>();
    std::transform(values, values + wide.size(), wide.begin(), [](T value) { return static_cast<double>(value); });
  });
  return wide;
}

/// The float64 reference on the same rounded weights and inputs.
AttentionReferenceResult reference(const BlockProblem& problem, const BlockData& data) {
  std::map<std::string, std::vector<double>> weights;
  data.weights.for_each(
      [&](std::string_view name, const Tensor& tensor) { weights[std::string(name)] = widened(tensor); });
  const int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const std::vector<double> x = widened(data.x), dy = widened(data.dy);
  return attention_block_reference(problem.config,
                                   {.weights = weights,
                                    .seq = problem.seq,
                                    .batch = problem.batch,
                                    .first_position = problem.first_position,
                                    .x = x,
                                    .dy = dy},
                                   threads);
}

/// Largest difference; infinite where a value is not finite.
TensorError error_of(const std::string& name, const Tensor& value, const std::vector<double>& expected) {
  ISOMER_CHECK(static_cast<std::size_t>(value.numel()) == expected.size(), "'{}': {} values, reference has {}", name,
               value.numel(), expected.size());
  TensorError error{.tensor = name};
  visit_dtype(value.dtype(), [&]<class T>() {
    const T* values = value.data<T>();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double difference = std::abs(static_cast<double>(values[i]) - expected[i]);
      error.max_abs = difference <= error.max_abs ? error.max_abs : difference;  // NaN goes through
      if (std::isnan(difference)) error.max_abs = std::numeric_limits<double>::infinity();
      error.max_reference = std::max(error.max_reference, std::abs(expected[i]));
    }
  });
  return error;
}

/// Copies of the reference's values as float64 tensors.
std::map<std::string, Tensor> tensors_of(const AttentionReferenceResult& result, const BlockData& data) {
  std::map<std::string, Tensor> tensors;
  const auto add = [&](const std::string& name, const std::vector<double>& values, const Tensor& like) {
    const Tensor tensor = Tensor::unrecorded(name, DType::f64, like.shape());
    ISOMER_CHECK(static_cast<std::size_t>(tensor.numel()) == values.size(), "'{}': {} values for {}", name,
                 values.size(), to_string(like.shape()));
    std::copy(values.begin(), values.end(), tensor.data<double>());
    tensors[name] = tensor;
  };
  add("y", result.y, data.x);
  add("dx", result.dx, data.x);
  data.weights.for_each([&](std::string_view name, const Tensor& weight) {
    add(fmt::format("grad.{}", name), result.gradients.at(std::string(name)), weight);
  });
  return tensors;
}

std::map<std::string, Tensor> tensors_of(const BlockRun& run) {
  std::map<std::string, Tensor> tensors{{"y", run.y}, {"dx", run.dx}};
  run.gradients.for_each([&](std::string_view name, const Tensor& t) { tensors[fmt::format("grad.{}", name)] = t; });
  return tensors;
}

std::vector<TensorError> errors_of(const BlockRun& run, const AttentionReferenceResult& expected) {
  std::vector<TensorError> errors;
  errors.push_back(error_of("y", run.y, expected.y));
  errors.push_back(error_of("dx", run.dx, expected.dx));
  run.gradients.for_each([&](std::string_view name, const Tensor& gradient) {
    errors.push_back(error_of(std::string(name), gradient, expected.gradients.at(std::string(name))));
  });
  return errors;
}

/// Errors of one-rank explicit with the same core, the yardstick of every bound.
std::vector<TensorError> yardstick(const CompareOptions& options, const BlockData& data, AttentionCore core,
                                   const AttentionReferenceResult& expected) {
  BlockRunOptions run_options;
  run_options.group.num_ranks = 1;
  run_options.group.timeout_s = options.group.timeout_s;
  run_options.repetitions = 1;
  Layout layout = parse_layout("explicit");
  layout.axes[0].options["attention"] = name_of(core);
  return errors_of(run_block(options.problem, data, layout, run_options), expected);
}

void set_bounds(std::vector<TensorError>& errors, const std::vector<TensorError>& base, DType dtype) {
  for (TensorError& error : errors) {
    const auto match = std::find_if(base.begin(), base.end(), [&](const auto& b) { return b.tensor == error.tensor; });
    ISOMER_CHECK(match != base.end(), "no yardstick for '{}'", error.tensor);
    error.bound = 3 * match->max_abs + 8 * epsilon_of(dtype) * error.max_reference;
  }
}

void check_accounts(const BlockProblem& problem, const Layout& layout, SchemeReport& report) {
  const int num_ranks = static_cast<int>(report.predicted.ranks.size());
  const Layout sized = sized_layout(layout, num_ranks);
  report.bytes_agree = report.peak_agrees = report.run.ranks.size() == report.predicted.ranks.size();
  for (const RankMeasure& rank : report.run.ranks) {
    const SchemeBytes closed =
        scheme_bytes_sent({sized, problem.config, problem.seq, problem.batch, problem.dtype}, rank.rank);
    const RankMeasure& dry = report.predicted.ranks.at(static_cast<std::size_t>(rank.rank));
    report.bytes_sent = std::max(report.bytes_sent, rank.bytes_forward + rank.bytes_backward);
    report.bytes_predicted = std::max(report.bytes_predicted, closed.total());
    report.bytes_agree = report.bytes_agree && rank.bytes_forward == closed.forward &&
                         rank.bytes_backward == closed.backward && dry.bytes_forward == closed.forward &&
                         dry.bytes_backward == closed.backward;
    report.peak_agrees = report.peak_agrees && rank.peak_activation_bytes == dry.peak_activation_bytes;
  }
}

BlockRunOptions run_options_of(const CompareOptions& options, const Layout& layout) {
  BlockRunOptions run_options;
  run_options.group = options.group;
  if (options.dump) {
    run_options.dump = [&options, name = to_string(layout)](int rank, const std::string& tensor, const Tensor& value) {
      options.dump(rank, fmt::format("{}/{}", name, tensor), value);
    };
  }
  return run_options;
}

BlockRun dry_run_of(const CompareOptions& options, const BlockData& data, const Layout& layout) {
  BlockRunOptions dry;
  dry.group = options.group;
  dry.group.threads_per_rank = threads_per_rank(options.group);
  dry.group.backend = Backend::threads;
  dry.group.dry_run = true;
  return run_block(options.problem, data, layout, dry);
}

}  // namespace

const TensorError* SchemeReport::output_error() const { return errors.empty() ? nullptr : &errors.front(); }

double SchemeReport::max_gradient_relative_error() const {
  double largest = 0;
  for (const TensorError& error : errors) {
    if (error.tensor != "y") largest = std::max(largest, error.relative());
  }
  return largest;
}

bool SchemeReport::within_bound() const {
  return std::all_of(errors.begin(), errors.end(), [](const TensorError& e) { return e.within_bound(); });
}

bool CompareReport::good() const {
  return std::all_of(schemes.begin(), schemes.end(), [](const SchemeReport& s) { return s.good() || !s.exact; });
}

CompareReport compare_schemes(const CompareOptions& options, const BlockData& data,
                              const std::function<void(const std::string&)>& progress) {
  CompareReport report{.options = options};
  const bool dry = options.group.dry_run;
  const bool at_root = options.group.backend == Backend::threads || mpi_world().rank == 0;
  AttentionReferenceResult expected;
  if (!dry && at_root) {
    progress("one rank in float64");
    const double begin = wall_clock_s();
    expected = reference(options.problem, data);
    report.reference_seconds = wall_clock_s() - begin;
    if (options.results) options.results("reference", tensors_of(expected, data));
  }
  std::map<AttentionCore, std::vector<TensorError>> yardsticks;
  for (const Layout& layout : options.layouts) {
    const std::string reason = why_unfit(layout, options.problem.config, options.group.num_ranks, options.problem.seq,
                                         core_of(options.problem, layout));
    if (!reason.empty()) {
      report.omitted.push_back({to_string(layout), reason});
      continue;
    }
    SchemeReport scheme{.name = layout.innermost().name, .layout = to_string(layout), .dry = dry};
    scheme.core = core_of(options.problem, layout);
    scheme.predicted = dry_run_of(options, data, layout);
    if (dry) {
      scheme.run = scheme.predicted;
    } else {
      if (at_root && !yardsticks.contains(scheme.core)) {
        progress(fmt::format("one rank explicit, {}", name_of(scheme.core)));
        yardsticks[scheme.core] = yardstick(options, data, scheme.core, expected);
      }
      progress(fmt::format("{} on {} ranks", scheme.layout, options.group.num_ranks));
      scheme.run = run_block(options.problem, data, layout, run_options_of(options, layout));
    }
    if (at_root) {
      check_accounts(options.problem, layout, scheme);
      if (!dry) {
        scheme.errors = errors_of(scheme.run, expected);
        set_bounds(scheme.errors, yardsticks.at(scheme.core), options.problem.dtype);
        if (options.results) options.results(scheme.layout, tensors_of(scheme.run));
        scheme.run.y = scheme.run.dx = Tensor();
        scheme.run.gradients = {};
      }
    }
    report.schemes.push_back(std::move(scheme));
  }
  return report;
}

namespace {

nlohmann::json standing_json(const std::vector<StandingTensor>& standing) {
  auto list = nlohmann::json::array();
  for (const StandingTensor& t : standing) {
    list.push_back({{"name", t.name}, {"class", name_of(t.memory_class)}, {"bytes", t.bytes}});
  }
  return list;
}

nlohmann::json rank_json(const RankMeasure& m, bool dry) {
  const auto measured = [dry](double value) { return dry ? nlohmann::json() : nlohmann::json(value); };
  return {{"rank", m.rank},
          {"bytes_sent",
           {{"forward", m.bytes_forward}, {"backward", m.bytes_backward}, {"gradient_sync", m.bytes_gradient_sync}}},
          {"bytes_received", {{"forward", m.bytes_received_forward}, {"backward", m.bytes_received_backward}}},
          {"bytes_sent_by_collective", m.bytes_by_tensor},
          {"bytes_received_by_collective", m.bytes_received_by_tensor},
          {"messages", m.messages},
          {"peak_activation_bytes", m.peak_activation_bytes},
          {"saved_bytes", m.saved_bytes},
          {"untracked_bytes", dry ? nlohmann::json() : nlohmann::json(m.untracked_bytes)},
          {"standing_at_peak", standing_json(m.standing_at_peak)},
          {"flops", {{"forward", m.flops_forward}, {"backward", m.flops_backward}}},
          {"seconds", measured(m.seconds)},
          {"seconds_forward", measured(m.seconds_forward)},
          {"seconds_waiting", measured(m.seconds_waiting)},
          {"seconds_kernels", measured(m.seconds_kernels)},
          {"seconds_other", measured(m.seconds_other())}};
}

nlohmann::json scheme_json(const SchemeReport& s) {
  const auto measured = [&](auto value) { return s.dry ? nlohmann::json() : nlohmann::json(value); };
  auto errors = nlohmann::json::array();
  for (const TensorError& e : s.errors) {
    errors.push_back({{"tensor", e.tensor},
                      {"max_abs_error", e.max_abs},
                      {"max_abs_reference", e.max_reference},
                      {"bound", e.bound},
                      {"within_bound", e.within_bound()}});
  }
  auto ranks = nlohmann::json::array();
  for (const RankMeasure& m : s.run.ranks) ranks.push_back(rank_json(m, s.dry));
  std::int64_t gradient_sync = 0;
  for (const RankMeasure& m : s.run.ranks) gradient_sync = std::max(gradient_sync, m.bytes_gradient_sync);
  const RankMeasure& peak = s.predicted.largest(&RankMeasure::peak_activation_bytes);
  return {{"name", s.name},
          {"layout", s.layout},
          {"attention", name_of(s.core)},
          {"bytes_sent_per_rank", s.bytes_sent},
          {"bytes_predicted_per_rank", s.bytes_predicted},
          {"gradient_sync_bytes_sent_per_rank", gradient_sync},
          {"peak_activation_bytes", measured(s.run.largest(&RankMeasure::peak_activation_bytes).peak_activation_bytes)},
          {"peak_activation_predicted_bytes", peak.peak_activation_bytes},
          {"standing_at_peak", standing_json(peak.standing_at_peak)},
          {"seconds", measured(s.run.seconds())},
          {"clock", s.dry ? nlohmann::json() : nlohmann::json(s.run.virtual_clock ? "virtual" : "wall")},
          {"max_abs_error", measured(s.errors.empty() ? 0.0 : s.errors.front().max_abs)},
          {"max_grad_rel_error", measured(s.max_gradient_relative_error())},
          {"exact", s.exact},
          {"within_bound", measured(s.within_bound())},
          {"bytes_agree", s.bytes_agree},
          {"peak_agrees", measured(s.peak_agrees)},
          {"errors", errors},
          {"ranks", ranks}};
}

}  // namespace

nlohmann::json to_json(const CompareReport& report) {
  const auto& o = report.options;
  auto schemes = nlohmann::json::array();
  for (const SchemeReport& s : report.schemes) schemes.push_back(scheme_json(s));
  auto omitted = nlohmann::json::array();
  for (const auto& entry : report.omitted) omitted.push_back({{"layout", entry.layout}, {"reason", entry.reason}});
  nlohmann::json json = machine_json(threads_per_rank(o.group), o.seed);
  json.update(
      {{"command", "compare"},
       {"model", o.problem.config.name},
       {"weights", o.weights_source},
       {"text", o.text_source},
       {"ranks", o.group.num_ranks},
       {"seq", o.problem.seq},
       {"batch", o.problem.batch},
       {"dtype", name_of(o.problem.dtype)},
       {"attention", name_of(o.problem.core)},
       {"memory", name_of(o.group.memory_policy)},
       {"backend", name_of(o.group.backend)},
       {"dry_run", o.group.dry_run},
       {"link", o.group.link.emulated ? nlohmann::json{{"latency_s", o.group.link.latency_s},
                                                       {"bandwidth_bytes_per_s", o.group.link.bandwidth_bytes_per_s}}
                                      : nlohmann::json()},
       {"schemes", schemes},
       {"omitted", omitted},
       {"good", report.good()}});
  return json;
}

}  // namespace isomer
