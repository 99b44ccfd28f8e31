#include "apps/isomer/decode_evaluation.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "apps/isomer/loaded_model.h"
#include "convert/side_file.h"
#include "core/error.h"
#include "eval/engine_source.h"
#include "eval/sharded_forward.h"
#include "parallel/decode/step_scheme.h"
#include "sharding/layout.h"

namespace isomer {

namespace {

constexpr std::string_view kWholeSoftmax = "softmax=whole";

/// The side file in `directory`; none where there is no tpla.json.
std::shared_ptr<const TplaModel> tpla_of(const std::string& directory, const ModelConfig& config) {
  TplaSideFile side = load_tpla_side_file(directory, config, Checkpoint::open(directory));
  return std::make_shared<const TplaModel>(TplaModel{side.options, std::move(side.layers)});
}

/// What the engine's layouts don't know, left out.
std::string without_softmax(Layout layout) {
  layout.axes.front().options.erase("softmax");
  return to_string(layout);
}

}  // namespace

bool is_decode_layout(const std::string& layout) {
  const std::vector<std::string>& names = step_scheme_names();
  return std::find(names.begin(), names.end(), parse_layout(layout).innermost().name) != names.end();
}

std::string decode_layout_list() { return fmt::format("{}", fmt::join(step_scheme_names(), ", ")); }

EvaluatedModel::EvaluatedModel(std::string name, const std::string& directory, const std::string& layout, DType dtype)
    : name_(std::move(name)), config_(load_model_config(directory)) {
  const Layout asked = parse_layout(layout);
  const bool is_tpla = asked.innermost().name == "tpla";
  engine_.config = config_;
  if (is_tpla && config_.attention == AttentionKind::mla) engine_.tpla = tpla_of(directory, config_);
  engine_.layout = layout_for(engine_.tpla ? without_softmax(asked) : layout, config_, engine_.tpla.get());
  one_rank_ = one_rank_form(layout, asked.option("softmax", "") == "whole", dtype);
  layout_ = to_string(engine_.layout);
  exact_ = is_exact(engine_.layout, config_, engine_.tpla.get());
  if (one_rank_ == LatentSharding::whole_softmax) {
    layout_ += fmt::format(",{}", kWholeSoftmax);
    exact_ = exact_ || engine_.tpla->options.rms == TplaRms::exact;
  }
  weights_ = load_model_weights(Checkpoint::open(directory), config_, dtype);
}

std::optional<LatentSharding> EvaluatedModel::one_rank_form(const std::string& asked, bool whole_softmax,
                                                            DType dtype) const {
  const std::string reason = why_step_unfit(engine_.layout, config_, engine_.tpla.get());
  if (reason.empty())
    return whole_softmax && engine_.tpla ? std::optional(LatentSharding::whole_softmax) : std::nullopt;
  // Every shard has all heads, so that their number is no matter of what is computed.
  ModelConfig spread = config_;
  spread.num_attention_heads *= engine_.layout.devices();
  const bool heads_alone = why_step_unfit(engine_.layout, spread, engine_.tpla.get()).empty();
  if (!engine_.tpla || !heads_alone || dtype != DType::f32) invalid_argument("--layout {}: {}", asked, reason);
  return whole_softmax ? LatentSharding::whole_softmax : LatentSharding::tpla;
}

std::string EvaluatedModel::description() const {
  std::string how = fmt::format("{:.0f} cache elements a token, layer and rank",
                                decode_cache_elements(config_, engine_.layout.shards));
  if (engine_.tpla) {
    const TplaOptions& o = engine_.tpla->options;
    how += fmt::format("; transform {}, {} shared columns, RMS {}, κ {}", name_of(o.transform), o.shared_columns,
                       name_of(o.rms), name_of(o.kappa));
  }
  if (one_rank_) how += "; one rank computes all shards in turn";
  return fmt::format("{}, {} rank{}, {}: {}", layout_, num_ranks(), num_ranks() == 1 ? "" : "s",
                     exact_ ? "exact" : "NOT EXACT", how);
}

std::unique_ptr<LogitSource> EvaluatedModel::source(RankContext& ctx, std::int64_t window) const {
  if (one_rank_) {
    return std::make_unique<ShardedForward>(
        ShardedModel{config_, weights_, engine_.tpla->options, engine_.tpla->layers, *one_rank_});
  }
  EngineOptions options = engine_;
  options.cache_tokens = window_cache_tokens(window, options.layout, options.page_tokens);
  return std::make_unique<EngineSource>(ctx, std::move(options), weights_);
}

BaseModel::BaseModel(const std::string& directory, DType dtype)
    : config_(load_model_config(directory)),
      weights_(load_model_weights(Checkpoint::open(directory), config_, dtype)) {}

std::unique_ptr<LogitSource> BaseModel::source(RankContext& ctx, std::int64_t window) const {
  return std::make_unique<PrefillSource>(ctx, config_, weights_, window);
}

std::string convention_text(const WindowOrder& windows, ScoreMode mode) {
  std::string rows;
  switch (mode) {
    case ScoreMode::prefill: rows = "every row by exact prefill: no error of decode can show"; break;
    case ScoreMode::every_position: rows = "every row as decode computes it, from the first on"; break;
    case ScoreMode::decode:
      rows = fmt::format("the first {} tokens by exact prefill, the others as decode computes them, token by token",
                         windows.overlap());
      break;
  }
  return fmt::format(
      "mode {}: {}.\nWindows of {} tokens that overlap by {}; scored is what a window's rows from {} on predict, the "
      "same in every\nmode. Tokens attend within their document.\n",
      name_of(mode), rows, windows.window(), windows.overlap(), windows.overlap());
}

}  // namespace isomer
