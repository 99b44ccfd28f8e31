#include "study/recordings.h"

#include <cstdlib>
#include <filesystem>

#include "core/error.h"
#include "study/claim_runs.h"
#include "study/machine.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

/// Processes that wanted a core over the last minute; 0 where the system doesn't say.
double load_average() {
  double load = 0;
  return getloadavg(&load, 1) == 1 ? load : 0;
}

}  // namespace

nlohmann::json recording(const ClaimsOptions& options, const std::string& name, const std::string& command,
                         const std::function<nlohmann::json()>& make) {
  if (options.record.empty()) {
    const std::string_view text = embedded_recording(name);
    if (text.empty()) return {};
    try {
      return nlohmann::json::parse(text);
    } catch (const nlohmann::json::exception& error) {
      throw Error(fmt::format("the recording '{}' that this build carries: {}", name, error.what()));
    }
  }
  nlohmann::json recorded = machine_json(ClaimRuns::kThreadsPerRank, options.seed);
  recorded.update({{"command", command}, {"quick", options.quick}, {"load_average_before", load_average()}});
  recorded.update(make());
  recorded["load_average_after"] = load_average();
  const std::filesystem::path directory(options.record);
  std::error_code code;
  std::filesystem::create_directories(directory, code);
  write_text_atomically(directory / (name + ".json"), recorded.dump(1) + "\n");
  return recorded;
}

Claim without_recording(Claim claim) {
  claim.verdict = Verdict::cannot_be_tested_here;
  claim.found = std::string("-");
  claim.reason = fmt::format("this build carries no recording; make one with {}", claim.command);
  return claim;
}

std::string origin_of(const nlohmann::json& recorded) {
  return fmt::format("recorded by `{}` on {}, {} cores, load average {:.1f} to {:.1f}", recorded.value("command", "?"),
                     recorded.value("processor", "?"), recorded.value("cores", 0),
                     recorded.value("load_average_before", 0.0), recorded.value("load_average_after", 0.0));
}

}  // namespace isomer
