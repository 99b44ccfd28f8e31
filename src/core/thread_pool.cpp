#include "core/thread_pool.h"

#include <algorithm>

#include "core/error.h"
#include "core/record.h"

namespace isomer {

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1) invalid_argument("threads = {}: a rank needs at least 1", num_threads);
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(std::int64_t num_tasks, const std::function<void(std::int64_t, int)>& body) {
  last_worker_cpu_s_ = 0;
  if (workers_.empty() || num_tasks <= 1) {
    for (std::int64_t task = 0; task < num_tasks; ++task) body(task, 0);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    num_tasks_ = num_tasks;
    next_task_ = 0;
    error_ = nullptr;
    running_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  start_.notify_all();
  take_tasks(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
  body_ = nullptr;
  if (error_) std::rethrow_exception(error_);
}

void ThreadPool::take_tasks(int thread) {
  for (;;) {
    std::int64_t task = 0;
    {
      std::lock_guard lock(mutex_);
      if (next_task_ >= num_tasks_ || error_) return;
      task = next_task_++;
    }
    try {
      (*body_)(task, thread);
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
}

void ThreadPool::work(int thread) {
  std::uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
    }
    const double begin_s = thread_cpu_s();
    take_tasks(thread);
    std::lock_guard lock(mutex_);
    last_worker_cpu_s_ = std::max(last_worker_cpu_s_, thread_cpu_s() - begin_s);
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace isomer
