// Measured operations: what `plan fit` fits curves to and `plan validate` checks them against.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "plan/curves.h"

namespace isomer {

struct TimedOperation {
  Operation operation;
  double seconds = 0;
  bool held_back = false;  // not fitted to; a fifth of the shapes, chosen by a hash of the shape
  std::int64_t row = 0;    // of a user's table, from 1; 0: of none
};

/// Samples that one curve describes. `curve` has the identity (kind, precisions, variant, load) and no coefficients.
struct SampleFamily {
  Curve curve;
  std::vector<TimedOperation> samples;
};
/// By Curve::label().
using SampleFamilies = std::map<std::string, SampleFamily>;

/// Files the sample under its curve; decides whether it is held back by an FNV-1a hash of label and shape, without the
/// time, so that repeated measurements of one shape stay on one side.
void add_sample(SampleFamilies& families, const Curve& identity, Operation operation, double seconds,
                std::int64_t row = 0);

/// Rows of a CSV text whose first line names the columns; a UTF-8 byte order mark in front is passed over. Throws
/// isomer::Error with source and line for a row of the wrong length, a column that is missing or stands there twice.
class CsvTable {
 public:
  CsvTable(std::string text, std::string source);

  bool has(std::string_view column) const;
  const std::vector<std::string_view>& columns() const { return columns_; }
  std::size_t num_rows() const { return rows_.size(); }
  std::string_view text(std::size_t row, std::string_view column) const;
  /// Throws isomer::Error unless it is a whole number in [low, high], a finite number in [low, high].
  std::int64_t integer(std::size_t row, std::string_view column, std::int64_t low, std::int64_t high) const;
  double number(std::size_t row, std::string_view column, double low, double high) const;
  [[noreturn]] void wrong(std::size_t row, std::string_view column, std::string_view expected) const;

 private:
  std::size_t column_index(std::string_view column) const;
  std::string text_, source_;
  std::vector<std::string_view> columns_;
  std::vector<std::vector<std::string_view>> rows_;
};

/// The whole of a file, decompressed if it is gzip. Throws isomer::Error if it can't be read, is damaged, or holds more
/// than 256 MiB.
std::string read_maybe_gzip(const std::string& path);

/// Systems for which `directory` has tables, by the name of the hardware they describe: "gb200-nvl72" → "gb200".
std::map<std::string, std::string> silicon_systems(const std::string& directory);
/// Tables of one system (a folder of CSV files, gzip or plain, as docs/planner.md describes). Throws isomer::Error.
SampleFamilies load_silicon(const std::string& directory, const std::string& system);
/// A user's own table: one operation a row (docs/planner.md, "Fit and its error"). Throws isomer::Error, for a column
/// that is unknown as well, with near names.
SampleFamilies load_table(const std::string& path);

}  // namespace isomer
