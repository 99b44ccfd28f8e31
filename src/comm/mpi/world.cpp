#include "comm/mpi/world.h"

#include <algorithm>
#include <cstring>

#include "comm/run_rank.h"

namespace isomer {

namespace {

constexpr double kMostBetweenSigns_s = 1;
// A rank's last messages may arrive after its word that it leaves.
constexpr double kGraceAfterLeaving_s = 0.5;

}  // namespace

MpiWorld::MpiWorld(MpiLibrary& library, int run, double timeout_s, const std::atomic<std::uint64_t>& heartbeat)
    : library_(library),
      run_(run),
      timeout_s_(timeout_s),
      interval_s_(std::clamp(timeout_s / 10, 0.02, kMostBetweenSigns_s)),
      heartbeat_(heartbeat),
      peers_(static_cast<std::size_t>(library.size())) {}

MpiWorld::~MpiWorld() {
  for (auto& peer : peers_) {
    if (peer.request != MPI_REQUEST_NULL) MPI_Request_free(&peer.request);
  }
}

void MpiWorld::begin_wait(const Call& call) {
  call_ = describe(call);
  waiting_ = true;
}

void MpiWorld::exchange_signs() {
  const double now_s = wall_clock_s();
  if (now_s < next_s_) return;
  next_s_ = now_s + interval_s_;
  take_signs();
  send_signs();
}

void MpiWorld::send_signs() {
  Sign mine;
  mine.run = run_;
  mine.waiting = waiting_ ? 1 : 0;
  mine.left = leaving_ ? 1 : 0;
  mine.beat = heartbeat_.load(std::memory_order_relaxed) + completed_;
  std::strncpy(mine.call, call_.c_str(), sizeof mine.call - 1);
  peers_[static_cast<std::size_t>(rank())].sign = mine;
  for (int to = 0; to < size(); ++to) {
    if (to == rank()) continue;
    auto& peer = peers_[static_cast<std::size_t>(to)];
    int done = 1;
    if (peer.request != MPI_REQUEST_NULL) check_mpi(MPI_Test(&peer.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done == 0) continue;  // a peer that takes no signs gets no more
    peer.sent = mine;
    check_mpi(MPI_Isend(&peer.sent, sizeof(Sign), MPI_BYTE, to, static_cast<int>(MpiTag::sign), comm(), &peer.request),
              "MPI_Isend");
  }
}

void MpiWorld::take_signs() {
  for (;;) {
    int found = 0;
    MPI_Status status;
    check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, static_cast<int>(MpiTag::sign), comm(), &found, &status), "MPI_Iprobe");
    if (found == 0) return;
    Sign sign;
    check_mpi(MPI_Recv(&sign, sizeof(Sign), MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, comm(), MPI_STATUS_IGNORE),
              "MPI_Recv");
    if (sign.run != run_) continue;
    auto& peer = peers_[static_cast<std::size_t>(status.MPI_SOURCE)];
    if (sign.left != 0 && peer.left_since_s == 0) peer.left_since_s = wall_clock_s();
    peer.sign = sign;
  }
}

std::string MpiWorld::failure_reason() const {
  if (!abandoned_.load(std::memory_order_acquire)) return failure_;
  return fmt::format("rank {} threw an exception", rank());
}

std::string MpiWorld::doing(int rank) const {
  // A sign may be old; the board of one machine says what is.
  if (const CallBoard* board = launchers_board()) {
    if (std::string text = board->doing(rank); !text.empty()) return text;
  }
  const Sign& sign = peer(rank).sign;
  if (sign.call[0] == 0) return {};
  return fmt::format(" ({} {})", sign.waiting != 0 ? "it waits in" : "its last call was", sign.call);
}

bool MpiWorld::has_left(int rank) const {
  const auto& since_s = peer(rank).left_since_s;
  return since_s > 0 && wall_clock_s() - since_s > kGraceAfterLeaving_s;
}

std::uint64_t MpiWorld::progress() const {
  std::uint64_t sum = 0;
  for (const auto& peer : peers_) sum += peer.sign.beat;
  return sum;
}

}  // namespace isomer
