// What the processes of an MPI world tell each other besides their calls: signs of life, sent now and then by each
// communication thread, busy or idle.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/mpi/library.h"
#include "comm/stall_watch.h"
#include "comm/transport.h"

namespace isomer {

/// Tags of Isomer's messages; those of a group are `group id · kNumTags + tag`.
enum class MpiTag : int { header, data, pair_header, pair_data, pair_ack, sign };
inline constexpr int kNumMpiTags = 6;

class MpiWorld : public SignsOfLife {
 public:
  /// `run` tells this run's signs from those of an earlier one.
  MpiWorld(MpiLibrary& library, int run, double timeout_s, const std::atomic<std::uint64_t>& heartbeat);
  ~MpiWorld() override;

  MPI_Comm comm() const { return library_.comm(); }
  int rank() const { return library_.rank(); }
  int size() const { return library_.size(); }

  /// From the rank's own thread: its calls must not wait any longer.
  void abandon() { abandoned_.store(true, std::memory_order_release); }

  // The rest is for the communication thread.

  void begin_wait(const Call& call);
  void end_wait() { waiting_ = false; }
  void completed() { ++completed_; }
  void leave() { leaving_ = true; }
  /// No more MPI calls are made after this.
  void fail(std::string reason) { failure_ = std::move(reason); }
  /// Sends this rank's sign and takes those of others, if it is time to.
  void exchange_signs();
  double interval_s() const { return interval_s_; }

  double timeout_s() const override { return timeout_s_; }
  std::string failure_reason() const override;
  bool has_left(int rank) const override;
  bool is_waiting(int rank) const override { return peer(rank).sign.waiting != 0; }
  std::string doing(int rank) const override;
  std::uint64_t beat(int rank) const override { return peer(rank).sign.beat; }
  std::uint64_t progress() const override;

 private:
  struct Sign {
    std::int32_t run = 0;
    std::int32_t waiting = 0;
    std::int32_t left = 0;
    std::uint64_t beat = 0;
    char call[120] = {};  // begun last
  };
  struct Peer {
    Sign sign;
    double left_since_s = 0;
    Sign sent;  // stays until its request is done
    MPI_Request request = MPI_REQUEST_NULL;
  };
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  void send_signs();
  void take_signs();

  MpiLibrary& library_;
  int run_;
  double timeout_s_;
  double interval_s_;
  double next_s_ = 0;
  const std::atomic<std::uint64_t>& heartbeat_;
  std::atomic<bool> abandoned_{false};
  std::uint64_t completed_ = 0;
  bool leaving_ = false;
  std::string failure_;
  bool waiting_ = false;
  std::string call_;  // begun last
  std::vector<Peer> peers_;
};

}  // namespace isomer
