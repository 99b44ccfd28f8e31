// RankContext, the first argument of everything that a rank does: it owns the rank's record, communicator and thread
// budget, and says whether this run is real or dry.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "core/memory_record.h"
#include "core/record.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "core/virtual_clock.h"

namespace isomer {

class Communicator;

/// How long temporaries live. `lean`: freed at their last use. `framework_eager`: as under a framework's tape, where
/// operations are out of place and the locals of a function stand until it returns.
enum class MemoryPolicy : std::uint8_t { lean, framework_eager };
std::string_view name_of(MemoryPolicy policy);

struct RankOptions {
  int rank = 0;
  int world_size = 1;
  int num_threads = 1;
  bool dry_run = false;
  MemoryPolicy memory_policy = MemoryPolicy::lean;
  std::atomic<std::uint64_t>* heartbeat = nullptr;  // of another rank, for which this one works; null: its own
};

class RankContext {
 public:
  explicit RankContext(const RankOptions& options);
  RankContext(const RankContext&) = delete;
  RankContext& operator=(const RankContext&) = delete;

  int rank() const { return options_.rank; }
  int world_size() const { return options_.world_size; }
  bool dry_run() const { return options_.dry_run; }
  MemoryPolicy memory_policy() const { return options_.memory_policy; }

  MemoryRecord& memory() { return *memory_; }
  Ledger& ledger() { return ledger_; }
  OpRecord& ops() { return ops_; }
  VirtualClock& clock() { return clock_; }
  ThreadPool& threads() { return threads_; }

  Phase phase() const { return phase_; }
  void set_phase(Phase phase) { phase_ = phase; }

  /// The communicator of all ranks. Throws if none was attached.
  Communicator& comm();
  void attach(std::shared_ptr<Communicator> communicator) { communicator_ = std::move(communicator); }

  /// Counts operations; a peer that waits takes a change for a sign of life.
  std::atomic<std::uint64_t>& heartbeat() { return options_.heartbeat != nullptr ? *options_.heartbeat : heartbeat_; }

  /// Shows an intermediate to whoever observes this run (`--dump`); free of cost otherwise.
  void observe(std::string_view name, const Tensor& tensor) const {
    if (observer_) observer_(name, tensor);
  }
  using Observer = std::function<void(std::string_view, const Tensor&)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }

  /// New storage of this rank, entered in its memory record; shape-only in a dry run. Contents are undefined.
  Tensor empty(std::string_view name, MemoryClass memory_class, DType dtype, Shape shape);
  /// The same, filled with zeros.
  Tensor zeros(std::string_view name, MemoryClass memory_class, DType dtype, Shape shape);

 private:
  RankOptions options_;
  std::shared_ptr<MemoryRecord> memory_;
  Ledger ledger_;
  OpRecord ops_;
  VirtualClock clock_;
  ThreadPool threads_;
  Phase phase_ = Phase::setup;
  std::shared_ptr<Communicator> communicator_;
  std::atomic<std::uint64_t> heartbeat_{0};
  Observer observer_;
};

/// Sets a phase for a scope.
class PhaseScope {
 public:
  PhaseScope(RankContext& ctx, Phase phase) : ctx_(ctx), before_(ctx.phase()) { ctx.set_phase(phase); }
  ~PhaseScope() { ctx_.set_phase(before_); }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  RankContext& ctx_;
  Phase before_;
};

/// Where temporaries go when their last use is over: freed at once (lean), or kept to the end of the function that
/// owns this object (framework_eager).
class FunctionScope {
 public:
  explicit FunctionScope(RankContext& ctx) : keep_(ctx.memory_policy() == MemoryPolicy::framework_eager) {}
  void release(Tensor&& tensor) {
    Tensor taken = std::move(tensor);
    tensor = Tensor();
    if (keep_) kept_.push_back(std::move(taken));
  }

 private:
  bool keep_;
  std::vector<Tensor> kept_;
};

}  // namespace isomer
