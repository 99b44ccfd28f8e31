// A directory that appears whole or not at all: written beside its place, renamed at the end.
#pragma once

#include <filesystem>

namespace isomer {

class StagedDirectory {
 public:
  /// Makes OUT.part-PID beside `out`. Throws isomer::Error where that can't be made.
  explicit StagedDirectory(const std::filesystem::path& out);
  /// Removes what was not published.
  ~StagedDirectory();
  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;

  /// Throws std::invalid_argument if something stands at `out`.
  static void refuse_existing(const std::filesystem::path& out);

  const std::filesystem::path& path() const { return path_; }
  /// Renames it to `out`. Throws isomer::Error, and leaves nothing, if something came to stand there meanwhile.
  void publish();

 private:
  std::filesystem::path out_, path_;
  bool published_ = false;
};

}  // namespace isomer
