#include "comm/call_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace isomer {

namespace {

constexpr const char* kName = "isomer-calls";
// A process that was stopped together with its launcher must not be blamed when both go on.
constexpr double kLongestStep_s = 0.5;

std::size_t bytes_of(int num_ranks) { return sizeof(CallSlot) * static_cast<std::size_t>(num_ranks); }

void* map(int file, int num_ranks) {
  void* memory = mmap(nullptr, bytes_of(num_ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

/// What `path` links to, "/memfd:isomer-calls (deleted)" for a board: on another machine it may be anything.
bool is_board(const std::string& path) {
  char target[64] = {};
  return readlink(path.c_str(), target, sizeof target - 1) > 0 && std::strstr(target, kName) != nullptr;
}

}  // namespace

void CallSlot::begin_call(std::string_view call) {
  const std::uint32_t next = 1 - current.load(std::memory_order_relaxed);
  calls[next][call.copy(calls[next], kMaxText - 1)] = 0;
  current.store(next, std::memory_order_release);
  change(RankState::running, RankState::in_call);
}

CallBoard::CallBoard(int file, int num_ranks, void* memory)
    : file_(file), num_ranks_(num_ranks), slots_(static_cast<CallSlot*>(memory)) {}

CallBoard::~CallBoard() {
  munmap(slots_, bytes_of(num_ranks_));
  close(file_);
}

std::unique_ptr<CallBoard> CallBoard::create(int num_ranks) {
  const int file = memfd_create(kName, MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes_of(num_ranks))) == 0) {
    if (void* memory = map(file, num_ranks)) return std::unique_ptr<CallBoard>(new CallBoard(file, num_ranks, memory));
  }
  throw Error(fmt::format("backend = mpi: no shared memory for {} ranks: {}", num_ranks, std::strerror(errno)));
}

std::unique_ptr<CallBoard> CallBoard::open(const std::string& path) {
  if (!is_board(path)) return nullptr;
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  struct stat status {};
  const bool known = fstat(file, &status) == 0;
  const int num_ranks = known ? static_cast<int>(static_cast<std::size_t>(status.st_size) / sizeof(CallSlot)) : 0;
  void* memory = num_ranks > 0 ? map(file, num_ranks) : nullptr;
  if (memory == nullptr) {
    close(file);
    return nullptr;
  }
  return std::unique_ptr<CallBoard>(new CallBoard(file, num_ranks, memory));
}

std::string CallBoard::path() const { return fmt::format("/proc/{}/fd/{}", getpid(), file_); }

std::string CallBoard::doing(int rank) const {
  const CallSlot& slot = slots_[rank];
  const RankState state = slot.state.load(std::memory_order_acquire);
  const std::string call = slot.call();
  if (state == RankState::absent || call.empty()) return {};
  return fmt::format(" ({} {})", state == RankState::in_call ? "it waits in" : "its last call was", call);
}

std::string CallBoard::lost() const {
  // One that failed said why, and took the others with it, some before they could say a word.
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (slots_[rank].state.load(std::memory_order_acquire) == RankState::failed) return {};
  }
  std::string text;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const CallSlot& slot = slots_[rank];
    const RankState state = slot.state.load(std::memory_order_acquire);
    if (state != RankState::running && state != RankState::in_call) continue;
    const std::string call = slot.call();
    const char* where = call.empty() ? "before its first call" : state == RankState::in_call ? "in " : "after ";
    text += fmt::format("error: rank {} died {}{}\n", rank, where, call);
  }
  return text;
}

ProcessWatch::ProcessWatch(const CallBoard& board, double timeout_s)
    : board_(board),
      timeout_s_(timeout_s),
      seen_(std::make_unique<Seen[]>(static_cast<std::size_t>(board.num_ranks()))) {}

std::string ProcessWatch::verdict(double now_s) {
  const double step_s = last_s_ > 0 ? std::min(now_s - last_s_, kLongestStep_s) : 0;
  last_s_ = now_s;
  for (int rank = 0; rank < board_.num_ranks(); ++rank) {
    const CallSlot& slot = board_.slot(rank);
    const RankState state = slot.state.load(std::memory_order_acquire);
    // One that has failed is about to end the others, and says why.
    if (state == RankState::failed) return {};
    if (state != RankState::running && state != RankState::in_call) continue;
    Seen& seen = seen_[static_cast<std::size_t>(rank)];
    const std::uint64_t ticks = slot.ticks.load(std::memory_order_relaxed);
    seen = ticks == seen.ticks ? Seen{ticks, seen.still_s + step_s} : Seen{ticks, 0};
    if (seen.still_s < timeout_s_) continue;
    return fmt::format("error: rank {}: its process has stood still for {:.3g} s{}\n", rank, seen.still_s,
                       board_.doing(rank));
  }
  return {};
}

}  // namespace isomer
