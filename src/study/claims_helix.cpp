// The registry of Helix's claims, and those that need no frontier: the roofline, short contexts, the sweep.
#include "study/claims_helix.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"
#include "cost/roofline.h"

namespace isomer {

namespace {

constexpr const char* kHardware = "gb200-nvl72";

struct HelixEntry {
  std::string id;
  Claim (*find)(const ClaimsOptions& options);
};

Claim helix_h5(const ClaimsOptions&) { return helix_roofline(); }
const std::vector<HelixEntry>& helix_entries() {
  static const std::vector<HelixEntry> entries = {{"H1", helix_exact},
                                                  {"H2", helix_exchange},
                                                  {"H3", helix_balance},
                                                  {"H4", helix_hop_b},
                                                  {"H5", helix_h5},
                                                  {"H6", helix_r1},
                                                  {"H7", helix_llama},
                                                  {"H8", helix_overlap},
                                                  {"H9", helix_short_contexts},
                                                  {"H10", helix_sweep},
                                                  {"H11", helix_replicated_projections},
                                                  {"H12", helix_layout_change}};
  return entries;
}

Cell microseconds(double seconds) { return {1e6 * seconds, 1}; }

}  // namespace

HelixSetting helix_paper_setting() {
  return {.name = "the paper's",
          .precision = {Precision::nvfp4, Precision::nvfp4, Precision::nvfp4},
          .assumptions = {.link_latency_s = 1e-6, .roofline = true}};
}

HelixSetting helix_measured_setting() {
  return {.name = "measured", .precision = {Precision::nvfp4, Precision::fp8, Precision::bf16}};
}

Claim helix_roofline() {
  const HelixRoofline r{.batch = 8,
                        .query_heads = 128,
                        .kv_heads = 8,
                        .head_dim = 128,
                        .hidden = 16384,
                        .ffn = 65536,
                        .context = 1e6,
                        .element_bytes = 0.5,
                        .bandwidth_bytes_per_s = 8e12};
  EvidenceTable table{"time to read one layer's cache and weights, us",
                      {"what", "layout", "published, us", "found, us"}};
  std::vector<double> found;
  const std::vector<std::string> published = {"128", "128", "16", "29.6", "7.6"};
  const auto add = [&](const char* what, const char* layout, double seconds) {
    table.rows.push_back({what, layout, published[found.size()], microseconds(seconds)});
    found.push_back(1e6 * seconds);
  };
  add("cache", "TPA 8", r.cache_read_s(8, 1));
  add("cache", "TPA 64: KV heads duplicated", r.cache_read_s(64, 1));
  add("cache", "TPA 8, KVP 8", r.cache_read_s(8, 8));
  add("weights", "TP 8", r.weight_read_s(8, 8));
  add("weights", "TPA 8, TPF 64", r.weight_read_s(8, 64));
  const double method = r.weight_read_of_method_s(8, 64, 64);
  table.rows.push_back({"weights, W_o cut by all 64 as the method has it", "TPA 8, TPF 64", "-", microseconds(method)});
  Claim claim{.claim = "figure 1: what a layer reads from memory",
              .published = "cache 128, 128, 16 us; weights 29.6, 7.6 us",
              .found = fmt::format("{:.0f}, {:.0f}, {:.0f}; {:.1f}, {:.1f} us", found[0], found[1], found[2], found[3],
                                   found[4]),
              .configuration =
                  "the appendix's formula at batch 8, 128 query and 8 KV heads of 128, hidden 16384, FFN "
                  "65536, 8 TB/s, half a byte an element, 1,000,000 tokens"};
  claim.verdict = judge({.fixed_agrees = all_as_printed(found, published)});
  claim.reason = fmt::format(
      "the printed formula cuts W_o by TPA; the method cuts it by all devices, and then weights "
      "take {:.1f} us",
      1e6 * method);
  claim.evidence = {table};
  return claim;
}

namespace {

/// The layout that serves most tokens a device at no more than twice the quickest step.
struct Picked {
  DecodeLayout layout;
  DecodePoint point;
};
Picked pick(const char* model, std::int64_t context, const Hardware& hardware, const ClaimsOptions& o) {
  const DecodeProblem problem{
      .config = load_model_config(model), .context = context, .precision = helix_measured_setting().precision};
  const DecodeSearch search = search_decode(problem, hardware, {.max_devices = o.quick ? 16 : 64});
  const LayoutFilter any = [](const DecodeLayout&) { return true; };
  const auto fastest = best_point(search, {.filter = any, .quickest = true});
  ISOMER_CHECK(fastest.has_value(), "{} fits nowhere at {} tokens", model, context);
  const auto best = best_point(search, {.filter = any, .ttl_s = 2 * fastest->step_s});
  return {search.layout_of(*best), *best};
}

}  // namespace

Claim helix_short_contexts(const ClaimsOptions& o) {
  const Hardware hardware = load_hardware(kHardware);
  EvidenceTable table{"what the planner picks for most tokens/s a device, at most twice the quickest step",
                      {"model", "context", "layout", "batch", "ms a token", "DP attention", "KV slices", "FFN's TP"}};
  bool short_is_dp_tp = true, short_is_dp = true, long_is_sliced = true;
  std::string crossover;
  for (const char* model : {"deepseek-r1", "llama-3.1-405b"}) {
    std::int64_t first_sliced = 0;
    for (const std::int64_t context : {1024, 2048, 4096, 8192, 16384, 65536, 262144, 1048576}) {
      o.progress(fmt::format("H9: {} at {} tokens", model, context));
      const Picked picked = pick(model, context, hardware, o);
      const DecodeShards& s = picked.layout.shards;
      table.rows.push_back({model, count_cell(context), to_string(picked.layout), count_cell(picked.point.batch),
                            Cell(1e3 * picked.point.step_s, 2), count_cell(s.data_parallel), count_cell(s.kvp),
                            count_cell(s.tpf)});
      if (first_sliced == 0 && s.kvp > 1) first_sliced = context;
      if (context < 4096) {
        short_is_dp = short_is_dp && s.data_parallel > 1 && s.kvp == 1;
        short_is_dp_tp = short_is_dp_tp && s.data_parallel > 1 && s.kvp == 1 && s.tpf > 1;
      } else if (context <= 16384) {
        long_is_sliced = long_is_sliced && s.kvp > 1;
      }
    }
    crossover += fmt::format("{}{} {}", crossover.empty() ? "" : ", ", model,
                             first_sliced > 0 ? fmt::format("from {} tokens on", first_sliced) : "not up to 1M");
  }
  Claim claim{.claim = "below 4K tokens the best layout is DP attention with a TP FFN, from there on Helix",
              .published = "below 4K",
              .configuration =
                  "GB200 NVL72, up to 64 devices, FP4 weights, FP8 cache; most tokens/s a device within "
                  "twice the quickest step"};
  claim.found =
      fmt::format("below 4K: DP attention {}, with a TP FFN {}; from 4K to 16K: KV slices {}; first sliced: {}",
                  short_is_dp ? "always" : "not always", short_is_dp_tp ? "always" : "not always",
                  long_is_sliced ? "always" : "not always", crossover);
  claim.verdict = judge({.fixed_agrees = short_is_dp_tp && long_is_sliced, .explanation_holds = short_is_dp});
  claim.reason = fmt::format("DP attention {} below 4K; slicing the cache over devices begins to pay: {}",
                             short_is_dp ? "is best" : "is not always best", crossover);
  claim.evidence = {table};
  return claim;
}

Claim helix_sweep(const ClaimsOptions& o) {
  EvidenceTable table{"sweeps over layouts and batches on up to 64 devices, one core",
                      {"model", "context", "examined", "fit and priced", "seconds", "priced a second"}};
  const Hardware hardware = load_hardware(kHardware);
  std::int64_t examined = 0, priced = 0;
  double seconds = 0;
  for (const auto& [model, context] :
       {std::pair{"deepseek-r1", 4096}, std::pair{"deepseek-r1", 1 << 20}, std::pair{"llama-3.1-405b", 1 << 20}}) {
    o.progress(fmt::format("H10: {} at {} tokens", model, context));
    const DecodeProblem problem{
        .config = load_model_config(model), .context = context, .precision = helix_measured_setting().precision};
    const DecodeSearch search = search_decode(problem, hardware, {});
    const auto fits = static_cast<std::int64_t>(search.points.size());
    table.rows.push_back({model, count_cell(context), count_cell(search.examined), count_cell(fits),
                          Cell(search.seconds, 2), Cell(static_cast<double>(fits) / search.seconds, 0)});
    if (fits > priced) {
      priced = fits;
      examined = search.examined;
      seconds = search.seconds;
    }
  }
  Claim claim{.claim = "more than 100,000 configurations are swept",
              .published = "> 100,000",
              .found = fmt::format("{} examined, {} priced in {:.2f} s", examined, priced, seconds),
              .configuration = "R1 at 4K, where most fit; powers of two up to 64 devices, batches to 64K"};
  claim.verdict = judge({.fixed_agrees = priced > 100000});
  claim.reason = "configurations that fit and were priced are counted, others stand beside them";
  claim.evidence = {table};
  return claim;
}

ClaimsReport helix_claims(const ClaimsOptions& options) {
  std::vector<std::string> ids;
  for (const HelixEntry& entry : helix_entries()) ids.push_back(entry.id);
  for (const std::string& id : options.only) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) {
      invalid_argument("--only {}: there is no such claim; there are: {}", id, fmt::join(ids, ", "));
    }
  }
  ClaimsReport report{
      .command = "claims helix", .paper = "Helix, arXiv 2507.07120", .seed = options.seed, .quick = options.quick};
  for (const HelixEntry& entry : helix_entries()) {
    const bool wanted =
        options.only.empty() || std::find(options.only.begin(), options.only.end(), entry.id) != options.only.end();
    if (!wanted) continue;
    options.progress(entry.id);
    Claim claim = entry.find(options);
    claim.id = entry.id;
    if (claim.command.empty()) claim.command = fmt::format("isomer claims helix --only {}", entry.id);
    report.claims.push_back(std::move(claim));
  }
  return report;
}

}  // namespace isomer
