#include "apps/isomer/decode_evaluation.h"

#include <charconv>

#include "convert/side_file.h"
#include "core/error.h"
#include "eval/sharded_forward.h"

namespace isomer {

namespace {

/// g of "tpla:g=2" or "gla:2"; 0 where it isn't said.
int shards_of(const Layout& layout) {
  const LayoutAxis& axis = layout.innermost();
  const std::string text = layout.option("g", "");
  int g = axis.size;
  if (!text.empty()) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), g);
    if (error != std::errc() || end != text.data() + text.size() || g < 1) {
      invalid_argument("--layout {}: g={}: a whole number from 1", to_string(layout), text);
    }
  }
  for (const auto& [key, value] : axis.options) {
    if (key == "softmax" && axis.name == "tpla") continue;
    if (key != "g") invalid_argument("--layout {}: {} has no option '{}'", to_string(layout), axis.name, key);
  }
  if (layout.axes.size() > 1) {
    invalid_argument("--layout {}: an evaluation takes one axis; the split of heads over ranks changes no result",
                     to_string(layout));
  }
  return g;
}

/// tpla's softmax=whole, or the default.
LatentSharding sharding_of(const Layout& layout) {
  const std::string softmax = layout.option("softmax", "sliced");
  if (softmax == "whole") return LatentSharding::whole_softmax;
  if (softmax == "sliced") return LatentSharding::tpla;
  invalid_argument("--layout {}: softmax={}: sliced, as in decode, or whole, where only the RMS is sliced",
                   to_string(layout), softmax);
}

/// No error of sharding: one shard, or nothing that is cut.
bool is_exact(const ModelConfig& config, const TplaOptions& options) {
  const bool one = options.num_shards == 1 && options.kappa == TplaKappa::one;
  return one || options.shared_columns == config.kv_lora_rank;
}

}  // namespace

bool is_decode_layout(const Layout& layout) {
  const std::string& name = layout.innermost().name;
  return name == "tpla" || name == "gla";
}

std::string decode_layout_list() { return "tpla:g=G, gla:G"; }

EvaluatedModel::EvaluatedModel(std::string name, const std::string& directory, const Layout& layout)
    : name_(std::move(name)), config_(load_model_config(directory)) {
  const int asked = shards_of(layout);
  const Checkpoint checkpoint = Checkpoint::open(directory);
  if (config_.attention != AttentionKind::mla) {
    invalid_argument(
        "--layout {}: the attention of {} is grouped-query, without a latent to shard; convert it to MLA "
        "first",
        to_string(layout), name_);
  }
  if (layout.innermost().name == "gla") {
    sharding_ = LatentSharding::gla;
    options_ = {.transform = TplaTransform::none, .num_shards = asked > 0 ? asked : 2};
    exact_ = options_.num_shards == 1;
    layout_ = fmt::format("gla:{}", options_.num_shards);
  } else {
    TplaSideFile side = load_tpla_side_file(directory, config_, checkpoint);
    if (asked > 0 && asked != side.options.num_shards) {
      invalid_argument("--layout {}: {} was converted for {} shards; convert it with --shards {}, or take tpla:g={}",
                       to_string(layout), name_, side.options.num_shards, asked, side.options.num_shards);
    }
    sharding_ = sharding_of(layout);
    options_ = side.options;
    scalars_ = std::move(side.layers);
    const bool whole = sharding_ == LatentSharding::whole_softmax;
    exact_ = is_exact(config_, options_) || (whole && options_.rms == TplaRms::exact);
    layout_ = fmt::format("tpla:g={}{}", options_.num_shards, whole ? ",softmax=whole" : "");
  }
  weights_ = load_model_weights(checkpoint, config_, DType::f32);
}

std::string EvaluatedModel::description() const {
  std::string how = fmt::format("{} of {} cache elements a token, layer and rank", options_.cache_width(config_),
                                config_.latent_width());
  if (sharding_ != LatentSharding::gla) {
    how += fmt::format("; transform {}, {} shared columns, RMS {}, κ {}", name_of(options_.transform),
                       options_.shared_columns, name_of(options_.rms), name_of(options_.kappa));
  }
  return fmt::format("{}, {}: {}", layout_, exact_ ? "exact" : "NOT EXACT", how);
}

std::unique_ptr<LogitSource> EvaluatedModel::source(RankContext&) const {
  return std::make_unique<ShardedForward>(ShardedModel{config_, weights_, options_, scalars_, sharding_});
}

std::unique_ptr<LogitSource> EvaluatedModel::exact_source(RankContext&) const {
  return std::make_unique<ShardedForward>(
      ShardedModel{config_, weights_, {.transform = TplaTransform::none, .num_shards = 1}, {}, LatentSharding::gla});
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
