// Plain tables for people.
#pragma once

#include <string>
#include <vector>

namespace isomer {

/// Columns aligned, numbers (all but the first column) to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add(std::vector<std::string> row);
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// What happens now, on one line of a terminal's stderr; nothing elsewhere. Erased at the end.
class Progress {
 public:
  explicit Progress(bool enabled = true);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(const std::string& text);

 private:
  bool enabled_;
};

}  // namespace isomer
