// isomer claims: what papers claim beside what Isomer finds, each verdict computed from runs and dry runs.
#include "study/claims.h"

#include <unistd.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

#include "apps/isomer/commands.h"
#include "apps/isomer/output_file.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/error.h"

namespace isomer {

namespace {

struct ClaimsArguments {
  std::string json_file, record;
  std::vector<std::string> only;
  std::string seed = "1";
  bool quick = false;
};

/// One line: id, claim, published, found, verdict, command.
std::string line_of(const Claim& c) {
  std::string verdict(name_of(c.verdict));
  if (c.verdict == Verdict::cannot_be_tested_here) verdict += fmt::format(": {}", c.reason);
  return fmt::format("{:<4} {} | published: {} | found: {} | {} | {}\n", c.id, c.claim, c.published, c.found, verdict,
                     c.command);
}

std::string evidence_of(const Claim& c) {
  std::string text = fmt::format("\n== {}: {}\n", c.id, name_of(c.verdict));
  text += fmt::format("   {}\n", c.reason);
  if (!c.configuration.empty()) text += fmt::format("   fixed beforehand: {}\n", c.configuration);
  for (const EvidenceTable& evidence : c.evidence) {
    Table table(evidence.header);
    for (const auto& cells : evidence.rows) {
      std::vector<std::string> row;
      for (const Cell& cell : cells) row.push_back(cell.text);
      table.add(std::move(row));
    }
    text += fmt::format("\n{}\n{}", evidence.title, table.text());
    if (!evidence.note.empty()) text += fmt::format("{}\n", evidence.note);
  }
  return text;
}

void print_report(const ClaimsReport& report) {
  fmt::print("{}: each claim, the figure published, the figure found, the verdict, and the command that shows it\n\n",
             report.paper);
  for (const Claim& c : report.claims) fmt::print("{}", line_of(c));
  for (const Claim& c : report.claims) {
    if (!c.evidence.empty()) fmt::print("{}", evidence_of(c));
  }
  fmt::print(
      "\nMB are decimal. A verdict is computed: reproduced means equal to the last printed digit in the configuration "
      "fixed\n"
      "beforehand; dry runs count bytes and memory tensor by tensor, with one thread a rank (docs/claims.md).\n");
  for (const std::string& what : report.disagreements) fmt::print("DISAGREEMENT inside Isomer: {}\n", what);
}

/// What runs now: a line that is renewed on a terminal; elsewhere a line whenever some seconds have passed.
class ClaimsProgress {
 public:
  void show(const std::string& what) {
    line_.show(what);
    const auto now = std::chrono::steady_clock::now();
    if (isatty(STDERR_FILENO) != 0 || now - last_ < std::chrono::seconds(5)) return;
    last_ = now;
    fmt::print(stderr, "isomer claims: {}\n", what);
  }

 private:
  Progress line_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

int run_claims(ClaimsReport (*find)(const ClaimsOptions&), const ClaimsArguments& a) {
  check_output_file("--json", a.json_file);
  ClaimsReport report;
  {
    ClaimsProgress progress;
    report = find({.only = a.only,
                   .quick = a.quick,
                   .seed = parse_seed(a.seed),
                   .record = a.record,
                   .progress = [&](const std::string& what) { progress.show(what); }});
  }
  print_report(report);
  if (!a.json_file.empty()) write_output_file("--json", a.json_file, to_json(report));
  return report.good() ? 0 : 1;
}

}  // namespace

void add_claims(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("claims", "print each published claim beside what Isomer finds, and the verdict");
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* description, ClaimsReport (*find)(const ClaimsOptions&),
                       const char* example) {
    auto a = std::make_shared<ClaimsArguments>();
    CLI::App* part = command->add_subcommand(name, description);
    part->add_option("--json", a->json_file, "write claims and evidence as JSON");
    part->add_option("--only", a->only, fmt::format("ids, separated by commas ({})", example))->delimiter(',');
    part->add_option("--seed", a->seed, "of weights, inputs and output gradients of real runs")->capture_default_str();
    part->add_option("--record", a->record, "run long experiments anew and write their recordings to this directory");
    part->add_flag("--quick", a->quick, "real runs at tiny sizes, short sweeps");
    part->callback([a, find, &exit_code] { exit_code = run_claims(find, *a); });
  };
  add("laga", "LAGA (arXiv 2607.17644): sequence-parallel training of latent attention", laga_claims, "L1,L4");
  add("beyond", "what none of the papers has: latent-gather and latent-ring, shared columns of a sliced latent",
      beyond_claims, "B1");
  add("helix", "Helix (arXiv 2507.07120): decoding with a sharded cache", helix_claims, "H5,H6");
  add("tpla", "TPLA (arXiv 2508.15881): slices of the latent; quality on a small model, speeds as priced", tpla_claims,
      "T3,T4");
}

}  // namespace isomer
