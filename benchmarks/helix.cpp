// Decoding under helix beside one rank and tensor parallelism: time a step as the context grows, what exchange and
// merge take of the attention, and what of an emulated exchange the next sequence's attention hides. Ranks are threads
// of one core each, by wall time: run it on an idle machine of two cores. Holds logits against one rank before it
// times.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "study/decode_run.h"
#include "study/overlap_times.h"

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
};

DecodeRun run(const ModelConfig& config, const ModelWeights& weights, const Timing& t) {
  DecodeWorkload w{.config = config, .dtype = DType::bf16, .context = t.context, .batch = t.batch, .tokens = 8};
  DecodeRunOptions o{.layout = parse_decode_layout(t.layout, config)};
  o.group.num_ranks = o.layout.devices();
  o.group.threads_per_rank = 1;
  o.read = {std::vector<std::int32_t>(static_cast<std::size_t>(t.batch), 5)};
  return run_decode(w, weights, o);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
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

void print_overlap(const ModelConfig& config, const ModelWeights& weights) {
  std::printf(
      "\noverlap on 2 ranks, 8192 cached tokens, a link on which an exchange takes half of the attention; steps with "
      "and\n"
      "without in turn, medians; hidden with its 95 %% interval; cost: of overlap without a link\n");
  std::printf("%5s %6s %14s %12s %10s %10s %7s %22s %8s\n", "batch", "pairs", "attention, ms", "exchange", "off", "on",
              "cost", "hidden", "formula");
  for (const std::int64_t batch : {1, 2, 4, 8, 16, 32}) {
    const OverlapTimes t = time_overlap(config, weights, {.batch = batch, .pairs = batch == 8 ? 151 : 41});
    const OverlapTimes::Share hidden = t.hidden();
    std::printf("%5ld %6d %14.2f %12.2f %10.2f %10.2f %7.2f %6.0f%% (%.0f to %.0f) %7.0f%%%s\n",
                static_cast<long>(batch), t.of.pairs, 1e3 * t.attention_s, 1e3 * t.exchange_s, 1e3 * median(t.off_s),
                1e3 * median(t.on_s), 1e3 * t.cost_s, 100 * hidden.median, 100 * hidden.low, 100 * hidden.high,
                100 * t.hidden_by_formula(), t.virtual_clock ? " (virtual)" : "");
  }
}

int run_all(bool overlap_alone) {
  for (const bool latent : {true, false}) {
    if (overlap_alone && !latent) continue;
    const ModelConfig config = attention_config(latent);
    const ModelWeights weights = initial_model_weights(config, 1, DType::bf16);
    if (!check(config, weights)) return 1;
    if (!overlap_alone) time_contexts(config, weights);
    if (latent) print_overlap(config, weights);
  }
  return 0;
}

}  // namespace
}  // namespace isomer

// `bench_helix overlap`: the last part alone.
int main(int argc, char** argv) { return isomer::run_all(argc > 1 && std::string(argv[1]) == "overlap"); }
