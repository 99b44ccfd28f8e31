// Every byte that leaves a rank goes through Communicator, is entered in the rank's ledger with its collective, its
// tensor's name and its phase, and is timed by the link model. Backends (threads/, mpi/, and the dry run) implement
// only `Transport`: moving strided blocks between ranks. Sums are done here, locally and in rank order, so every
// backend gives the same bits.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

class Transport;

/// A collective under way. Holds its tensors alive. Waiting twice does nothing; the destructor waits.
class Work {
 public:
  struct State;
  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  Work(Work&&) = default;
  Work& operator=(Work&& other) noexcept;
  ~Work();
  /// Returns when the received data may be read and the sent data overwritten; moves the rank's clock.
  /// Throws isomer::Error that names rank and call if a peer failed, left or stalled.
  void wait();

 private:
  std::shared_ptr<State> state_;
};

/// The ranks of one group as one of them sees it. Every method is collective over the group unless it says otherwise,
/// and must be called by all its ranks in the same order with matching sizes.
///
/// A tensor may be any view that is a stack of equal contiguous rows at one or two strides ([t, h/P, w] cut out of [t,
/// h, w + u], say): nothing is packed. In a dry run nothing moves, and only the ledger is written.
class Communicator {
 public:
  Communicator(RankContext& ctx, std::shared_ptr<Transport> transport);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;

  /// send[j] goes to rank j; receive[j] comes from rank j; sizes may differ (also 0). send[rank()] is copied to
  /// receive[rank()] and not counted. Sends (Σ_{j≠rank} bytes of send[j]).
  Work issue_all_to_all(std::string_view tensor, std::span<const Tensor> send, std::span<const Tensor> receive);
  /// Every rank gets every rank's `mine`; receive[j] from rank j. Sends (size−1)·bytes(mine).
  Work issue_all_gather(std::string_view tensor, const Tensor& mine, std::span<const Tensor> receive);
  /// Not collective: to and from one peer (≠ rank()); the peer issues the counterpart. FIFO order per rank, a
  /// neighbour exchange is issue_send_receive on both sides, which can't deadlock.
  Work issue_send_receive(std::string_view tensor, const Tensor& send, int destination, const Tensor& receive,
                          int source);
  Work issue_send(std::string_view tensor, const Tensor& send, int destination);
  Work issue_receive(std::string_view tensor, const Tensor& receive, int source);

  void all_to_all(std::string_view tensor, std::span<const Tensor> send, std::span<const Tensor> receive);
  void all_gather(std::string_view tensor, const Tensor& mine, std::span<const Tensor> receive);
  /// out = Σ_j (rank j's send[rank()]), added in rank order in float32 (float64 for float64) and rounded once to out's
  /// dtype. Stages the received shares in a communication tensor. Sends Σ_{j≠rank} bytes of send[j].
  void reduce_scatter(std::string_view tensor, std::span<const Tensor> send, const Tensor& out);
  /// In place; contiguous. A reduce-scatter over near-equal shares (the first numel mod size one element longer) and an
  /// all-gather. Sends (x − x_p) + (size−1)·x_p bytes, two rounds.
  void all_reduce(std::string_view tensor, const Tensor& inout);
  void broadcast(std::string_view tensor, const Tensor& inout, int root);
  void barrier();

  /// The largest `value` of all ranks; for control decisions, not counted in the ledger.
  double max_over_ranks(double value);
  /// Every rank's text at rank 0, empty elsewhere; for reports, not counted in the ledger.
  std::vector<std::string> gather_text(const std::string& text);

  /// For run_group over processes: the body has returned; returns when it has everywhere.
  void end_run();

  /// Ranks of equal colour form a group, ordered by (key, rank).
  std::unique_ptr<Communicator> split(int color, int key);

  /// Tests: makes every transfer a no-op (receive buffers stay as they are); a scheme must then fail its test.
  void drop_transfers(bool drop);

 private:
  struct Impl;
  explicit Communicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace isomer
