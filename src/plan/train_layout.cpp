#include "plan/train_layout.h"

#include <algorithm>

#include "core/error.h"
#include "cost/scheme_work.h"
#include "sharding/sequence_layout.h"

namespace isomer {

std::string_view name_of(TrainRecompute recompute) {
  switch (recompute) {
    case TrainRecompute::none: return "none";
    case TrainRecompute::attention: return "attention";
    case TrainRecompute::block: return "block";
    case TrainRecompute::all: return "all";
  }
  return "";
}

Layout sequence_part(const TrainLayout& layout) {
  Layout sequence = parse_layout(layout.scheme);
  sequence.axes.front().size = layout.sp;
  if (sequence.axes.size() > 1) sequence.axes[1].size = layout.groups;
  const auto recompute = std::min(layout.recompute, TrainRecompute::block);  // of the block, all is no more
  if (recompute != TrainRecompute::none) sequence.axes.back().options["recompute"] = name_of(recompute);
  return sequence;
}

std::string to_string(const TrainLayout& layout) {
  TrainLayout plain = layout;
  plain.recompute = TrainRecompute::none;
  std::string text = to_string(sequence_part(plain));
  if (layout.recompute != TrainRecompute::none) text += fmt::format(",recompute={}", name_of(layout.recompute));
  if (layout.tp > 1) text += fmt::format(",tp:{}", layout.tp);
  if (layout.pp > 1) text += fmt::format(",pp:{}", layout.pp);
  text += fmt::format(",dp:{}", layout.dp);
  if (layout.ep > 1) text += fmt::format(",ep={}", layout.ep);
  if (layout.zero > 0) text += fmt::format(",zero={}", layout.zero);
  return text;
}

std::string_view reason_of(TrainUnfit unfit) {
  switch (unfit) {
    case TrainUnfit::fits: return "fits";
    case TrainUnfit::heads: return "heads do not divide by TP and the ranks that spread them";
    case TrainUnfit::experts: return "experts do not divide by EP";
    case TrainUnfit::width: return "the FFN's width does not divide by TP";
    case TrainUnfit::layers: return "fewer layers than pipeline stages";
    case TrainUnfit::batch: return "the batch does not divide by DP";
    case TrainUnfit::sequence: return "fewer tokens than SP ranks";
    case TrainUnfit::memory: return "states and activations exceed a device's memory";
  }
  return "";
}

TrainUnfit why_unfit(const TrainLayout& layout, const ModelConfig& c, std::int64_t seq, std::int64_t batch) {
  const bool all_heads = keeps_all_heads(parse_layout(layout.scheme).innermost().name);
  const std::int64_t spread = static_cast<std::int64_t>(layout.tp) * (all_heads ? 1 : layout.sp);
  if (c.num_attention_heads % spread != 0) return TrainUnfit::heads;
  if (c.attention == AttentionKind::gqa && c.num_key_value_heads % layout.tp != 0) return TrainUnfit::heads;
  if (layout.ep > 1 && (c.moe.n_routed_experts == 0 || c.moe.n_routed_experts % layout.ep != 0)) {
    return TrainUnfit::experts;
  }
  if (c.intermediate_size % layout.tp != 0) return TrainUnfit::width;
  if (c.moe.n_routed_experts > 0 && c.moe.moe_intermediate_size % layout.tp != 0) return TrainUnfit::width;
  if (layout.pp > c.num_hidden_layers) return TrainUnfit::layers;
  if (batch % layout.dp != 0) return TrainUnfit::batch;
  if (seq < layout.sequence_ranks()) return TrainUnfit::sequence;
  return TrainUnfit::fits;
}

std::vector<TrainLayout> enumerate_train_layouts(const ModelConfig& config, int devices,
                                                 const std::vector<std::string_view>& schemes) {
  std::vector<TrainLayout> layouts;
  const bool moe = config.moe.n_routed_experts > 0;
  const auto add_variants = [&](TrainLayout layout) {
    const bool kept_keys = !parse_layout(layout.scheme).innermost().options.empty();
    for (const int zero : {0, 1, 3}) {
      for (const TrainRecompute recompute :
           {TrainRecompute::none, TrainRecompute::attention, TrainRecompute::block, TrainRecompute::all}) {
        // What is kept of K and V makes no difference where nothing is.
        if (kept_keys && recompute >= TrainRecompute::block) continue;
        layout.zero = zero;
        layout.recompute = recompute;
        layouts.push_back(layout);
      }
    }
  };
  const auto add_around = [&](std::string_view scheme, int sp, int groups) {
    const int ranks = sp * groups;
    for (int tp = 1; ranks * tp <= devices && tp <= 64; tp *= 2) {
      for (int pp = 1; ranks * tp * pp <= devices; pp *= 2) {
        if (devices % (ranks * tp * pp) != 0) continue;
        TrainLayout layout{.scheme = scheme, .sp = sp, .groups = groups, .tp = tp, .pp = pp};
        layout.dp = devices / (ranks * tp * pp);
        for (int ep = 1; ep <= (moe ? ranks * layout.dp : 1); ep *= 2) {
          layout.ep = ep;
          if ((ranks * layout.dp) % ep == 0) add_variants(layout);
        }
      }
    }
  };
  for (const std::string_view scheme : schemes) {
    const bool two_axes = parse_layout(scheme).axes.size() > 1;
    for (int sp = two_axes ? 2 : 1; sp <= devices; sp *= 2) {
      if (sp == 1 && scheme != schemes.front()) continue;  // alone, schemes differ in nothing that is sent
      for (int groups = two_axes ? 2 : 1; sp * groups <= (two_axes ? devices : sp); groups *= 2) {
        add_around(scheme, sp, groups);
      }
    }
  }
  return layouts;
}

}  // namespace isomer
