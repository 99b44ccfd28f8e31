// L11: every scheme trains the same model. Judged by docs/data/loss_curves.json, which --record makes anew.
#include <algorithm>
#include <cmath>
#include <future>
#include <map>

#include "study/claims_laga.h"
#include "study/recordings.h"
#include "study/training_study.h"

namespace isomer {

namespace {

/// Set before the first run: of the mean loss of the last tenth of the steps.
constexpr double kEndpointBound = 0.005;
constexpr int kFixedRanks = 2;

nlohmann::json parting_json(const std::string& a, const std::string& b, const Parting& parting) {
  return {{"a", a},
          {"b", b},
          {"first_step_that_differs", parting.first_step},
          {"largest_loss_difference", parting.largest},
          {"end_loss_difference", parting.at_end},
          {"largest_weight_difference", parting.weights_largest},
          {"identical", parting.identical}};
}

struct NamedRun {
  std::string name;
  StudyRun run;
};

/// Some at a time: ranks that share cores wait for each other most of the time. No figure here is a time.
std::map<std::string, StudyResult> run_all(const ClaimRuns& runs, const TrainingStudy& study,
                                           const std::vector<NamedRun>& all) {
  constexpr std::size_t kAtOnce = 10;
  std::map<std::string, StudyResult> results;
  for (std::size_t first = 0; first < all.size(); first += kAtOnce) {
    std::vector<std::future<StudyResult>> running;
    const std::size_t end = std::min(all.size(), first + kAtOnce);
    for (std::size_t i = first; i < end; ++i) {
      running.push_back(std::async(std::launch::async, [&study, &run = all[i].run] { return study.run(run); }));
    }
    for (std::size_t i = first; i < end; ++i) {
      runs.progress(fmt::format("training {}", all[i].name));
      results.emplace(all[i].name, running[i - first].get());
    }
  }
  return results;
}

nlohmann::json record_loss_curves(ClaimRuns& runs) {
  const TrainingStudy study(runs.quick(), runs.seed());
  const std::vector<std::string> layouts =
      runs.quick() ? std::vector<std::string>{"explicit", "absorbed", "laga"}
                   : std::vector<std::string>{"explicit", "absorbed", "laga", "ring", "latent-gather", "latent-ring"};
  const std::vector<int> ranks = runs.quick() ? std::vector<int>{1, 2} : std::vector<int>{1, 2, 4};
  std::vector<NamedRun> all;
  for (const int p : ranks) {
    for (const std::string& layout : layouts) {
      all.push_back({fmt::format("{}:{}", layout, p), {.layout = layout, .ranks = p, .seed = runs.seed()}});
    }
  }
  all.push_back({"another seed", {.layout = "explicit", .ranks = 1, .seed = runs.seed() + 1}});
  const std::map<std::string, StudyResult> results = run_all(runs, study, all);
  auto curves = nlohmann::json::array();
  for (const auto& [name, run] : all) {
    const std::vector<double>& losses = results.at(name).losses;
    curves.push_back({{"name", name},
                      {"layout", run.layout},
                      {"ranks", run.ranks},
                      {"seed", run.seed},
                      {"end_loss", end_loss(losses)},
                      {"losses", losses}});
  }
  auto pairs = nlohmann::json::array();
  const auto pair = [&](const std::string& a, const std::string& b) {
    pairs.push_back(parting_json(a, b, parting_of(results.at(a), results.at(b))));
  };
  for (const int p : ranks) {
    pair(fmt::format("laga:{}", p), fmt::format("absorbed:{}", p));
    pair(fmt::format("laga:{}", p), fmt::format("explicit:{}", p));
    pair(fmt::format("absorbed:{}", p), fmt::format("explicit:{}", p));
    for (const std::string& layout : layouts) {
      if (p > 1 || (layout != "explicit" && layout != "absorbed" && layout != "laga"))
        pair(fmt::format("{}:{}", layout, p), "explicit:1");
    }
  }
  pair("another seed", "explicit:1");
  return {{"settings", to_json(study.settings())}, {"curves", curves}, {"pairs", pairs}};
}

const nlohmann::json& pair_of(const nlohmann::json& recorded, const std::string& a, const std::string& b) {
  for (const auto& pair : recorded.at("pairs")) {
    if (pair.at("a") == a && pair.at("b") == b) return pair;
  }
  throw Error(fmt::format("the recording of the loss curves has no pair {} and {}", a, b));
}

EvidenceTable table_of_pairs(const nlohmann::json& recorded) {
  EvidenceTable table{"runs of the same seed, compared step by step and weight by weight",
                      {"run", "beside", "bit for bit", "first step that differs", "largest loss difference",
                       "at the end", "largest weight difference"}};
  for (const auto& pair : recorded.at("pairs")) {
    const auto first = pair.at("first_step_that_differs").get<std::int64_t>();
    table.rows.push_back({pair.at("a").get<std::string>(), pair.at("b").get<std::string>(),
                          yes_no(pair.at("identical").get<bool>()), first > 0 ? count_cell(first) : Cell("none"),
                          scientific(pair.at("largest_loss_difference").get<double>()),
                          scientific(pair.at("end_loss_difference").get<double>()),
                          scientific(pair.at("largest_weight_difference").get<double>())});
  }
  table.note = origin_of(recorded);
  return table;
}

EvidenceTable table_of_curves(const nlohmann::json& recorded) {
  EvidenceTable table{"loss, nats a token", {"run"}};
  const auto num_steps = recorded.at("settings").at("steps").get<std::size_t>();
  std::vector<std::size_t> steps;
  for (std::size_t part = 0; part <= 4; ++part) steps.push_back(std::max<std::size_t>(1, num_steps * part / 4));
  for (const std::size_t step : steps) table.header.push_back(fmt::format("step {}", step));
  table.header.emplace_back("mean of the last tenth");
  for (const auto& curve : recorded.at("curves")) {
    std::vector<Cell> row = {curve.at("name").get<std::string>()};
    for (const std::size_t step : steps) row.emplace_back(curve.at("losses").at(step - 1).get<double>(), 6);
    row.emplace_back(curve.at("end_loss").get<double>(), 6);
    table.rows.push_back(std::move(row));
  }
  return table;
}

/// The largest relative difference of an endpoint from one rank's, over all runs of the first seed.
double largest_endpoint_difference(const nlohmann::json& recorded) {
  const double reference = recorded.at("curves").at(0).at("end_loss").get<double>();
  double largest = 0;
  for (const auto& curve : recorded.at("curves")) {
    if (curve.at("name") == "another seed") continue;
    largest = std::max(largest, std::abs(curve.at("end_loss").get<double>() - reference) / reference);
  }
  return largest;
}

std::string in_words(const nlohmann::json& pair) {
  if (pair.at("identical").get<bool>()) return "bit-identical";
  return fmt::format("part at step {}, by up to {:.1e} nats", pair.at("first_step_that_differs").get<std::int64_t>(),
                     pair.at("largest_loss_difference").get<double>());
}

}  // namespace

Claim laga_training(ClaimRuns& runs) {
  Claim claim{
      .claim =
          "multi-step training reaches the same loss; LAGA and absorbed agree bit for bit, explicit differs by noise",
      .published = "the same loss; LAGA ≡ absorbed",
      .configuration = fmt::format("SP={}, float32, fused, the same seed: bits of every loss and of all weights at the "
                                   "end; endpoints of all schemes at SP 1, 2, 4 within {:.1f} % of one rank's",
                                   kFixedRanks, 100 * kEndpointBound),
      .command = "isomer claims laga --only L11 --record docs/data"};
  const nlohmann::json recorded =
      recording(runs.options(), "loss_curves", claim.command, [&] { return record_loss_curves(runs); });
  if (recorded.is_null()) return without_recording(std::move(claim));
  const double endpoint = largest_endpoint_difference(recorded);
  const auto pair = [&](const char* a, const char* b, int p) {
    return pair_of(recorded, fmt::format("{}:{}", a, p), fmt::format("{}:{}", b, p));
  };
  const nlohmann::json as_claimed = pair("laga", "absorbed", kFixedRanks);
  const nlohmann::json instead = pair("laga", "explicit", 1);
  const bool same_end = endpoint <= kEndpointBound;
  claim.found = fmt::format(
      "endpoints within {:.3f} % of one rank's; SP={}: LAGA and absorbed {}, LAGA and explicit {}; SP=1: LAGA and "
      "explicit {}",
      100 * endpoint, kFixedRanks, in_words(as_claimed), in_words(pair("laga", "explicit", kFixedRanks)),
      in_words(instead));
  claim.verdict = judge({.fixed_agrees = same_end && as_claimed.at("identical").get<bool>()});
  claim.reason = fmt::format(
      "the same endpoint is {}; absorbed re-associates q·(W·c) to (q·W)·c and rounds otherwise, LAGA does explicit's "
      "products, so that the bits are {}. Another seed ends {:.1e} away",
      same_end ? "reproduced" : "not reproduced",
      instead.at("identical").get<bool>() ? "explicit's on one rank, not absorbed's" : "neither's",
      pair_of(recorded, "another seed", "explicit:1").at("end_loss_difference").get<double>());
  claim.evidence = {table_of_pairs(recorded), table_of_curves(recorded)};
  return claim;
}

}  // namespace isomer
