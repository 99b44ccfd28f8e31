// A rank's threads. Tasks are fixed by shape and each is done by one thread, so results don't depend on how many
// threads there are.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace isomer {

class ThreadPool {
 public:
  /// `num_threads` ≥ 1 counts the calling thread, so 1 starts none.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls body(task, thread) for every task in [0, num_tasks); thread in [0, num_threads()). The first exception is
  /// rethrown here. Not reentrant.
  void parallel_for(std::int64_t num_tasks, const std::function<void(std::int64_t, int)>& body);

  /// Processor seconds that the workers (not the caller) used in the last parallel_for, the largest of them.
  double last_worker_cpu_s() const { return last_worker_cpu_s_; }

 private:
  void work(int thread);
  void take_tasks(int thread);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  const std::function<void(std::int64_t, int)>* body_ = nullptr;
  std::int64_t num_tasks_ = 0;
  std::int64_t next_task_ = 0;
  std::uint64_t generation_ = 0;
  int running_ = 0;
  bool stopping_ = false;
  double last_worker_cpu_s_ = 0;
  std::exception_ptr error_;
};

}  // namespace isomer
