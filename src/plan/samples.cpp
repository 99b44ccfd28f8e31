#include "plan/samples.h"

#include <zlib.h>

#include <charconv>
#include <cmath>
#include <memory>

#include "core/error.h"
#include "model/json_text.h"

namespace isomer {

namespace {

constexpr std::size_t kMaxTableBytes = std::size_t{256} << 20;
constexpr std::uint64_t kHeldBackOneIn = 5;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::uint64_t fnv1a(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash ^ (hash >> 32);
}

std::string shape_text(const Operation& o) {
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {:.0f} {}", o.m, o.n, o.k, o.batch, o.heads,
                     o.kv_heads, o.head_dim, o.value_dim, o.context, o.latent, o.rope, o.experts, o.top_k, o.moe_tp,
                     o.moe_ep, o.bytes, o.devices);
}

}  // namespace

void add_sample(SampleFamilies& families, const Curve& identity, Operation operation, double seconds,
                std::int64_t row) {
  const std::string label = identity.label();
  const bool held_back = fnv1a(label + " " + shape_text(operation)) % kHeldBackOneIn == 0;
  SampleFamily& family = families[label];
  if (family.samples.empty()) family.curve = identity;
  family.samples.push_back({std::move(operation), seconds, held_back, row});
}

CsvTable::CsvTable(std::string text, std::string source) : text_(std::move(text)), source_(std::move(source)) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";  // spreadsheets write it in front of UTF-8
  if (text_.starts_with(kByteOrderMark)) text_.erase(0, kByteOrderMark.size());
  std::size_t number = 0;
  for (std::string_view line : split(text_, '\n')) {
    ++number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty()) continue;
    auto cells = split(line, ',');
    if (columns_.empty()) {
      columns_ = std::move(cells);
    } else if (cells.size() != columns_.size()) {
      throw Error(fmt::format("{}:{}: {} cells, where the first line names {} columns", source_, number, cells.size(),
                              columns_.size()));
    } else {
      rows_.push_back(std::move(cells));
    }
  }
  if (columns_.empty()) throw Error(fmt::format("{}: empty; expected a line of column names", source_));
  for (auto column = columns_.begin(); column != columns_.end(); ++column) {
    if (std::find(columns_.begin(), column, *column) == column) continue;
    throw Error(fmt::format("{}: column '{}' stands there twice; leave one of them", source_, printable(*column, 40)));
  }
}

bool CsvTable::has(std::string_view column) const {
  return std::find(columns_.begin(), columns_.end(), column) != columns_.end();
}

std::size_t CsvTable::column_index(std::string_view column) const {
  const auto found = std::find(columns_.begin(), columns_.end(), column);
  if (found == columns_.end()) throw Error(fmt::format("{}: there is no column '{}'", source_, column));
  return static_cast<std::size_t>(found - columns_.begin());
}

std::string_view CsvTable::text(std::size_t row, std::string_view column) const {
  return rows_[row][column_index(column)];
}

void CsvTable::wrong(std::size_t row, std::string_view column, std::string_view expected) const {
  throw Error(fmt::format("{}: row {}: {} = '{}': expected {}", source_, row + 1, column, printable(text(row, column)),
                          expected));
}

std::int64_t CsvTable::integer(std::size_t row, std::string_view column, std::int64_t low, std::int64_t high) const {
  const std::string_view cell = text(row, column);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  if (error != std::errc() || end != cell.data() + cell.size() || value < low || value > high) {
    wrong(row, column, fmt::format("a whole number from {} to {}", low, high));
  }
  return value;
}

double CsvTable::number(std::size_t row, std::string_view column, double low, double high) const {
  const std::string_view cell = text(row, column);
  double value = 0;
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  if (error != std::errc() || end != cell.data() + cell.size() || !(value >= low && value <= high)) {
    wrong(row, column, fmt::format("a number from {:g} to {:g}", low, high));
  }
  return value;
}

std::string read_maybe_gzip(const std::string& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) throw Error(fmt::format("{}: can't be opened", path));
  std::string text;
  std::vector<char> block(1 << 16);
  for (;;) {
    const int got = gzread(file.get(), block.data(), static_cast<unsigned>(block.size()));
    if (got == 0) break;
    if (got < 0) {
      int code = 0;
      throw Error(fmt::format("{}: can't be decompressed: {}", path, gzerror(file.get(), &code)));
    }
    text.append(block.data(), static_cast<std::size_t>(got));
    if (text.size() > kMaxTableBytes) throw Error(fmt::format("{}: holds more than {} bytes", path, kMaxTableBytes));
  }
  if (gzeof(file.get()) != 1) throw Error(fmt::format("{}: ends in the middle of its data", path));
  return text;
}

}  // namespace isomer
