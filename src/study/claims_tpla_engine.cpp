// T2, T7 and B2: what decode layouts cache, send and compute on two ranks, counted in dry runs of the inference engine
// at DeepSeek-V2-Lite's dimensions; B2's quality from docs/data/tpla_tiny.json.
#include <algorithm>
#include <cmath>
#include <map>

#include "comm/group.h"
#include "core/error.h"
#include "infer/engine.h"
#include "study/claims_beyond.h"
#include "study/claims_tpla_quality.h"
#include "study/recordings.h"
#include "study/tpla_recording.h"

namespace isomer {

namespace {

using nlohmann::json;

constexpr std::int64_t kContext = 4096;

/// One token's step of one dense layer on two ranks, on the rank where each figure is largest.
struct CountedStep {
  double cache_elements = 0;      // a token and rank
  double sent = 0, sent_ffn = 0;  // bytes
  std::map<std::string, double> flops;

  double flops_of(std::initializer_list<const char*> names) const {
    double sum = 0;
    for (const char* name : names) {
      if (const auto found = flops.find(name); found != flops.end()) sum += found->second;
    }
    return sum;
  }
};

std::shared_ptr<const TplaModel> plain_tpla(const ModelConfig& config, int shards) {
  TplaModel model{.options = {.num_shards = shards}};
  const auto g = static_cast<std::size_t>(shards), h = static_cast<std::size_t>(config.num_attention_heads);
  model.layers.assign(static_cast<std::size_t>(config.num_hidden_layers),
                      {.kappa = std::vector<double>(h * g, 1), .rms_scale = std::vector<double>(g, 1)});
  return std::make_shared<const TplaModel>(std::move(model));
}

void count_rank(RankContext& ctx, const EngineOptions& options, const ModelWeights& weights, CountedStep& step) {
  Engine engine(ctx, options, weights);
  const int sequence = engine.add_sequence();
  const std::vector<std::int32_t> prompt(kContext, 1), next(1, 2);
  engine.prefill(ctx, sequence, prompt);
  ctx.ledger().clear();
  ctx.ops().clear();
  const Engine::Input input{sequence, next};
  engine.decode(ctx, {&input, 1});
  std::int64_t rows = 0;
  for (const TokenRun& run : engine.cache().runs(sequence, 0, kContext)) rows += run.length;
  const double elements = static_cast<double>(engine.cache().options().row.elements() * rows);
  step.cache_elements = std::max(step.cache_elements, elements / static_cast<double>(kContext));
  double sent = 0, ffn = 0;
  for (const LedgerEntry& entry : ctx.ledger().entries()) {
    (entry.tensor == "ffn output" ? ffn : sent) += static_cast<double>(entry.bytes_sent);
  }
  step.sent = std::max(step.sent, sent);
  step.sent_ffn = std::max(step.sent_ffn, ffn);
  for (const auto& [key, summary] : ctx.ops().summaries()) {
    double& most = step.flops[key.name];
    most = std::max(most, summary.cost.flops);
  }
}

CountedStep counted_step(const char* layout) {
  ModelConfig config = load_model_config("deepseek-v2-lite");
  config.num_hidden_layers = 1;
  EngineOptions options{.config = config, .layout = parse_decode_layout(layout, config)};
  if (options.layout.shards.scheme == DecodeScheme::tpla) options.tpla = plain_tpla(config, 2);
  options.layout = complete_layout(options.layout, options.tpla.get());
  const std::int64_t length = kContext + 1;
  options.cache_tokens = cache_tokens_for({&length, 1}, options.layout, options.page_tokens);
  const ModelWeights weights = initial_model_weights(config, 1, DType::bf16, 0.02, true);
  CountedStep step;
  run_group({.num_ranks = options.layout.devices(), .dry_run = true},
            [&](RankContext& ctx) { count_rank(ctx, options, weights, step); });
  return step;
}

constexpr const char* kLayouts[] = {"tp:2", "gla:g=2,tp=1", "tpla:g=2,tp=1", "exact-latent:2", "kvp:2"};
constexpr auto kCore = {"fused_attention_forward", "partial logits", "p ĉ"};  // the last two: exact-latent's

}  // namespace

Claim tpla_cache(const ClaimsOptions& options) {
  Claim claim{
      .claim = "cache elements a token, layer and device on two devices",
      .published = "576 → 320",
      .configuration = "V2-Lite's dimensions (d 512, r 64), rows of the engine's cache in a dry run, 4,096 tokens",
      .command = "isomer claims tpla --only T2"};
  EvidenceTable table{"two ranks", {"layout", "cache elements", "exact"}};
  std::vector<double> found;
  for (const char* layout : kLayouts) {
    options.progress(fmt::format("T2: {}", layout));
    found.push_back(counted_step(layout).cache_elements);
    const std::string_view name = layout;
    table.rows.push_back(
        {layout, Cell(found.back(), 0), yes_no(!name.starts_with("gla") && !name.starts_with("tpla"))});
  }
  claim.found = fmt::format("tp {:.0f}, tpla {:.0f}, gla {:.0f}; exact-latent {:.0f}, kvp {:.0f}, both exact", found[0],
                            found[2], found[1], found[3], found[4]);
  const bool agrees = all_as_printed({found[0], found[2]}, {"576", "320"});
  claim.verdict = judge({.fixed_agrees = agrees});
  claim.reason = agrees ? "counted; layouts that stay exact cache no more" : "the engine caches another number";
  claim.evidence = {table};
  return claim;
}

Claim tpla_flops(const ClaimsOptions& options) {
  options.progress("T7");
  const CountedStep tp = counted_step("tp:2"), tpla = counted_step("tpla:g=2,tp=1"),
                    scattered = counted_step("tpla:g=2,tp=1,wo=scatter");
  Claim claim{.claim = "attention's FLOPs a device equal those of TP but for the rope part; the Q projection's double",
              .published = "-",
              .configuration = "one token after 4,096, V2-Lite's dimensions, two ranks, counted in a dry run",
              .command = "isomer claims tpla --only T7"};
  EvidenceTable table{"FLOPs of one layer's step on a rank", {"operation", "tp:2", "tpla:g=2", "ratio", "wo=scatter"}};
  struct Row {
    const char* title;
    std::initializer_list<const char*> names;
  };
  const Row rows[] = {{"attention core", kCore},
                      {"query projections", {"q_proj", "q_b_proj"}},
                      {"W_kv_a", {"kv_a_proj latent", "kv_a_proj rope"}},
                      {"W_UK q", {"absorb q"}},
                      {"W_UV õ", {"W_UV õ"}},
                      {"W_o", {"o_proj"}}};
  for (const Row& row : rows) {
    const double a = tp.flops_of(row.names), b = tpla.flops_of(row.names);
    table.rows.push_back({row.title, Cell(a, 0), Cell(b, 0), Cell(b / a, 3), Cell(scattered.flops_of(row.names), 0)});
  }
  const ModelConfig config = load_model_config("deepseek-v2-lite");
  // Twice the heads over half of the columns: what is more is the rope part of h/2 more heads.
  const double rope = 2.0 * static_cast<double>(config.num_attention_heads) / 2 * (kContext + 1) *
                      static_cast<double>(config.qk_rope_head_dim);
  const double excess = tpla.flops_of(kCore) - tp.flops_of(kCore);
  const bool agrees =
      std::abs(excess - rope) < 1e-6 * tp.flops_of(kCore) && tpla.flops_of({"q_proj"}) == 2 * tp.flops_of({"q_proj"});
  claim.found = fmt::format(
      "core {:.3f}×, all of the excess rope; Q projection {:.0f}×, W_o {:.0f}× (wo=scatter {:.0f}×)",
      tpla.flops_of(kCore) / tp.flops_of(kCore), tpla.flops_of({"q_proj"}) / tp.flops_of({"q_proj"}),
      tpla.flops_of({"o_proj"}) / tp.flops_of({"o_proj"}), scattered.flops_of({"o_proj"}) / tp.flops_of({"o_proj"}));
  claim.verdict = judge({.fixed_agrees = agrees});
  claim.reason = agrees ? "counted; W_o doubles too where every rank has it whole, and W_kv_a stays whole on every rank"
                        : "the counted excess is not the rope part alone";
  claim.evidence = {table};
  return claim;
}

Claim beyond_side_by_side(ClaimRuns& runs) {
  Claim claim{
      .claim = "tp, gla, tpla, exact-latent and kvp side by side on two ranks: cache, bytes, arithmetic, exactness",
      .published = "- (no paper's)",
      .configuration =
          "counts: V2-Lite's dimensions, one layer, bf16, one token after 4,096, attention alone; KL "
          "and perplexity: models/tiny-mla in decode. Times stand in docs/performance.md",
      .command = "isomer claims beyond --only B2"};
  const TplaRecording recorded("tpla_tiny");
  if (recorded.empty()) return without_recording(std::move(claim));
  EvidenceTable table{"two ranks",
                      {"layout", "conversion", "cache elements", "sent, bytes a token", "core, MFLOP", "KL, decode",
                       "perplexity, decode"}};
  std::map<std::string, CountedStep> steps;
  for (const char* layout : kLayouts) {
    runs.progress(fmt::format("B2: {}", layout));
    steps[layout] = counted_step(layout);
  }
  const auto add = [&](const std::string& layout, const std::string& conversion, double kl, double perplexity) {
    const CountedStep& s = steps.at(layout);
    table.rows.push_back({layout, conversion, Cell(s.cache_elements, 0), Cell(s.sent, 0),
                          Cell(1e-6 * s.flops_of(kCore), 2), Cell(kl, 5), Cell(perplexity, 3)});
  };
  const json& usual = recorded.evaluation({}, "tpla", "decode");
  const double exact = std::exp(usual.at("nats_per_token_base").get<double>());
  add("tp:2", "-", 0, exact);
  const json& gla = recorded.evaluation({}, "gla:2", "decode");
  add("gla:g=2,tp=1", "pca", kl_of(gla).mean, perplexity_of(gla));
  for (const char* transform : {"none", "hadamard", "pca", "pca-centred", "query-aware"}) {
    for (const char* kappa : {"one", "lsq"}) {
      const json& e = recorded.evaluation({.transform = transform, .kappa = kappa}, "tpla", "decode");
      add("tpla:g=2,tp=1", fmt::format("{}, κ {}", transform, kappa), kl_of(e).mean, perplexity_of(e));
    }
  }
  add("exact-latent:2", "-", 0, exact);
  add("kvp:2", "-", 0, exact);
  table.note = fmt::format("tp, exact-latent and kvp compute MLA's function, whose KL is 0. {}", recorded.origin());
  const CountedStep &tpla = steps.at("tpla:g=2,tp=1"), &kvp = steps.at("kvp:2");
  claim.found = fmt::format("kvp caches {:.0f} elements to tpla's {:.0f} and stays exact; it sends {:.1f}× as much",
                            kvp.cache_elements, tpla.cache_elements, kvp.sent / tpla.sent);
  const bool holds = kvp.cache_elements <= tpla.cache_elements && kvp.sent > tpla.sent;
  claim.verdict = judge({.fixed_agrees = holds});
  claim.reason = holds ? "counted: exactness is paid in bytes, not in cache" : "kvp does not cache less for more bytes";
  claim.evidence = {table};
  return claim;
}

}  // namespace isomer
