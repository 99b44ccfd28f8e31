#include "plan/decode_search.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/error.h"
#include "plan/decode_enumerate.h"
#include "plan/explain.h"

namespace isomer {

namespace {

void check(const DecodeProblem& problem, const DecodeSearchOptions& options) {
  if (options.max_devices < 1) {
    invalid_argument("--max-devices {}: at least 1 device decodes", options.max_devices);
  }
  if (problem.context < 1) invalid_argument("--context {}: at least 1 cached token", problem.context);
}

std::vector<DecodeLayout> layouts_of(const DecodeProblem& problem, const DecodeSearchOptions& options) {
  std::vector<DecodeLayout> layouts =
      options.layouts.empty() ? enumerate_decode_layouts(problem.config, options.max_devices) : options.layouts;
  if (!options.include_inexact && options.layouts.empty()) {
    std::erase_if(layouts, [](const DecodeLayout& layout) { return !layout.shards.is_exact(); });
  }
  return layouts;
}

std::vector<std::int64_t> batches_of(const DecodeSearchOptions& options) {
  std::vector<std::int64_t> batches = options.batches.empty() ? default_batches() : options.batches;
  std::sort(batches.begin(), batches.end());
  return batches;
}

/// Two layouts whose axes are the same, options apart.
bool same_axes(const DecodeLayout& a, const DecodeLayout& b) {
  const DecodeShards &x = a.shards, &y = b.shards;
  return a.pp == b.pp && x.scheme == y.scheme && x.kvp == y.kvp && x.tpa == y.tpa &&
         x.latent_shards == y.latent_shards && x.data_parallel == y.data_parallel && x.tpf == y.tpf && x.ep == y.ep;
}

}  // namespace

std::vector<std::int64_t> default_batches(std::int64_t largest) {
  std::vector<std::int64_t> batches;
  for (std::int64_t b = 1; b <= largest; b *= 2) {
    batches.push_back(b);
    if (b >= 2 && b + b / 2 <= largest) batches.push_back(b + b / 2);
  }
  return batches;
}

DecodeSearch search_decode(const DecodeProblem& problem, const Hardware& hardware, const DecodeSearchOptions& options) {
  check(problem, options);
  const auto begin = std::chrono::steady_clock::now();
  DecodeSearch search{.layouts = layouts_of(problem, options)};
  const std::vector<std::int64_t> batches = batches_of(options);
  const auto num_batches = static_cast<std::int64_t>(batches.size());
  StepPricer step_time(problem, hardware);
  for (std::uint32_t index = 0; index < search.layouts.size(); ++index) {
    const DecodeLayout& layout = search.layouts[index];
    search.examined += num_batches;
    if (const Unfit reason = why_unfit(layout, problem.config); reason != Unfit::fits) {
      search.unfit[static_cast<std::size_t>(reason)] += num_batches;
      continue;
    }
    for (std::int64_t i = 0; i < num_batches; ++i) {
      const std::int64_t batch = batches[static_cast<std::size_t>(i)];
      const Unfit reason = why_batch_unfit(problem, hardware, layout, batch);
      if (reason == Unfit::memory) {  // nor does any larger one
        search.unfit[static_cast<std::size_t>(reason)] += num_batches - i;
        break;
      }
      if (reason != Unfit::fits) {
        ++search.unfit[static_cast<std::size_t>(reason)];
        continue;
      }
      search.points.push_back({index, layout.devices(), batch, step_time(layout, batch).total()});
    }
  }
  search.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return search;
}

std::vector<DecodePoint> pareto_frontier(const DecodeSearch& search, const LayoutFilter& filter) {
  std::vector<bool> wanted(search.layouts.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = filter(search.layouts[i]);
  std::vector<DecodePoint> points;
  for (const DecodePoint& point : search.points) {
    if (wanted[point.layout]) points.push_back(point);
  }
  std::sort(points.begin(), points.end(), [](const DecodePoint& a, const DecodePoint& b) {
    if (a.step_s != b.step_s) return a.step_s < b.step_s;
    if (a.per_device() != b.per_device()) return a.per_device() > b.per_device();
    return a.layout < b.layout;  // of equals the first, as best_point has it
  });
  std::vector<DecodePoint> frontier;
  for (const DecodePoint& point : points) {
    if (frontier.empty() || point.per_device() > frontier.back().per_device()) frontier.push_back(point);
  }
  return frontier;
}

bool Objective::prefers(const DecodePoint& a, const DecodePoint& b) const {
  if (quickest && a.step_s != b.step_s) return a.step_s < b.step_s;
  return a.per_device() > b.per_device();
}

std::optional<DecodePoint> best_point(const DecodeSearch& search, const Objective& objective) {
  std::optional<DecodePoint> best;
  for (const DecodePoint& point : search.points) {
    if (objective.ttl_s && point.step_s > *objective.ttl_s) continue;
    if (best && !objective.prefers(point, *best)) continue;
    if (objective.filter(search.layout_of(point))) best = point;
  }
  return best;
}

std::optional<Neighbour> next_best(const DecodeProblem& problem, const Hardware& hardware, const DecodeSearch& search,
                                   const DecodePoint& chosen, const Objective& objective) {
  const DecodeLayout& winner = search.layout_of(chosen);
  Objective others = objective;
  others.filter = [&](const DecodeLayout& layout) { return objective.filter(layout) && !same_axes(layout, winner); };
  const auto next = best_point(search, others);
  if (!next) return std::nullopt;
  // Seconds a step, or device-seconds a token: where it spends more than the chosen one does.
  const auto spent = [&](const DecodePoint& point) {
    auto shares = shares_of(decode_step_time(problem, hardware, search.layout_of(point), point.batch));
    const double scale = objective.quickest ? 1 : point.devices / static_cast<double>(point.batch);
    for (StepShare& share : shares) share.seconds *= scale;
    return shares;
  };
  return Neighbour{*next, fmt::format("{} {}", loses_on(spent(chosen), spent(*next)),
                                      objective.quickest ? "a step" : "of a device a token")};
}

double memory_capacity(const DecodeProblem& problem, const Hardware& hardware) {
  return problem.memory_limit_bytes > 0 ? problem.memory_limit_bytes : hardware.memory_capacity_bytes;
}

std::optional<LeastMemory> least_memory(const DecodeProblem& problem, const Hardware& hardware,
                                        const DecodeSearchOptions& options) {
  std::optional<LeastMemory> least;
  for (const DecodeLayout& layout : layouts_of(problem, options)) {
    if (why_unfit(layout, problem.config) != Unfit::fits) continue;
    for (const std::int64_t batch : batches_of(options)) {
      if (batch % (static_cast<std::int64_t>(layout.shards.data_parallel) * layout.pp) != 0) continue;
      if (problem.context < layout.shards.kvp) continue;
      const DecodeMemory memory = decode_memory(problem, hardware, layout, batch);
      if (!least || memory.total() < least->memory.total()) least = LeastMemory{layout, batch, memory};
      break;
    }
  }
  return least;
}

std::optional<LeastMemory> fewest_devices(const DecodeProblem& problem, const Hardware& hardware,
                                          const DecodeSearchOptions& options) {
  if (!options.layouts.empty()) return std::nullopt;
  const double capacity = memory_capacity(problem, hardware);
  const int most = std::min(hardware.max_devices(), kMaxDecodeDevices);
  DecodeSearchOptions wider = options;
  wider.include_inexact = false;  // never chosen
  for (int devices = 1; devices <= most; devices *= 2) {
    if (devices <= options.max_devices) continue;
    wider.max_devices = devices;
    auto least = least_memory(problem, hardware, wider);
    if (least && least->memory.total() <= capacity) return least;
  }
  return std::nullopt;
}

}  // namespace isomer
