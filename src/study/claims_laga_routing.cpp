// L14: rounding noise flips the routing of a mixture of experts. Judged by docs/data/routing_noise.json, which --record
// makes anew.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "study/claims_laga.h"
#include "study/recordings.h"
#include "study/training_study.h"

namespace isomer {

namespace {

/// Set before the first run. A cliff: at the step where routing first differs, the loss difference grows at least so
/// many times over the largest before it; and the flips cause the parting if replaying the routing leaves a so many
/// times smaller difference.
constexpr double kCliff = 10, kCause = 10;

struct Noise {
  std::string name;
  StudyRun run;
};

std::vector<Noise> noises(std::uint64_t seed) {
  return {{"one weight moved by one ulp", {.layout = "laga", .ranks = 1, .seed = seed, .moves_one_weight = true}},
          {"another order of summation (ring:2)", {.layout = "ring", .ranks = 2, .seed = seed}}};
}

nlohmann::json flips_json(const TrainingStudy& study, const RoutingHistory& a, const RoutingHistory& b) {
  nlohmann::json layers = nlohmann::json::object();
  for (const std::int64_t layer : study.routed_layers()) {
    std::vector<std::int64_t> flips;
    for (std::int64_t step = 0; step < a.num_steps(); ++step) {
      flips.push_back(count_flips(a, b, step, layer, study.config().moe.num_experts_per_tok));
    }
    layers[fmt::format("{}", layer)] = flips;
  }
  return layers;
}

std::vector<double> differences(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> differences(a.size());
  std::transform(a.begin(), a.end(), b.begin(), differences.begin(),
                 [](double x, double y) { return std::abs(x - y); });
  return differences;
}

nlohmann::json record_noise(ClaimRuns& runs) {
  const TrainingStudy study(runs.quick(), runs.seed());
  runs.progress("training laga:1");
  const StudyResult base = study.run({.layout = "laga", .ranks = 1, .seed = runs.seed()});
  auto pairs = nlohmann::json::array();
  for (auto& [name, run] : noises(runs.seed())) {
    runs.progress(fmt::format("training with {}", name));
    const StudyResult free = study.run(run);
    run.replay = &base.routing;
    runs.progress(fmt::format("training with {}, routing replayed", name));
    const StudyResult replayed = study.run(run);
    pairs.push_back({{"name", name},
                     {"layout", run.layout},
                     {"ranks", run.ranks},
                     {"flips", flips_json(study, base.routing, free.routing)},
                     {"flips_replayed", flips_json(study, base.routing, replayed.routing)},
                     {"loss_difference", differences(base.losses, free.losses)},
                     {"loss_difference_replayed", differences(base.losses, replayed.losses)}});
  }
  return {{"settings", to_json(study.settings())},
          {"tokens_a_step", study.settings().seq * study.settings().batch},
          {"losses", base.losses},
          {"pairs", pairs}};
}

/// What one pair shows.
struct Shown {
  std::string name;
  std::int64_t first_flip = 0;  // step from 1; 0: none
  std::int64_t total = 0;       // flips of all steps and layers
  std::int64_t replayed_flips = 0;
  double before = 0, at_flip = 0;    // largest loss difference before the first flip, and the largest of the ten
                                     // steps from it on
  double at_flip_replayed = 0;       // the same steps, routing replayed
  double end = 0, end_replayed = 0;  // mean loss difference over the last tenth
  double share_at_end = 0;           // of the choices of the last tenth that differ
  double cliff() const { return before > 0 ? at_flip / before : 0; }
  double cliff_replayed() const { return before > 0 ? at_flip_replayed / before : 0; }
  double cause() const { return end_replayed > 0 ? end / end_replayed : 0; }
};

std::vector<std::int64_t> flips_by_step(const nlohmann::json& layers) {
  std::vector<std::int64_t> sums;
  for (const auto& [layer, flips] : layers.items()) {
    sums.resize(flips.size());
    for (std::size_t step = 0; step < flips.size(); ++step) sums[step] += flips[step].get<std::int64_t>();
  }
  return sums;
}

Shown shown_by(const nlohmann::json& pair, double tokens_a_step) {
  Shown s{.name = pair.at("name").get<std::string>()};
  const auto flips = flips_by_step(pair.at("flips")), replayed = flips_by_step(pair.at("flips_replayed"));
  const auto loss = pair.at("loss_difference").get<std::vector<double>>();
  const auto loss_replayed = pair.at("loss_difference_replayed").get<std::vector<double>>();
  s.total = std::accumulate(flips.begin(), flips.end(), std::int64_t{0});
  s.replayed_flips = std::accumulate(replayed.begin(), replayed.end(), std::int64_t{0});
  const auto first = std::find_if(flips.begin(), flips.end(), [](std::int64_t f) { return f > 0; });
  const auto at = static_cast<std::ptrdiff_t>(first - flips.begin());
  if (first != flips.end()) {
    s.first_flip = at + 1;
    if (at > 0) s.before = *std::max_element(loss.begin(), loss.begin() + at);
    const auto steps = std::min<std::ptrdiff_t>(10, static_cast<std::ptrdiff_t>(loss.size()) - at);
    s.at_flip = *std::max_element(loss.begin() + at, loss.begin() + at + steps);
    s.at_flip_replayed = *std::max_element(loss_replayed.begin() + at, loss_replayed.begin() + at + steps);
  }
  s.end = end_loss(loss);
  s.end_replayed = end_loss(loss_replayed);
  const std::vector<double> as_doubles(flips.begin(), flips.end());
  s.share_at_end = end_loss(as_doubles) / (tokens_a_step * static_cast<double>(pair.at("flips").size()));
  return s;
}

EvidenceTable summary_of(const std::vector<Shown>& all, const nlohmann::json& recorded) {
  EvidenceTable table{
      "against the same run without the change; loss differences in nats",
      {"change", "first flip, step", "flips in all", "of choices at the end, %", "largest difference before",
       "within ten steps of it", "the same, replayed", "at the end", "at the end, replayed", "flips, replayed"}};
  for (const Shown& s : all) {
    table.rows.push_back({s.name, count_cell(s.first_flip), count_cell(s.total), Cell(100 * s.share_at_end, 2),
                          scientific(s.before), scientific(s.at_flip), scientific(s.at_flip_replayed),
                          scientific(s.end), scientific(s.end_replayed), count_cell(s.replayed_flips)});
  }
  table.note = origin_of(recorded);
  return table;
}

EvidenceTable steps_of(const nlohmann::json& pair) {
  EvidenceTable table{pair.at("name").get<std::string>(), {"step"}};
  for (const auto& [layer, flips] : pair.at("flips").items()) table.header.push_back("flips, layer " + layer);
  table.header.emplace_back("loss difference");
  table.header.emplace_back("loss difference, replayed");
  const std::size_t steps = pair.at("loss_difference").size(), rows = std::min<std::size_t>(steps, 20);
  for (std::size_t row = 1; row <= rows; ++row) {
    const std::size_t step = steps * row / rows;
    std::vector<Cell> cells = {count_cell(static_cast<std::int64_t>(step))};
    for (const auto& [layer, flips] : pair.at("flips").items()) {
      cells.push_back(count_cell(flips.at(step - 1).get<std::int64_t>()));
    }
    cells.push_back(scientific(pair.at("loss_difference").at(step - 1).get<double>()));
    cells.push_back(scientific(pair.at("loss_difference_replayed").at(step - 1).get<double>()));
    table.rows.push_back(std::move(cells));
  }
  return table;
}

}  // namespace

Claim laga_routing_noise(ClaimRuns& runs) {
  Claim claim{
      .claim = "floating-point noise flips MoE routing, and loss curves part in cliffs",
      .published = "-",
      .configuration = fmt::format(
          "float32; flips occur; the loss difference grows {:.0f}× within ten steps of the first flip; replaying "
          "the routing leaves a {:.0f}× smaller one at the end; for both changes",
          kCliff, kCause),
      .command = "isomer claims laga --only L14 --record docs/data"};
  const nlohmann::json recorded =
      recording(runs.options(), "routing_noise", claim.command, [&] { return record_noise(runs); });
  if (recorded.is_null()) return without_recording(std::move(claim));
  std::vector<Shown> all;
  for (const auto& pair : recorded.at("pairs")) {
    all.push_back(shown_by(pair, recorded.at("tokens_a_step").get<double>()));
    if (all.back().replayed_flips != 0) {
      runs.disagree(fmt::format("{}: {} choices differ though replayed", all.back().name, all.back().replayed_flips));
    }
  }
  const auto all_of = [&](auto&& holds) { return std::all_of(all.begin(), all.end(), holds); };
  const bool flips = all_of([](const Shown& s) { return s.first_flip > 0; });
  const bool cliffs = all_of([](const Shown& s) { return s.cliff() >= kCliff; });
  const bool cause = all_of([](const Shown& s) { return s.cause() >= kCause; });
  for (const Shown& s : all) {
    claim.found += fmt::format(
        "{}{}: first flip at step {}, {:.1f} % of choices at the end; loss {:.0e} apart before, {:.0e} within ten "
        "steps, "
        "{:.0e} at the end ({:.0e} replayed)",
        claim.found.empty() ? "" : "; ", s.name, s.first_flip, 100 * s.share_at_end, s.before, s.at_flip, s.end,
        s.end_replayed);
  }
  claim.verdict = judge({.fixed_agrees = flips && cliffs && cause, .explanation_holds = flips && (cliffs || cause)});
  double replayed_growth = 0, least_cause = all.front().cause();
  for (const Shown& s : all) {
    replayed_growth = std::max(replayed_growth, s.cliff_replayed());
    least_cause = std::min(least_cause, s.cause());
  }
  claim.reason = fmt::format(
      "routing flips: {}; the loss difference grows {:.0f}× or more by the first flip: {}, but up to {:.0f}× with the "
      "routing replayed, too; the flips keep the curves {:.1f}× or more further apart at the end ({:.0f}× was asked): "
      "{}",
      flips ? "yes" : "no", kCliff, cliffs ? "yes" : "no", replayed_growth, least_cause, kCause, cause ? "yes" : "no");
  claim.evidence = {summary_of(all, recorded)};
  for (const auto& pair : recorded.at("pairs")) claim.evidence.push_back(steps_of(pair));
  return claim;
}

}  // namespace isomer
