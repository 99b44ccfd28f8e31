#include "comm/communication_thread.h"

#include <sys/prctl.h>

#include <chrono>

#include "comm/giving_way.h"

namespace isomer {

double Request::wait() {
  std::unique_lock lock(mutex_);
  const auto done = [this] { return done_; };
  if (!give_way_until(lock, done)) done_changed_.wait(lock, done);
  if (!error_.empty()) throw Error(error_);
  return completion_s_;
}

void Request::run(LinkPort& port) {
  double completion_s = 0;
  std::string error;
  try {
    port.enter(call_);
    const Latest latest = transport_->exchange(call_);
    // One rank alone has no link, and control messages are not part of what is timed.
    if (!call_.control && transport_->size() > 1) completion_s = port.pass(call_, *transport_, latest);
  } catch (const std::exception& problem) {
    error = problem.what();
  }
  // Notified under the lock: the waiting rank may destroy this object as soon as it sees done_.
  std::lock_guard lock(mutex_);
  completion_s_ = completion_s;
  error_ = error;
  done_ = true;
  done_changed_.notify_all();
}

CommunicationThread::CommunicationThread(std::shared_ptr<Transport> world)
    : world_(std::move(world)), thread_([this] { work(); }) {}

CommunicationThread::~CommunicationThread() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  queue_changed_.notify_all();
  thread_.join();
}

void CommunicationThread::submit(std::shared_ptr<Request> request) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(request));
  queue_changed_.notify_one();
}

std::shared_ptr<Request> CommunicationThread::next() {
  const auto has_news = [this] { return stopping_ || !queue_.empty(); };
  const std::chrono::duration<double> interval(world_->idle_interval_s());
  std::unique_lock lock(mutex_);
  if (!give_way_until(lock, has_news) && interval.count() <= 0) queue_changed_.wait(lock, has_news);
  while (!has_news()) {
    if (queue_changed_.wait_for(lock, interval, has_news)) break;
    lock.unlock();
    world_->idle();
    lock.lock();
  }
  if (queue_.empty()) return nullptr;
  auto request = std::move(queue_.front());
  queue_.pop_front();
  return request;
}

void CommunicationThread::work() {
  // An emulated link sleeps for microseconds; the usual slack of a timer is 50.
  prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
  while (auto request = next()) request->run(port_);
}

}  // namespace isomer
