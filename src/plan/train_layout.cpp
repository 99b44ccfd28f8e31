#include "plan/train_layout.h"

#include "core/error.h"
#include "cost/scheme_work.h"

namespace isomer {

std::string_view name_of(Recompute recompute) {
  switch (recompute) {
    case Recompute::none: return "none";
    case Recompute::attention: return "attention";
    case Recompute::all: return "all";
  }
  return "";
}

std::string to_string(const TrainLayout& layout) {
  std::string text = fmt::format("{}:{}", layout.scheme, layout.sp);
  if (layout.recompute != Recompute::none) text += fmt::format(",recompute={}", name_of(layout.recompute));
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
    case TrainUnfit::heads: return "heads do not divide by TP·SP";
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
  if (c.num_attention_heads % (static_cast<std::int64_t>(layout.tp) * layout.sp) != 0) return TrainUnfit::heads;
  if (layout.ep > 1 && (c.moe.n_routed_experts == 0 || c.moe.n_routed_experts % layout.ep != 0)) {
    return TrainUnfit::experts;
  }
  if (c.intermediate_size % layout.tp != 0) return TrainUnfit::width;
  if (c.moe.n_routed_experts > 0 && c.moe.moe_intermediate_size % layout.tp != 0) return TrainUnfit::width;
  if (layout.pp > c.num_hidden_layers) return TrainUnfit::layers;
  if (batch % layout.dp != 0) return TrainUnfit::batch;
  if (seq < layout.sp) return TrainUnfit::sequence;
  return TrainUnfit::fits;
}

std::vector<TrainLayout> enumerate_train_layouts(const ModelConfig& config, int devices,
                                                 const std::vector<std::string_view>& schemes) {
  std::vector<TrainLayout> layouts;
  const bool moe = config.moe.n_routed_experts > 0;
  const auto add_variants = [&](TrainLayout layout) {
    for (const int zero : {0, 1, 3}) {
      for (const Recompute recompute : {Recompute::none, Recompute::attention, Recompute::all}) {
        layout.zero = zero;
        layout.recompute = recompute;
        layouts.push_back(layout);
      }
    }
  };
  for (const std::string_view scheme : schemes) {
    for (int sp = 1; sp <= devices; sp *= 2) {
      if (sp == 1 && scheme != schemes.front()) continue;  // alone, schemes differ in nothing that is sent
      for (int tp = 1; sp * tp <= devices && tp <= 64; tp *= 2) {
        for (int pp = 1; sp * tp * pp <= devices; pp *= 2) {
          if (devices % (sp * tp * pp) != 0) continue;
          TrainLayout layout{.scheme = scheme, .sp = sp, .tp = tp, .pp = pp, .dp = devices / (sp * tp * pp)};
          for (int ep = 1; ep <= (moe ? layout.sp * layout.dp : 1); ep *= 2) {
            layout.ep = ep;
            if ((layout.sp * layout.dp) % ep == 0) add_variants(layout);
          }
        }
      }
    }
  }
  return layouts;
}

}  // namespace isomer
