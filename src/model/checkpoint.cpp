#include "model/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "model/gguf/weights.h"
#include "model/json_text.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxIndexBytes = 100'000'000;
constexpr std::int64_t kScaleBlock = 128;
constexpr auto kSingleFile = "model.safetensors";
constexpr auto kIndexFile = "model.safetensors.index.json";

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name.find('\\') == std::string::npos &&
         name.find('\0') == std::string::npos && name != "." && name != "..";
}

/// The shard's path if it lies in `directory`. A link may lead elsewhere only inside a Hugging Face cache, whose
/// snapshots/REVISION/ holds links into blobs/ two levels up.
fs::path shard_path(const fs::path& directory, const std::string& name, const fs::path& index) {
  std::error_code code;
  const auto real = fs::canonical(directory / name, code);
  if (code) throw Error(fmt::format("{}: shard {}: {}", index.string(), printable(name), code.message()));
  const auto home = fs::canonical(directory);
  const bool cached =
      home.parent_path().filename() == "snapshots" && real.parent_path() == home.parent_path().parent_path() / "blobs";
  if (real.parent_path() != home && !cached) {
    throw Error(fmt::format("{}: shard {} is a link to {}: expected a file inside {}", index.string(), printable(name),
                            real.string(), home.string()));
  }
  return directory / name;
}

/// model-00002-of-00005.safetensors and the like.
bool looks_like_shard(const std::string& name) {
  return name.starts_with("model-") && name.ends_with(".safetensors") && name.find("-of-") != std::string::npos;
}

void check_no_stray_shard(const fs::path& directory, const std::set<std::string>& shards, const fs::path& index) {
  std::error_code code;
  for (const auto& item : fs::directory_iterator(directory, code)) {
    const auto name = item.path().filename().string();
    if (looks_like_shard(name) && !shards.contains(name)) {
      throw Error(fmt::format("{}: shard {} lies beside the index and is missing from it", index.string(), name));
    }
  }
}

/// The resolved range of an axis.
struct Range {
  std::int64_t begin, length;
};
Range resolve(const AxisRange& range, std::int64_t size, const char* axis, const TensorInfo& info) {
  const auto length = range.length.value_or(size - range.begin);
  if (range.begin < 0 || length < 0 || range.begin > size || length > size - range.begin) {
    throw Error(fmt::format("'{}': {} {} to {}: the tensor has shape [{}]", info.name, axis, range.begin,
                            range.begin + length, fmt::join(info.shape, ", ")));
  }
  return {range.begin, length};
}

/// A tensor seen as a matrix: the first axis by all the others.
struct Matrix {
  std::int64_t rows, columns;
};
Matrix matrix_of(const Shape& shape) {
  if (shape.empty()) return {1, 1};
  Matrix m{shape[0], 1};
  for (std::size_t i = 1; i < shape.size(); ++i) m.columns *= shape[i];
  return m;
}

/// One row's columns [begin, begin + length) of an FP8 matrix, block by block.
void convert_e4m3_row(const char* row, Range columns, const float* scales, DType dtype, char* out) {
  for (std::int64_t at = columns.begin; at < columns.begin + columns.length;) {
    const std::int64_t block = at / kScaleBlock;
    const std::int64_t count = std::min((block + 1) * kScaleBlock, columns.begin + columns.length) - at;
    convert_e4m3_scaled(row + at, count, scales[block], dtype, out);
    out += count * size_of(dtype);
    at += count;
  }
}

/// Rows and columns of a matrix in the file, `stride` elements a row, into the contiguous `result`.
void convert_fp8(const char* data, std::int64_t stride, Range rows, Range columns, const Tensor& scales,
                 const Tensor& result) {
  auto* out = static_cast<char*>(result.raw());
  if (result.numel() == 0) return;
  for (std::int64_t row = rows.begin; row < rows.begin + rows.length; ++row) {
    const float* row_scales = scales.data<float>() + row / kScaleBlock * scales.stride(0);
    convert_e4m3_row(data + row * stride, columns, row_scales, result.dtype(), out);
    out += columns.length * size_of(result.dtype());
  }
}
void convert_plain(FileDType from, const char* data, std::int64_t stride, Range rows, Range columns,
                   const Tensor& result) {
  auto* out = static_cast<char*>(result.raw());
  if (result.numel() == 0) return;
  const bool whole_rows = columns.length == stride;
  const std::int64_t num_runs = whole_rows ? 1 : rows.length;
  const std::int64_t run = whole_rows ? rows.length * stride : columns.length;
  for (std::int64_t i = 0; i < num_runs; ++i) {
    const std::int64_t first = (rows.begin + i) * stride + columns.begin;
    convert_elements(from, data + first * size_of(from), run, result.dtype(), out + i * run * size_of(result.dtype()));
  }
}

}  // namespace

std::map<std::string, std::string> parse_weight_map(std::string_view text, std::string_view source) {
  const auto root = parse_json(text, source);
  const auto found = root.is_object() ? root.find("weight_map") : root.end();
  if (!root.is_object() || found == root.end() || !found->is_object()) {
    throw Error(fmt::format("{}: at byte 0: expected an object with an object weight_map", source));
  }
  std::map<std::string, std::string> result;
  for (const auto& [name, file] : found->items()) {
    if (!file.is_string() || !is_plain_file_name(file.get_ref<const std::string&>())) {
      const auto at = text.find(fmt::format("\"{}\"", name));
      throw Error(
          fmt::format("{}: at byte {}: weight_map: '{}' = {}: expected the name of a file in the same directory",
                      source, at == std::string_view::npos ? 0 : at, printable(name), brief(file)));
    }
    result.emplace(name, file.get<std::string>());
  }
  if (result.empty()) throw Error(fmt::format("{}: at byte 0: weight_map is empty", source));
  return result;
}

Checkpoint Checkpoint::open(const fs::path& path) {
  Checkpoint checkpoint;
  checkpoint.path_ = path;
  std::error_code code;
  if (fs::is_directory(path, code)) {
    // The order of transformers: a single file wins over an index.
    if (fs::exists(path / kSingleFile, code)) {
      checkpoint.add_file(path / kSingleFile);
    } else if (fs::exists(path / kIndexFile, code)) {
      checkpoint.add_index(path / kIndexFile);
    } else {
      throw Error(fmt::format("{}: neither {} nor {} is here", path.string(), kSingleFile, kIndexFile));
    }
  } else if (path.extension() == ".json") {
    checkpoint.add_index(path);
  } else if (is_gguf_file(path)) {
    checkpoint.add_gguf(path);
  } else {
    checkpoint.add_file(path);
  }
  // Only now: the vector of files no longer moves.
  for (std::size_t i = 0; i < checkpoint.files_.size(); ++i)
    for (const auto& info : checkpoint.files_[i].header().tensors)
      checkpoint.entries_.emplace(info.name, Entry{&info, i});
  return checkpoint;
}

void Checkpoint::add_file(const fs::path& path) { files_.emplace_back(path); }

void Checkpoint::add_gguf(const fs::path& path) {
  gguf_ = std::make_shared<const GgufWeights>(std::make_shared<const GgufFile>(path));
  for (std::size_t i = 0; i < gguf_->tensors().size(); ++i) {
    const TensorInfo& info = gguf_->tensors()[i];
    entries_.emplace(info.name, Entry{&info, i});
  }
}

void Checkpoint::add_index(const fs::path& index) {
  const auto weight_map = parse_weight_map(read_text_file(index, kMaxIndexBytes), index.string());
  const fs::path directory = index.has_parent_path() ? index.parent_path() : fs::path(".");
  std::set<std::string> shards;
  for (const auto& [name, file] : weight_map) shards.insert(file);
  check_no_stray_shard(directory, shards, index);
  std::size_t num_tensors = 0;
  for (const auto& shard : shards) {
    const auto path = shard_path(directory, shard, index);
    add_file(path);
    for (const auto& info : files_.back().header().tensors) {
      const auto listed = weight_map.find(info.name);
      if (listed == weight_map.end() || listed->second != shard) {
        throw Error(fmt::format("{}: at byte {}: tensor '{}': {} puts it {}", path.string(), info.begin,
                                printable(info.name), index.filename().string(),
                                listed == weight_map.end() ? "nowhere" : "into " + listed->second));
      }
      ++num_tensors;
    }
  }
  if (num_tensors == weight_map.size()) return;
  for (const auto& [name, file] : weight_map) {
    const auto has_it = [&wanted = name](const SafetensorsFile& f) { return f.find(wanted) != nullptr; };
    if (std::none_of(files_.begin(), files_.end(), has_it)) {
      throw Error(fmt::format("{}: tensor '{}' is not in {}", index.string(), printable(name), file));
    }
  }
}

std::vector<std::string_view> Checkpoint::names() const {
  std::vector<std::string_view> result;
  for (const auto& [name, entry] : entries_) result.push_back(name);
  return result;
}

const Checkpoint::Entry& Checkpoint::entry(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw Error(fmt::format("{}: there is no tensor '{}'", path_.string(), printable(name)));
  return found->second;
}

const TensorInfo& Checkpoint::info(std::string_view name) const { return *entry(name).info; }

const SafetensorsMetadata& Checkpoint::metadata() const {
  static const SafetensorsMetadata kNone;
  return files_.empty() ? kNone : files_.front().header().metadata;
}

const MappedFile& Checkpoint::mapped(const Entry& entry) const {
  return gguf_ ? gguf_->file().file() : *files_[entry.file].file();
}

const fs::path& Checkpoint::file_of(std::string_view name) const { return mapped(entry(name)).path(); }

std::string_view Checkpoint::bytes(std::string_view name) const {
  const Entry& found = entry(name);
  if (gguf_) complain(found, "its rows are dequantised, and permuted, as they are read: there are no bytes of it");
  const MappedFile& file = mapped(found);
  file.check_size();
  return {file.data() + found.info->begin, static_cast<std::size_t>(found.info->bytes)};
}

Tensor Checkpoint::view(const Entry& entry) const {
  const auto& file = files_[entry.file].file();
  const char* data = file->data() + entry.info->begin;
  auto storage = std::make_shared<Storage>(file, data, entry.info->bytes);
  return {*same_bits(entry.info->dtype), entry.info->shape, std::move(storage)};
}

void Checkpoint::complain(const Entry& entry, std::string_view what) const {
  throw Error(fmt::format("{}: at byte {}: tensor '{}': {}", mapped(entry).path().string(), entry.info->begin,
                          printable(entry.info->name), what));
}

Tensor Checkpoint::fp8_scales(const Entry& entry) const {
  const auto name = entry.info->name + "_scale_inv";
  if (entry.info->shape.size() != 2 || !contains(name)) complain(entry, "FP8 without " + name);
  const Matrix whole = matrix_of(entry.info->shape);
  const Shape expected{(whole.rows + kScaleBlock - 1) / kScaleBlock, (whole.columns + kScaleBlock - 1) / kScaleBlock};
  const TensorInfo& scales = info(name);
  if (scales.dtype != FileDType::f32 || scales.shape != expected) {
    complain(entry, fmt::format("{} is {} [{}]: expected F32 [{}]", name, name_of(scales.dtype),
                                fmt::join(scales.shape, ", "), fmt::join(expected, ", ")));
  }
  return read(name, DType::f32);
}

/// Rows are dequantised whole, some at a time, and what is asked of them converted.
Tensor Checkpoint::read_gguf(const Entry& entry, DType dtype, const TensorSlice& slice) const {
  const TensorInfo& info = *entry.info;
  const Matrix whole = matrix_of(info.shape);
  const Range rows = resolve(slice.rows, whole.rows, "rows", info);
  const Range columns = resolve(slice.columns, whole.columns, "columns", info);
  Shape shape = info.shape;
  shape[0] = rows.length;
  if (shape.size() == 2) shape[1] = columns.length;
  Tensor result = Tensor::unrecorded(info.name, dtype, shape);
  auto* out = static_cast<char*>(result.raw());
  constexpr std::int64_t kElementsAtOnce = 1 << 18;
  const std::int64_t at_once =
      std::clamp<std::int64_t>(kElementsAtOnce / whole.columns, 1, std::max<std::int64_t>(rows.length, 1));
  std::vector<float> buffer(static_cast<std::size_t>(at_once * whole.columns));
  for (std::int64_t done = 0; done < rows.length; done += at_once) {
    const std::int64_t count = std::min(at_once, rows.length - done);
    gguf_->read_rows(entry.file, rows.begin + done, count, buffer.data());
    for (std::int64_t i = 0; i < count; ++i) {
      const float* row = buffer.data() + i * whole.columns + columns.begin;
      convert_elements(FileDType::f32, row, columns.length, dtype, out);
      out += columns.length * size_of(dtype);
    }
  }
  return result;
}

Tensor Checkpoint::read(std::string_view name, DType dtype, const TensorSlice& slice) const {
  const Entry& found = entry(name);
  const TensorInfo& info = *found.info;
  const MappedFile& file = mapped(found);
  if (!is_convertible(info.dtype)) complain(found, fmt::format("{} can't be converted", name_of(info.dtype)));
  file.check_size();
  const bool sliced_columns = slice.columns.begin != 0 || slice.columns.length;
  if (sliced_columns && info.shape.size() != 2) complain(found, "columns were asked of a tensor without two axes");
  if (gguf_) return read_gguf(found, dtype, slice);
  const Matrix whole = matrix_of(info.shape);
  const Range rows = resolve(slice.rows, whole.rows, "rows", info);
  const Range columns = resolve(slice.columns, whole.columns, "columns", info);
  const char* data = file.data() + info.begin;

  if (same_bits(info.dtype) == dtype && reinterpret_cast<std::uintptr_t>(data) % size_of(dtype) == 0) {
    Tensor result = view(found);
    if (!info.shape.empty()) result = result.slice(0, rows.begin, rows.length);
    return sliced_columns ? result.slice(1, columns.begin, columns.length) : result;
  }
  Shape shape = info.shape;
  if (!shape.empty()) shape[0] = rows.length;
  if (sliced_columns) shape[1] = columns.length;
  Tensor result = Tensor::unrecorded(name, dtype, shape);
  if (info.dtype == FileDType::f8_e4m3) {
    convert_fp8(data, whole.columns, rows, columns, fp8_scales(found), result);
  } else {
    convert_plain(info.dtype, data, whole.columns, rows, columns, result);
  }
  return result;
}

Tensor Checkpoint::read_rows(std::string_view name, std::span<const std::int64_t> row_ids, DType dtype) const {
  const auto& found = info(name);
  Shape shape = found.shape;
  if (shape.empty()) throw Error(fmt::format("{}: tensor '{}' has no rows", path_.string(), printable(name)));
  shape[0] = static_cast<std::int64_t>(row_ids.size());
  Tensor result = Tensor::unrecorded(name, dtype, shape);
  auto* out = static_cast<char*>(result.raw());
  for (const auto id : row_ids) {
    const Tensor row = read(name, dtype, {.rows = {.begin = id, .length = 1}});
    if (row.nbytes() > 0) std::memcpy(out, row.raw(), static_cast<std::size_t>(row.nbytes()));
    out += row.nbytes();
  }
  return result;
}

}  // namespace isomer
