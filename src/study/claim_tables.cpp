#include "study/claim_tables.h"

#include <algorithm>
#include <cmath>

namespace isomer {

std::map<std::string, double> standing_by_name(const std::vector<StandingTensor>& tensors) {
  std::map<std::string, double> sums;
  for (const StandingTensor& t : tensors) {
    sums[fmt::format("{} ({})", t.name, name_of(t.memory_class))] += static_cast<double>(t.bytes);
  }
  return sums;
}

namespace {

std::map<std::string, double> standing_of(ClaimRuns& runs, ClaimCase& c, std::int64_t seq) {
  c.seq = seq;
  return standing_by_name(runs.dry(c).largest(&RankMeasure::peak_activation_bytes).standing_at_peak);
}

std::string name_of_path(const ClaimCase& c) {
  return fmt::format("{} ({}, {})", c.layout, name_of(c.core), name_of(c.policy));
}

/// Differences of one tensor at each length, largest (at the last) first.
using Differences = std::vector<std::pair<std::string, std::vector<double>>>;

Differences sorted(const std::map<std::string, std::vector<double>>& differences) {
  Differences list(differences.begin(), differences.end());
  std::stable_sort(list.begin(), list.end(),
                   [](const auto& a, const auto& b) { return std::abs(a.second.back()) > std::abs(b.second.back()); });
  return list;
}

}  // namespace

EvidenceTable standing_differences(ClaimRuns& runs, ClaimCase base, ClaimCase other,
                                   const std::vector<std::int64_t>& seqs) {
  EvidenceTable table{
      fmt::format("{} − {}, tensor by tensor at their peaks, MB", name_of_path(other), name_of_path(base)),
      {"tensor", fmt::format("{} at {}", base.layout, seqs.back()),
       fmt::format("{} at {}", other.layout, seqs.back())}};
  std::map<std::string, std::vector<double>> differences;
  std::map<std::string, double> in_base, in_other;
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    in_base = standing_of(runs, base, seqs[i]);
    in_other = standing_of(runs, other, seqs[i]);
    const auto add = [&](const std::string& name, double bytes) {
      differences[name].resize(seqs.size(), 0);
      differences[name][i] += bytes;
    };
    for (const auto& [name, bytes] : in_other) add(name, bytes);
    for (const auto& [name, bytes] : in_base) add(name, -bytes);
    table.header.emplace_back(fmt::format("difference at {}", seqs[i]));
  }
  std::vector<double> total(seqs.size(), 0);
  for (const auto& [name, row] : sorted(differences)) {
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += row[i];
    if (std::all_of(row.begin(), row.end(), [](double bytes) { return bytes == 0; })) continue;
    std::vector<Cell> cells = {name, megabytes(in_base[name]), megabytes(in_other[name])};
    for (double bytes : row) cells.push_back(megabytes(bytes));
    table.rows.push_back(std::move(cells));
  }
  std::vector<Cell> last = {"all", "", ""};
  for (double bytes : total) last.push_back(megabytes(bytes));
  table.rows.push_back(std::move(last));
  return table;
}

}  // namespace isomer
