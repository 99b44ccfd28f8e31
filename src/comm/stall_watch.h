// How a rank that waits tells a slow peer from a stalled one: a peer is alive while it does operations, or while it
// waits itself and any rank of the world does.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace isomer {

/// What a rank can see of the others. Ranks are world ranks.
class SignsOfLife {
 public:
  virtual ~SignsOfLife() = default;
  virtual double timeout_s() const = 0;
  /// Why the run has failed, empty if it has not.
  virtual std::string failure_reason() const = 0;
  virtual bool has_left(int rank) const = 0;
  virtual bool is_waiting(int rank) const = 0;
  /// " (it waits in all_gather 'k' (forward))", or nothing.
  virtual std::string doing(int rank) const = 0;
  /// Grows while the rank gets anywhere; progress() while any rank does.
  virtual std::uint64_t beat(int rank) const = 0;
  virtual std::uint64_t progress() const = 0;
};

/// Watches the peers that one waiting call misses.
class StallWatch {
 public:
  explicit StallWatch(const SignsOfLife& signs) : signs_(signs) {}
  /// Why to give up waiting for `rank`: the run failed, it left, or it has stalled. Empty: wait on.
  std::string verdict(int rank);

 private:
  struct Seen {
    std::uint64_t value = 0;
    double since_s = 0;
  };
  /// Seconds since `value` was first seen unchanged.
  static double age_s(Seen& seen, std::uint64_t value, double now_s);

  const SignsOfLife& signs_;
  std::map<int, Seen> beats_;
  Seen progress_;
};

}  // namespace isomer
