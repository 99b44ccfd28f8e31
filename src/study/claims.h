// Published claims beside what Isomer finds. A verdict is computed from runs and dry runs by `judge`, never typed in,
// and every variant that was tried stands in the evidence.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace isomer {

enum class Verdict : std::uint8_t {
  reproduced,
  reproduced_by_another_convention,
  explained_otherwise,
  refuted,
  cannot_be_tested_here
};
std::string_view name_of(Verdict verdict);

/// True if `found`, rounded to as many decimals as `published` prints, is `published` ("587.2", "9248").
bool as_printed(double found, std::string_view published);
/// The same for whole rows of figures.
bool all_as_printed(const std::vector<double>& found, const std::vector<std::string>& published);

/// What a verdict is computed from.
struct Judgement {
  bool fixed_agrees = false;       // the configuration fixed beforehand gives the published figure to its last digit
  bool other_agrees = false;       // another convention, named and printed, does
  bool explanation_holds = false;  // the figure differs, and a tested explanation accounts for it
};
Verdict judge(const Judgement& judgement);

/// One entry of an evidence table: text for people, and the number behind it in the unit of the column's title.
struct Cell {
  std::string text;
  std::optional<double> number;

  Cell(std::string words) : text(std::move(words)) {}  // NOLINT(google-explicit-constructor)
  Cell(const char* words) : text(words) {}             // NOLINT(google-explicit-constructor)
  Cell(double value, int decimals);
};
/// Bytes as decimal megabytes, a count, or yes and no.
Cell megabytes(double bytes, int decimals = 1);
Cell count_cell(std::int64_t count);
Cell yes_no(bool value);
Cell scientific(double value);

struct EvidenceTable {
  std::string title;
  std::vector<std::string> header;
  std::vector<std::vector<Cell>> rows;
  std::string note;  // below the table; may be empty
};

struct Claim {
  std::string id;         // "L1"
  std::string claim;      // what is claimed, in a sentence
  std::string published;  // the figures as printed
  std::string found;      // Isomer's
  Verdict verdict = Verdict::refuted;
  std::string reason;         // why this verdict
  std::string configuration;  // fixed before the run
  std::string command;        // shows it
  std::vector<EvidenceTable> evidence;
};

struct ClaimsOptions {
  std::vector<std::string> only;  // ids; empty: all
  bool quick = false;             // real runs at tiny sizes
  std::uint64_t seed = 1;
  std::string record;  // a directory: long experiments are run and recorded there; empty: recordings are read
  std::function<void(const std::string&)> progress = [](const std::string&) {};
};

struct ClaimsReport {
  std::string command;  // "claims laga"
  std::string paper;
  std::vector<Claim> claims;
  std::vector<std::string> disagreements;  // inside Isomer: counted ≠ closed form, measured ≠ dry run
  std::uint64_t seed = 1;
  bool quick = false;
  bool good() const { return disagreements.empty(); }
};

/// The claims of LAGA (arXiv 2607.17644), and what no paper has. Throw std::invalid_argument for an unknown id.
ClaimsReport laga_claims(const ClaimsOptions& options);
ClaimsReport beyond_claims(const ClaimsOptions& options);
/// The claims of Helix (arXiv 2507.07120): those that a planner can look at; others say that they wait.
ClaimsReport helix_claims(const ClaimsOptions& options);
/// The claims of TPLA (arXiv 2508.15881): speeds as priced; the others say that they wait.
ClaimsReport tpla_claims(const ClaimsOptions& options);

/// The JSON twin of the printed report.
nlohmann::json to_json(const ClaimsReport& report);

}  // namespace isomer
