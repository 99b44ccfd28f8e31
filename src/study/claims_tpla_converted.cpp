// T12: a grouped-query model that others trained, as latent attention and under TPLA. Judged by
// docs/data/smollm2_tpla.json, which tools/transmla_study.py makes.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "study/claims_tpla_quality.h"
#include "study/recordings.h"
#include "study/tpla_recording.h"

namespace isomer {

namespace {

using nlohmann::json;

constexpr const char* kMake =
    "./dev fetch-smollm2, then tools/transmla_study.py --corpus build/corpus --out docs/data/smollm2_tpla.json";
/// Set when one point had been seen (d 192, aligned: 1.7 times the nats beyond the original).
constexpr double kKeeps = 2;

struct ConvertedRun {
  std::int64_t rank = 0, align_steps = 0, tpla_align_steps = 0, cache = 0;
  bool sliced = false;
  MeasuredKl kl;
  double perplexity = 0, top1 = 0;
};

std::vector<ConvertedRun> runs_of(const json& recorded) {
  std::vector<ConvertedRun> runs;
  for (const json& run : recorded.at("runs")) {
    const json& e = run.at("evaluation");
    runs.push_back({.rank = run.at("kv_lora_rank"),
                    .align_steps = run.at("align_steps"),
                    .tpla_align_steps = run.at("tpla_align_steps"),
                    .cache = run.at("cache_elements"),
                    .sliced = run.at("layout").get<std::string>().starts_with("tpla"),
                    .kl = kl_of(e),
                    .perplexity = perplexity_of(e),
                    .top1 = e.at("top1_agreement")});
  }
  return runs;
}

EvidenceTable table_of(const std::vector<ConvertedRun>& runs, double original, const json& recorded) {
  EvidenceTable table{"against the original, in decode after an exact prefix of half a window",
                      {"model", "kv_lora_rank", "MLA aligned, steps", "TPLA aligned, steps", "cached a rank",
                       "perplexity", "KL", "±", "same first choice, %"}};
  const json& before = recorded.at("runs").front().at("steps").front();  // rotated, and as wide as the original
  table.rows.push_back({"original (GQA)", "-", "-", "-", count_cell(before.at("cached_elements").get<std::int64_t>()),
                        Cell(original, 3), Cell(0, 4), Cell(0, 4), Cell(100, 1)});
  for (const ConvertedRun& r : runs) {
    table.rows.push_back({r.sliced ? "TPLA, g = 2, PCA" : "MLA", count_cell(r.rank), count_cell(r.align_steps),
                          r.sliced ? count_cell(r.tpla_align_steps) : Cell("-"), count_cell(r.cache),
                          Cell(r.perplexity, 3), Cell(r.kl.mean, 4), Cell(r.kl.margin, 4), Cell(100 * r.top1, 1)});
  }
  table.note =
      fmt::format("±: two standard errors. Dequantised Q4_1 weights. Recorded by `{}` on {}, {} cores",
                  recorded.value("command", "?"), recorded.value("processor", "?"), recorded.value("cores", 0));
  return table;
}

}  // namespace

Claim tpla_converted(const ClaimsOptions&) {
  Claim claim{
      .claim = "also on converted GQA models",
      .published = "- (published after fine-tuning)",
      .configuration = fmt::format(
          "SmolLM2-135M-Instruct, TransMLA at each kv_lora_rank, TPLA g = 2 by PCA, Persuasion: with and without "
          "alignment TPLA's KL from the original at most {} times that of the MLA it was cut from",
          kKeeps),
      .command = "isomer claims tpla --only T12"};
  const std::string_view text = embedded_recording("smollm2_tpla");
  if (text.empty()) {
    claim.command = kMake;
    return without_recording(std::move(claim));
  }
  const json recorded = json::parse(text);
  const std::vector<ConvertedRun> runs = runs_of(recorded);
  double most = 0;
  int points = 0;
  std::string found;
  for (const ConvertedRun& sliced : runs) {
    if (!sliced.sliced || sliced.tpla_align_steps > 0) continue;
    const auto whole = std::find_if(runs.begin(), runs.end(), [&](const ConvertedRun& r) {
      return !r.sliced && r.rank == sliced.rank && r.align_steps == sliced.align_steps;
    });
    if (whole == runs.end())
      throw Error("the recording 'smollm2_tpla' has a TPLA model without the MLA it was cut from");
    most = std::max(most, sliced.kl.mean / whole->kl.mean);
    ++points;
    if (sliced.align_steps > 0) {
      found += fmt::format("{}d {}: KL {:.3f}, then {:.3f}", found.empty() ? "" : "; ", sliced.rank, whole->kl.mean,
                           sliced.kl.mean);
    }
  }
  claim.found =
      fmt::format("aligned MLA, then TPLA: {}; at most {:.2f} times at {} ranks and alignments", found, most, points);
  const bool holds = most <= kKeeps;
  claim.verdict = judge({.fixed_agrees = holds});
  claim.reason = holds ? "what the cut adds is less than what the conversion to MLA took"
                       : "somewhere the cut takes more than the conversion to MLA did";
  const double original =
      std::exp(recorded.at("runs").front().at("evaluation").at("nats_per_token_base").get<double>());
  claim.evidence = {table_of(runs, original, recorded)};
  return claim;
}

}  // namespace isomer
