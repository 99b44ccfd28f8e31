// rope_theta and the three ways in which config.json writes its scaling: rope_scaling with "type" (DeepSeek),
// with "rope_type" (Llama 3.1), and rope_parameters (newer files, theta inside).
#include "model/config.h"
#include "model/config_reader.h"

namespace isomer {

namespace {

constexpr double kMaxTheta = 1e12;
constexpr double kMaxFactor = 1e6;
constexpr std::int64_t kMaxPositions = std::int64_t{1} << 32;

RopeScalingKind scaling_kind(const ConfigReader& scaling) {
  const char* key = scaling.has("rope_type") ? "rope_type" : "type";
  const std::string name = scaling.text(key);
  if (name == "default" || name == "none") return RopeScalingKind::none;
  if (name == "linear") return RopeScalingKind::linear;
  if (name == "yarn" || name == "deepseek_yarn") return RopeScalingKind::yarn;
  if (name == "llama3") return RopeScalingKind::llama3;
  if (name == "longrope" || name == "su") return RopeScalingKind::longrope;
  scaling.wrong(key, "default, linear, yarn, llama3 or longrope");
}

/// Beside the scaling, or at the top of the file (Phi-3's habit).
std::int64_t original_positions(const ConfigReader& top, const ConfigReader& scaling) {
  constexpr auto kKey = "original_max_position_embeddings";
  return !scaling.has(kKey) && top.has(kKey) ? top.integer(kKey, 1, kMaxPositions)
                                             : scaling.integer(kKey, 1, kMaxPositions);
}

void read_yarn(const ConfigReader& top, const ConfigReader& scaling, RopeConfig& rope) {
  rope.factor = scaling.number("factor", 1, kMaxFactor);
  rope.original_max_position_embeddings = original_positions(top, scaling);
  rope.beta_fast = scaling.number_or("beta_fast", 1e-3, 1e6, 32);
  rope.beta_slow = scaling.number_or("beta_slow", 1e-3, 1e6, 1);
  if (rope.beta_slow > rope.beta_fast) scaling.wrong("beta_slow", fmt::format("at most beta_fast, {}", rope.beta_fast));
  rope.mscale = scaling.number_or("mscale", 0, 100, 1);
  rope.mscale_all_dim = scaling.number_or("mscale_all_dim", 0, 100, 0);
}

void read_llama3(const ConfigReader& top, const ConfigReader& scaling, RopeConfig& rope) {
  rope.factor = scaling.number("factor", 1, kMaxFactor);
  rope.original_max_position_embeddings = original_positions(top, scaling);
  rope.low_freq_factor = scaling.number("low_freq_factor", 1e-6, 1e6);
  rope.high_freq_factor = scaling.number("high_freq_factor", 1e-6, 1e6);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    scaling.wrong("high_freq_factor", fmt::format("more than low_freq_factor, {}", rope.low_freq_factor));
  }
}

void read_longrope(const ConfigReader& top, const ConfigReader& scaling, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  const auto rope_dim = config.attention == AttentionKind::mla ? config.qk_rope_head_dim : config.head_dim;
  const auto num_pairs = static_cast<std::size_t>(rope_dim / 2);
  rope.original_max_position_embeddings = original_positions(top, scaling);
  rope.short_factor = scaling.numbers("short_factor", num_pairs, 1e-6, kMaxFactor);
  rope.long_factor = scaling.numbers("long_factor", num_pairs, 1e-6, kMaxFactor);
  const double stretch =
      static_cast<double>(config.max_position_embeddings) / static_cast<double>(rope.original_max_position_embeddings);
  rope.factor = scaling.number_or("factor", 1e-6, kMaxFactor, stretch);
}

void read_scaling(const ConfigReader& top, const ConfigReader& scaling, ModelConfig& config) {
  // An attention_factor of its own would replace the magnitude that the scaling derives; no supported model has one.
  for (const char* key : {"attention_factor", "long_mscale", "short_mscale"})
    if (scaling.has(key)) scaling.wrong(key, "no such key: it is not supported");
  config.rope.scaling = scaling_kind(scaling);
  switch (config.rope.scaling) {
    case RopeScalingKind::none: break;
    case RopeScalingKind::linear: config.rope.factor = scaling.number("factor", 1, kMaxFactor); break;
    case RopeScalingKind::yarn: read_yarn(top, scaling, config.rope); break;
    case RopeScalingKind::llama3: read_llama3(top, scaling, config.rope); break;
    case RopeScalingKind::longrope: read_longrope(top, scaling, config); break;
  }
}

}  // namespace

void read_rope(const ConfigReader& reader, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  rope.theta = reader.number_or("rope_theta", 1.0001, kMaxTheta, 10000);
  rope.interleave = reader.boolean_or("rope_interleave", rope.interleave);
  rope.rotate = !reader.boolean_or("mla_use_nope", false);
  if (reader.number_or("partial_rotary_factor", 0, 1, 1) != 1) reader.wrong("partial_rotary_factor", "1 or absent");
  const bool has_parameters = reader.has("rope_parameters");
  if (!has_parameters && !reader.has("rope_scaling")) return;
  if (has_parameters && reader.has("rope_scaling") && reader.value("rope_parameters") != reader.value("rope_scaling")) {
    reader.wrong("rope_scaling", "absent, or the same as rope_parameters");
  }
  const char* key = has_parameters ? "rope_parameters" : "rope_scaling";
  const ConfigReader scaling(reader.value(key), fmt::format("{}: {}", reader.where(), key));
  rope.theta = scaling.number_or("rope_theta", 1.0001, kMaxTheta, rope.theta);
  read_scaling(reader, scaling, config);
}

}  // namespace isomer
