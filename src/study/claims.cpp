#include "study/claims.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "study/claim_runs.h"
#include "study/claims_beyond.h"
#include "study/claims_laga.h"
#include "study/machine.h"

namespace isomer {

std::string_view name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::reproduced: return "reproduced";
    case Verdict::reproduced_by_another_convention: return "reproduced by another convention";
    case Verdict::explained_otherwise: return "explained otherwise";
    case Verdict::refuted: return "refuted";
    case Verdict::cannot_be_tested_here: return "can't be tested here";
  }
  return "";
}

bool as_printed(double found, std::string_view published) {
  const auto point = published.find('.');
  const int decimals = point == std::string_view::npos ? 0 : static_cast<int>(published.size() - point - 1);
  return fmt::format("{:.{}f}", found, decimals) == published;
}

bool all_as_printed(const std::vector<double>& found, const std::vector<std::string>& published) {
  return std::equal(found.begin(), found.end(), published.begin(), published.end(), as_printed);
}

Verdict judge(const Judgement& judgement) {
  if (judgement.fixed_agrees) return Verdict::reproduced;
  if (judgement.other_agrees) return Verdict::reproduced_by_another_convention;
  return judgement.explanation_holds ? Verdict::explained_otherwise : Verdict::refuted;
}

Cell::Cell(double value, int decimals) : text(fmt::format("{:.{}f}", value, decimals)), number(value) {}

Cell megabytes(double bytes, int decimals) { return {bytes / 1e6, decimals}; }
Cell count_cell(std::int64_t count) { return {static_cast<double>(count), 0}; }
Cell yes_no(bool value) { return value ? "yes" : "no"; }
Cell scientific(double value) {
  Cell cell(fmt::format("{:.1e}", value));
  cell.number = value;
  return cell;
}

namespace {

struct ClaimEntry {
  std::string id;
  Claim (*find)(ClaimRuns& runs);
};

const std::vector<ClaimEntry>& laga_entries() {
  static const std::vector<ClaimEntry> entries = {
      {"L1", laga_forward_bytes},      {"L2", laga_ratio_stability}, {"L3", laga_against_frameworks},
      {"L4", laga_eager_gap},          {"L5", laga_fused_gap},       {"L6", laga_other_accelerator},
      {"L7", laga_peak_of_laga},       {"L8", laga_sign_flip},       {"L9", laga_one_rank_bits},
      {"L10", laga_gradient_accuracy}, {"L11", laga_training},       {"L12", laga_flops},
      {"L13", laga_throughput},        {"L14", laga_routing_noise}};
  return entries;
}

bool wanted(const ClaimsOptions& options, const std::string& id) {
  return options.only.empty() || std::find(options.only.begin(), options.only.end(), id) != options.only.end();
}

nlohmann::json cell_json(const Cell& cell) {
  return cell.number ? nlohmann::json(*cell.number) : nlohmann::json(cell.text);
}

nlohmann::json evidence_json(const EvidenceTable& table) {
  auto rows = nlohmann::json::array();
  for (const auto& row : table.rows) {
    auto cells = nlohmann::json::array();
    for (const Cell& cell : row) cells.push_back(cell_json(cell));
    rows.push_back(cells);
  }
  return {{"title", table.title}, {"columns", table.header}, {"rows", rows}, {"note", table.note}};
}

}  // namespace

namespace {

ClaimsReport report_of(const std::vector<ClaimEntry>& entries, ClaimsReport report, const ClaimsOptions& options) {
  std::vector<std::string> ids;
  for (const ClaimEntry& entry : entries) ids.push_back(entry.id);
  for (const std::string& id : options.only) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) {
      invalid_argument("--only {}: there is no such claim; there are: {}", id, fmt::join(ids, ", "));
    }
  }
  report.seed = options.seed;
  report.quick = options.quick;
  ClaimRuns runs(options);
  for (const ClaimEntry& entry : entries) {
    if (!wanted(options, entry.id)) continue;
    runs.begin(entry.id);
    Claim claim = entry.find(runs);
    claim.id = entry.id;
    if (claim.command.empty()) claim.command = fmt::format("isomer {} --only {}", report.command, entry.id);
    report.claims.push_back(std::move(claim));
  }
  report.disagreements = runs.disagreements();
  return report;
}

}  // namespace

ClaimsReport laga_claims(const ClaimsOptions& options) {
  return report_of(laga_entries(), {.command = "claims laga", .paper = "LAGA, arXiv 2607.17644"}, options);
}

ClaimsReport beyond_claims(const ClaimsOptions& options) {
  static const std::vector<ClaimEntry> entries = {
      {"B1", beyond_latent_schemes}, {"B2", beyond_side_by_side}, {"B5", beyond_shared_columns}};
  return report_of(entries, {.command = "claims beyond", .paper = "Beyond the papers"}, options);
}

nlohmann::json to_json(const ClaimsReport& report) {
  auto claims = nlohmann::json::array();
  for (const Claim& c : report.claims) {
    auto evidence = nlohmann::json::array();
    for (const EvidenceTable& table : c.evidence) evidence.push_back(evidence_json(table));
    claims.push_back({{"id", c.id},
                      {"claim", c.claim},
                      {"published", c.published},
                      {"found", c.found},
                      {"verdict", name_of(c.verdict)},
                      {"reason", c.reason},
                      {"configuration", c.configuration},
                      {"command", c.command},
                      {"evidence", evidence}});
  }
  nlohmann::json json = machine_json(ClaimRuns::kThreadsPerRank, report.seed);
  json.update({{"command", report.command},
               {"paper", report.paper},
               {"quick", report.quick},
               {"claims", claims},
               {"disagreements", report.disagreements},
               {"good", report.good()}});
  return json;
}

}  // namespace isomer
