#include "plan/decode_enumerate.h"

#include <bit>

namespace isomer {

namespace {

/// Receives attention cuts and adds the FFN's, data parallelism, and pipelines.
class Enumeration {
 public:
  Enumeration(const ModelConfig& config, int max_devices, std::vector<DecodeLayout>& out)
      : moe_(config.moe.n_routed_experts > 0),
        mla_(config.attention == AttentionKind::mla),
        max_devices_(max_devices),
        out_(out) {}

  void run() {
    for (int n = 1; n <= max_devices_; n *= 2) {
      add_ffn({.shards = {.tpa = n}});
      if (n > 1) add_ffn({.shards = {.scheme = DecodeScheme::kvp, .kvp = n}});
      if (n > 1 && mla_) add_latent(n);
      for (int kvp = 2; kvp <= n; kvp *= 2) {
        add_medha(kvp, n / kvp);
        add_helix(kvp, n / kvp);
      }
    }
  }

 private:
  void add_latent(int n) {
    for (int g = 2; g <= std::min(n, 8); g *= 2) {
      DecodeLayout layout{.shards = {.scheme = DecodeScheme::tpla, .tpa = n, .latent_shards = g}};
      add_ffn(layout);
      layout.shards.split_latent_rows = true;
      add_ffn(layout);
      if (g == n) {
        layout.shards.scatter_values = true;
        add_ffn(layout);
      }
    }
    if (n <= 8) add_ffn({.shards = {.scheme = DecodeScheme::exact_latent, .tpa = n, .latent_shards = n}});
  }

  void add_medha(int kvp, int tpa) {
    DecodeLayout layout{.shards = {.scheme = DecodeScheme::medha, .kvp = kvp, .tpa = tpa, .tpf = tpa}};
    for (int before = 0; before <= (mla_ ? 1 : 0); ++before) {
      layout.shards.values_before = before == 1;
      add_stages(layout);
    }
  }

  void add_helix(int kvp, int tpa) {
    DecodeLayout layout{.shards = {.scheme = DecodeScheme::helix, .kvp = kvp, .tpa = tpa}};
    for (int variant = 0; variant < 12; ++variant) {
      const int queries = variant % 3;  // replicated, gathered, gathered absorbed
      layout.shards.gather_queries = queries > 0;
      layout.shards.absorb_before = queries == 2;
      layout.shards.values_before = (variant / 3) % 2 == 1;
      layout.hop_b = variant / 6 == 0;
      if (!mla_ && (layout.shards.absorb_before || layout.shards.values_before)) continue;
      add_ffn(layout);
    }
  }

  /// The FFN as TPF × EP over the group, or over several groups with sequences of their own.
  void add_ffn(DecodeLayout layout) {
    DecodeShards& s = layout.shards;
    const int n = s.group();
    for (s.ep = 1; s.ep <= (moe_ ? n : 1); s.ep *= 2) {
      s.tpf = n / s.ep;
      s.gather_experts = false;
      add_stages(layout);
      if (s.scheme == DecodeScheme::helix && s.ep > 1) {
        s.gather_experts = true;
        add_stages(layout);
      }
    }
    s.gather_experts = false;
    for (s.data_parallel = 2; n * s.data_parallel <= max_devices_; s.data_parallel *= 2) {
      s.tpf = s.devices();
      s.ep = 1;
      add_stages(layout);
      if (!moe_) continue;
      std::swap(s.tpf, s.ep);
      add_stages(layout);
    }
  }

  void add_stages(DecodeLayout layout) {
    for (layout.pp = 1; layout.devices() <= max_devices_; layout.pp *= 2) out_.push_back(layout);
  }

  bool moe_, mla_;
  int max_devices_;
  std::vector<DecodeLayout>& out_;
};

}  // namespace

std::vector<DecodeLayout> enumerate_decode_layouts(const ModelConfig& config, int max_devices) {
  std::vector<DecodeLayout> layouts;
  Enumeration(config, max_devices, layouts).run();
  return layouts;
}

}  // namespace isomer
