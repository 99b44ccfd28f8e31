// Processes that are killed at a random moment.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

namespace isomer::testing {

inline void sleep_ms(double ms) { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms)); }

/// The program itself with these arguments, its output in a file; to be killed or waited for.
class Process {
 public:
  Process(const std::vector<std::string>& arguments, const std::string& output) {
    std::vector<std::string> words{std::string(ISOMER_BINARY_DIR) + "/isomer"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    const int file = ::open(output.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0644);
    if (file < 0 || dup2(file, STDOUT_FILENO) < 0 || dup2(file, STDERR_FILENO) < 0) _exit(126);
    execv(pointers[0], pointers.data());
    _exit(127);
  }
  ~Process() {
    if (pid_ <= 0) return;
    kill(SIGKILL);
    wait();
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void kill(int signal) const { ::kill(pid_, signal); }
  bool has_ended() {
    if (pid_ > 0 && ::waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
    return pid_ <= 0;
  }
  /// Its exit code; 128 + signal where one ended it.
  int wait() {
    if (pid_ > 0 && ::waitpid(pid_, &status_, 0) == pid_) pid_ = -1;
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  }

 private:
  pid_t pid_ = -1;
  int status_ = 0;
};

}  // namespace isomer::testing
