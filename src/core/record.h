// The record of one rank: which bytes went over the wire (the ledger), which operations ran (FLOPs, bytes, time),
// and in which phase. Memory has its own record (memory_record.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace isomer {

enum class Phase : std::uint8_t { setup, forward, backward, gradient_sync, report };
inline constexpr int kNumPhases = 5;
std::string_view name_of(Phase phase);

enum class Collective : std::uint8_t {
  all_to_all,
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  send_receive,
  barrier
};
std::string_view name_of(Collective collective);

/// One collective of one rank. Bytes are logical, by the direct algorithm, and only those between *different* ranks.
struct LedgerEntry {
  Collective collective;
  std::string tensor;
  Phase phase;
  int group_size;
  std::int64_t bytes_sent;
  std::int64_t bytes_received;
  std::int64_t messages;  // non-empty sends to other ranks
};

class Ledger {
 public:
  void enter(LedgerEntry entry) { entries_.push_back(std::move(entry)); }
  const std::vector<LedgerEntry>& entries() const { return entries_; }
  std::int64_t bytes_sent(Phase phase) const;
  std::int64_t bytes_received(Phase phase) const;
  void clear() { entries_.clear(); }

 private:
  std::vector<LedgerEntry> entries_;
};

/// What an operation costs by its shape alone; made by src/cost, the only owner of such formulas.
struct OpCost {
  double flops = 0;  // multiply-adds count as two
  double bytes_read = 0;
  double bytes_written = 0;
};

/// All calls of one operation in one phase.
struct OpSummary {
  std::int64_t calls = 0;
  OpCost cost;
  double cpu_s = 0;  // processor time of the rank's thread
  double wall_s = 0;
};

class OpRecord {
 public:
  struct Key {
    Phase phase;
    std::string name;
    auto operator<=>(const Key&) const = default;
  };
  void enter(Phase phase, std::string_view name, const OpCost& cost, double cpu_s, double wall_s);
  const std::map<Key, OpSummary>& summaries() const { return summaries_; }
  /// Wall time that the rank's thread waited for a collective.
  void enter_wait(double wall_s) { waiting_wall_s_ += wall_s; }
  double waiting_wall_s() const { return waiting_wall_s_; }
  double flops(Phase phase) const;
  double cpu_s() const;
  double wall_s() const;
  void clear() {
    summaries_.clear();
    waiting_wall_s_ = 0;
  }

 private:
  double waiting_wall_s_ = 0;
  std::map<Key, OpSummary> summaries_;
};

/// Seconds of processor time used by the calling thread.
double thread_cpu_s();
/// Seconds of a monotonic clock.
double wall_clock_s();

}  // namespace isomer
