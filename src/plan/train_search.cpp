#include "plan/train_search.h"

#include <algorithm>
#include <chrono>

namespace isomer {

TrainSearch search_train(const TrainProblem& problem, const Hardware& hardware, int devices,
                         const std::vector<std::string_view>& schemes) {
  const auto begin = std::chrono::steady_clock::now();
  TrainSearch search{.layouts = enumerate_train_layouts(problem.config, devices, schemes)};
  const double capacity = problem.memory_limit_bytes > 0 ? problem.memory_limit_bytes : hardware.memory_capacity_bytes;
  for (std::uint32_t i = 0; i < search.layouts.size(); ++i) {
    const TrainLayout& layout = search.layouts[i];
    ++search.examined;
    TrainUnfit reason = why_unfit(layout, problem.config, problem.seq, problem.batch);
    double bytes = 0;
    if (reason == TrainUnfit::fits) {
      bytes = train_memory(problem, hardware, layout).total();
      if (bytes > capacity) reason = TrainUnfit::memory;
    }
    if (reason != TrainUnfit::fits) {
      ++search.unfit[static_cast<std::size_t>(reason)];
      continue;
    }
    search.points.push_back({i, train_step_time(problem, hardware, layout).total(), bytes});
  }
  std::stable_sort(search.points.begin(), search.points.end(), [](const TrainPoint& a, const TrainPoint& b) {
    return a.step_s != b.step_s ? a.step_s < b.step_s : a.memory_bytes < b.memory_bytes;
  });
  search.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return search;
}

std::optional<TrainPoint> quickest_point(const TrainSearch& search, const TrainFilter& filter) {
  for (const TrainPoint& point : search.points) {
    if (filter(search.layout_of(point))) return point;
  }
  return std::nullopt;
}

std::vector<TrainPoint> memory_frontier(const TrainSearch& search, const TrainFilter& filter) {
  std::vector<TrainPoint> frontier;
  for (const TrainPoint& point : search.points) {  // quickest first
    if (!frontier.empty() && point.memory_bytes >= frontier.back().memory_bytes) continue;
    if (filter(search.layout_of(point))) frontier.push_back(point);
  }
  return frontier;
}

std::string family_of(const TrainLayout& layout) {
  return layout.sequence_ranks() == 1 ? "without SP" : std::string(layout.scheme);
}

bool is_train_baseline(const TrainLayout& layout) {
  return layout.sequence_ranks() == 1 || layout.scheme == "explicit" || layout.scheme == "ring" ||
         layout.scheme == "explicit,ring";
}

bool same_train_axes(const TrainLayout& a, const TrainLayout& b) {
  return a.scheme == b.scheme && a.sp == b.sp && a.groups == b.groups && a.tp == b.tp && a.pp == b.pp && a.dp == b.dp &&
         a.ep == b.ep;
}

}  // namespace isomer
