#include "plan/train_search.h"

#include <algorithm>
#include <chrono>

namespace isomer {

namespace {

/// What an attention block saves, once for layouts that differ in what is around it. Layouts come in the order in which
/// they are enumerated.
class AttentionWork {
 public:
  explicit AttentionWork(const TrainProblem& problem) : problem_(problem) {}
  const SchemeWork& operator()(const TrainLayout& layout) {
    if (layout.scheme != of_.scheme || layout.sp != of_.sp || layout.groups != of_.groups || layout.tp != of_.tp) {
      of_ = layout;
      known_ = {};
    }
    auto& work = known_[static_cast<std::size_t>(layout.recompute)];
    if (!work) work = train_attention(problem_, layout).work;
    return *work;
  }

 private:
  const TrainProblem& problem_;
  TrainLayout of_{.scheme = ""};
  std::array<std::optional<SchemeWork>, 4> known_;  // by recomputation
};

double capacity_of(const TrainProblem& problem, const Hardware& hardware) {
  return problem.memory_limit_bytes > 0 ? problem.memory_limit_bytes : hardware.memory_capacity_bytes;
}

/// Bytes of a device; nothing where they exceed its capacity. States and FFN alone mostly do, and cost less to count
/// than what the attention saves.
std::optional<double> bytes_that_fit(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout,
                                     AttentionWork& attention) {
  const double capacity = capacity_of(problem, hardware);
  if (train_memory(problem, hardware, layout, SchemeWork{}).total() > capacity) return std::nullopt;
  const double bytes = train_memory(problem, hardware, layout, attention(layout)).total();
  return bytes > capacity ? std::nullopt : std::optional(bytes);
}

}  // namespace

TrainSearch search_train(const TrainProblem& problem, const Hardware& hardware, int devices,
                         const std::vector<std::string_view>& schemes) {
  const auto begin = std::chrono::steady_clock::now();
  TrainSearch search{.layouts = enumerate_train_layouts(problem.config, devices, schemes)};
  AttentionWork attention(problem);
  for (std::uint32_t i = 0; i < search.layouts.size(); ++i) {
    const TrainLayout& layout = search.layouts[i];
    ++search.examined;
    TrainUnfit reason = why_unfit(layout, problem.config, problem.seq, problem.batch);
    std::optional<double> bytes;
    if (reason == TrainUnfit::fits) {
      bytes = bytes_that_fit(problem, hardware, layout, attention);
      if (!bytes) reason = TrainUnfit::memory;
    }
    if (reason != TrainUnfit::fits) {
      ++search.unfit[static_cast<std::size_t>(reason)];
      continue;
    }
    search.points.push_back({i, train_step_time(problem, hardware, layout).total(), *bytes});
  }
  std::stable_sort(search.points.begin(), search.points.end(), [](const TrainPoint& a, const TrainPoint& b) {
    return a.step_s != b.step_s ? a.step_s < b.step_s : a.memory_bytes < b.memory_bytes;
  });
  search.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return search;
}

std::optional<TrainLayout> fewest_train_devices(const TrainProblem& problem, const Hardware& hardware,
                                                const std::vector<std::string_view>& schemes) {
  const int most = std::min(hardware.max_devices(), kMaxTrainDevices);
  AttentionWork attention(problem);
  for (int devices = 1; devices <= most; devices *= 2) {
    for (const TrainLayout& layout : enumerate_train_layouts(problem.config, devices, schemes)) {
      if (why_unfit(layout, problem.config, problem.seq, problem.batch) != TrainUnfit::fits) continue;
      if (bytes_that_fit(problem, hardware, layout, attention)) return layout;
    }
  }
  return std::nullopt;
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
