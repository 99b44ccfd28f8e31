// Decoding under helix beside one rank and tensor parallelism: time a step as the context grows, what exchange and
// merge take of the attention, and what of an emulated exchange the next sequence's attention hides. Ranks are threads
// of one core each, by wall time: run it on an idle machine of two cores. Holds logits against one rank before it
// times.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "study/decode_run.h"

namespace isomer {
namespace {

/// Three layers of DeepSeek-V2-Lite's attention, or of Llama-3-8B's (32 heads in 8 groups), and hardly an FFN.
ModelConfig attention_config(bool latent) {
  ModelConfig c = load_model_config(latent ? "deepseek-v2-lite" : "llama-3.1-405b");
  c.num_hidden_layers = 3;
  c.vocab_size = 256;
  c.intermediate_size = 64;
  c.moe = {};
  if (!latent) {
    c.hidden_size = 2048;
    c.num_attention_heads = 32;
    c.num_key_value_heads = 8;
  }
  return c;
}

struct Timing {
  std::string layout;
  std::int64_t context = 0, batch = 1;
  double bandwidth = 0;
};

DecodeRun run(const ModelConfig& config, const ModelWeights& weights, const Timing& t) {
  DecodeWorkload w{.config = config, .dtype = DType::bf16, .context = t.context, .batch = t.batch, .tokens = 8};
  DecodeRunOptions o{.layout = parse_decode_layout(t.layout, config)};
  o.group.num_ranks = o.layout.devices();
  o.group.threads_per_rank = 1;
  if (t.bandwidth > 0) o.group.link = {.latency_s = 0, .bandwidth_bytes_per_s = t.bandwidth, .emulated = true};
  o.read = {std::vector<std::int32_t>(static_cast<std::size_t>(t.batch), 5)};
  return run_decode(w, weights, o);
}

/// bfloat16 rounds at every layer, so a tenth; a wrong slice or head is off by the logits themselves.
bool check(const ModelConfig& config, const ModelWeights& weights) {
  const auto one = run(config, weights, {.layout = "tp:1", .context = 700, .batch = 2}).logits[0];
  const auto two = run(config, weights, {.layout = "helix:kvp=2,tpa=1", .context = 700, .batch = 2}).logits[0];
  double difference = 0, largest = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    difference = std::max(difference, std::abs(one[i] - two[i]));
    largest = std::max(largest, std::abs(one[i]));
  }
  if (difference <= 0.1 * largest) return true;
  std::printf("%s: helix differs from one rank by %g of %g\n", config.name.c_str(), difference, largest);
  return false;
}

void time_contexts(const ModelConfig& config, const ModelWeights& weights) {
  std::printf("\n%s, 3 layers, 4 sequences, bfloat16\n%-26s %8s %9s %10s %13s %13s\n", config.name.c_str(), "layout",
              "cached", "ms a step", "attention", "exch.+merge", "of attention");
  for (const std::int64_t context : {1024, 8192, 32768}) {
    for (const char* layout :
         {"tp:1", "helix:kvp=1,tpa=1", "tp:2", "helix:kvp=2,tpa=1", "helix:kvp=2,tpa=1,hopb=off"}) {
      const DecodeRun r = run(config, weights, {.layout = layout, .context = context, .batch = 4});
      const double attention = longest_part(r, "attention"), exchange = longest_part(r, "exchange");
      std::printf("%-26s %8ld %9.2f %10.2f %13.3f %12.1f%%%s\n", layout, static_cast<long>(context), 1e3 * r.seconds(),
                  1e3 * attention, 1e3 * exchange, 100 * exchange / attention, r.virtual_clock ? " (virtual)" : "");
    }
  }
}

void time_overlap(const ModelConfig& config, const ModelWeights& weights) {
  std::printf("\noverlap on 2 ranks, 8192 cached tokens, a link on which an exchange takes half of the attention\n");
  std::printf("%5s %14s %12s %12s %12s %9s %9s\n", "batch", "attention, ms", "exchange", "step, off", "step, on",
              "hidden", "formula");
  for (const std::int64_t batch : {1, 2, 4, 8, 16, 32}) {
    Timing t{.layout = "helix:kvp=2,tpa=1", .context = 8192, .batch = batch};
    const double attention = longest_part(run(config, weights, t), "attention");
    const double heads = static_cast<double>(config.num_attention_heads) / 2;
    const double bytes = static_cast<double>(config.num_hidden_layers * batch) * heads *
                         (static_cast<double>(config.kv_lora_rank) * 2 + 4);
    t.bandwidth = bytes / (attention / 2);
    const double on = run(config, weights, t).seconds();
    t.layout += ",hopb=off";
    const double off = run(config, weights, t).seconds();
    const auto b = static_cast<double>(batch);
    std::printf("%5ld %14.2f %12.2f %12.2f %12.2f %8.0f%% %8.0f%%\n", static_cast<long>(batch), 1e3 * attention,
                1e3 * attention / 2, 1e3 * off, 1e3 * on, 100 * (off - on) / (attention / 2), 100 * (b - 1) / b);
  }
}

int run_all() {
  for (const bool latent : {true, false}) {
    const ModelConfig config = attention_config(latent);
    const ModelWeights weights = initial_model_weights(config, 1, DType::bf16);
    if (!check(config, weights)) return 1;
    time_contexts(config, weights);
    if (latent) time_overlap(config, weights);
  }
  return 0;
}

}  // namespace
}  // namespace isomer

int main() { return isomer::run_all(); }
