#include "study/tpla_recording.h"

#include <cmath>

#include "core/error.h"
#include "study/recordings.h"

namespace isomer {

namespace {

using nlohmann::json;

json options_of(const TplaChoice& c) {
  json options = {{"transform", c.transform},
                  {"shards", c.shards},
                  {"shared_columns", c.shared_columns},
                  {"rms", c.rms},
                  {"kappa", c.kappa},
                  {"text", c.text},
                  {"tokens", c.tokens},
                  {"seed", c.seed}};
  if (c.align > 0) options["align"] = c.align;
  return options;
}

}  // namespace

TplaRecording::TplaRecording(const std::string& name) : name_(name) {
  const std::string_view text = embedded_recording(name);
  if (text.empty()) return;
  try {
    recorded_ = json::parse(text);
  } catch (const json::exception& error) {
    throw Error(fmt::format("the recording '{}' that this build carries: {}", name, error.what()));
  }
}

const json* TplaRecording::find(const TplaChoice& choice) const {
  const json options = options_of(choice);
  for (const json& run : recorded_.at("runs")) {
    if (run.at("options") == options) return &run;
  }
  return nullptr;
}

const json& TplaRecording::run(const TplaChoice& choice) const {
  if (const json* found = find(choice)) return *found;
  throw Error(fmt::format("the recording '{}' has no conversion {}: make it with tools/tpla_study.py", name_,
                          options_of(choice).dump()));
}

const json* TplaRecording::find(const TplaChoice& choice, const std::string& layout, const std::string& mode) const {
  for (const json& evaluation : run(choice).at("evaluations")) {
    if (evaluation.at("asked") == layout && evaluation.at("mode") == mode) return &evaluation;
  }
  return nullptr;
}

bool TplaRecording::has(const TplaChoice& choice, const std::string& layout, const std::string& mode) const {
  return has(choice) && find(choice, layout, mode) != nullptr;
}

const json& TplaRecording::evaluation(const TplaChoice& choice, const std::string& layout,
                                      const std::string& mode) const {
  if (const json* found = find(choice, layout, mode)) return *found;
  throw Error(fmt::format("the recording '{}' has no {} in mode {} of {}: make it with tools/tpla_study.py", name_,
                          layout, mode, options_of(choice).dump()));
}

std::string TplaRecording::origin() const {
  return fmt::format("recorded by `{}` on {}, {} cores", recorded_.value("command", "?"),
                     recorded_.value("processor", "?"), recorded_.value("cores", 0));
}

MeasuredKl kl_of(const json& evaluation) {
  const json& error = evaluation.at("mean_kl_error");
  return {evaluation.at("mean_kl").get<double>(), error.is_number() ? 2 * error.get<double>() : 0};
}

MeasuredKl nats_over_base(const json& evaluation) {
  const json& error = evaluation.at("nats_difference_error");
  return {evaluation.at("nats_per_token").get<double>() - evaluation.at("nats_per_token_base").get<double>(),
          error.is_number() ? 2 * error.get<double>() : 0};
}

Cell kl_cell(const MeasuredKl& kl) { return Cell(kl.mean, 5); }

bool clearly_less(const MeasuredKl& a, const MeasuredKl& b) { return a.mean + a.margin < b.mean - b.margin; }

double perplexity_of(const json& evaluation) { return std::exp(evaluation.at("nats_per_token").get<double>()); }

}  // namespace isomer
