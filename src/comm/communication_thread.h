// The one thread of a rank that calls a transport: first in, first out.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/link.h"
#include "comm/transport.h"

namespace isomer {

/// A call in the queue. Holds no tensor, since only the rank's own thread may free one.
class Request {
 public:
  Request(Call call, std::shared_ptr<Transport> transport) : call_(std::move(call)), transport_(std::move(transport)) {}

  const Call& call() const { return call_; }
  Transport& transport() const { return *transport_; }

  /// Blocks until done. The completion on the virtual clock; throws isomer::Error if the call failed.
  double wait();
  /// For the communication thread.
  void run(LinkPort& port);

 private:
  Call call_;
  std::shared_ptr<Transport> transport_;
  std::mutex mutex_;
  std::condition_variable done_changed_;
  bool done_ = false;
  double completion_s_ = 0;
  std::string error_;
};

class CommunicationThread {
 public:
  /// `world` is told when there is nothing to do.
  explicit CommunicationThread(std::shared_ptr<Transport> world);
  /// Does what is queued, then joins.
  ~CommunicationThread();
  CommunicationThread(const CommunicationThread&) = delete;
  CommunicationThread& operator=(const CommunicationThread&) = delete;

  void submit(std::shared_ptr<Request> request);

 private:
  void work();
  /// The next request, null at the end.
  std::shared_ptr<Request> next();

  std::shared_ptr<Transport> world_;
  LinkPort port_;
  std::mutex mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::shared_ptr<Request>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace isomer
