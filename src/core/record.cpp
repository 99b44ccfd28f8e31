#include "core/record.h"

#include <ctime>

namespace isomer {

namespace {

double read_clock(clockid_t id) {
  timespec now{};
  clock_gettime(id, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

std::string_view name_of(Phase phase) {
  constexpr std::string_view kNames[kNumPhases] = {"setup", "forward", "backward", "gradient_sync", "report"};
  return kNames[static_cast<int>(phase)];
}

std::string_view name_of(Collective collective) {
  constexpr std::string_view kNames[] = {"all_to_all", "all_gather",   "reduce_scatter", "all_reduce",
                                         "broadcast",  "send_receive", "barrier"};
  return kNames[static_cast<int>(collective)];
}

std::int64_t Ledger::bytes_sent(Phase phase) const {
  std::int64_t sum = 0;
  for (const auto& entry : entries_) {
    if (entry.phase == phase) sum += entry.bytes_sent;
  }
  return sum;
}

std::int64_t Ledger::bytes_received(Phase phase) const {
  std::int64_t sum = 0;
  for (const auto& entry : entries_) {
    if (entry.phase == phase) sum += entry.bytes_received;
  }
  return sum;
}

void OpRecord::enter(Phase phase, std::string_view name, const OpCost& cost, double cpu_s, double wall_s) {
  auto& summary = summaries_[{phase, std::string(name)}];
  summary.calls += 1;
  summary.cost.flops += cost.flops;
  summary.cost.bytes_read += cost.bytes_read;
  summary.cost.bytes_written += cost.bytes_written;
  summary.cpu_s += cpu_s;
  summary.wall_s += wall_s;
}

double OpRecord::flops(Phase phase) const {
  double sum = 0;
  for (const auto& [key, summary] : summaries_) {
    if (key.phase == phase) sum += summary.cost.flops;
  }
  return sum;
}

double OpRecord::cpu_s() const {
  double sum = 0;
  for (const auto& [key, summary] : summaries_) sum += summary.cpu_s;
  return sum;
}

double OpRecord::wall_s() const {
  double sum = 0;
  for (const auto& [key, summary] : summaries_) sum += summary.wall_s;
  return sum;
}

double thread_cpu_s() { return read_clock(CLOCK_THREAD_CPUTIME_ID); }
double wall_clock_s() { return read_clock(CLOCK_MONOTONIC); }

}  // namespace isomer
