#include "model/safetensors.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/error.h"
#include "model/json_text.h"

namespace isomer {

namespace {

using nlohmann::json;

constexpr std::int64_t kLengthBytes = 8;
constexpr std::size_t kMaxDims = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

/// The header's text with all that its complaints need.
struct HeaderText {
  std::string_view text;
  std::string_view source;
  std::int64_t data_bytes;

  std::int64_t data_begin() const { return kLengthBytes + static_cast<std::int64_t>(text.size()); }

  /// Where in the file the entry of a tensor begins (the header's start for names with escapes).
  std::int64_t offset_of(std::string_view name) const {
    const auto at = text.find(fmt::format("\"{}\"", name));
    return kLengthBytes + static_cast<std::int64_t>(at == std::string_view::npos ? 0 : at);
  }
  template <class... Args>
  [[noreturn]] void wrong(std::string_view name, fmt::format_string<Args...> format, Args&&... args) const {
    throw Error(fmt::format("{}: at byte {}: '{}': {}", source, offset_of(name), printable(name),
                            fmt::format(format, std::forward<Args>(args)...)));
  }
};

/// A non-negative integer, or nothing.
std::optional<std::int64_t> natural(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto number = value.get<std::uint64_t>();
  if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
  return static_cast<std::int64_t>(number);
}

const json& member(const HeaderText& header, const std::string& name, const json& entry, const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end()) header.wrong(name, "{} is missing", key);
  return *found;
}

FileDType read_dtype(const HeaderText& header, const std::string& name, const json& value) {
  const auto dtype = value.is_string() ? file_dtype_of(value.get_ref<const std::string&>()) : std::nullopt;
  if (!dtype) header.wrong(name, "dtype = {}: expected F64, F32, F16, BF16, F8_E4M3 …", brief(value));
  return *dtype;
}

/// The shape, and the bytes that it takes.
Shape read_shape(const HeaderText& header, const std::string& name, const json& value, FileDType dtype,
                 std::int64_t& bytes) {
  if (!value.is_array() || value.size() > kMaxDims) {
    header.wrong(name, "shape = {}: expected an array of up to {} sizes", brief(value), kMaxDims);
  }
  Shape shape;
  bytes = size_of(dtype);
  std::int64_t without_zeros = bytes;  // [0, 2^40, 2^40] must not overflow later either
  for (const auto& item : value) {
    const auto size = natural(item);
    if (!size) header.wrong(name, "shape[{}] = {}: expected an integer from 0", shape.size(), brief(item));
    if (__builtin_mul_overflow(without_zeros, std::max<std::int64_t>(*size, 1), &without_zeros)) {
      header.wrong(name, "the sizes of its shape overflow");
    }
    bytes *= *size;
    shape.push_back(*size);
  }
  return shape;
}

TensorInfo read_entry(const HeaderText& header, const std::string& name, const json& entry) {
  if (name.empty()) header.wrong(name, "a tensor without a name");
  if (!entry.is_object()) header.wrong(name, "{}: expected an object", brief(entry));
  TensorInfo info;
  info.name = name;
  info.dtype = read_dtype(header, name, member(header, name, entry, "dtype"));
  info.shape = read_shape(header, name, member(header, name, entry, "shape"), info.dtype, info.bytes);
  const json& offsets = member(header, name, entry, "data_offsets");
  const bool two = offsets.is_array() && offsets.size() == 2;
  const auto begin = two ? natural(offsets[0]) : std::nullopt, end = two ? natural(offsets[1]) : std::nullopt;
  if (!begin || !end || *begin > *end) header.wrong(name, "data_offsets: expected [begin, end], begin ≤ end, from 0");
  if (*end > header.data_bytes) {
    header.wrong(name, "its data end at {}: the file has {} bytes of data (truncated?)", *end, header.data_bytes);
  }
  if (*end - *begin != info.bytes) {
    header.wrong(name, "{} bytes of data: shape [{}] of {} takes {}", *end - *begin, fmt::join(info.shape, ", "),
                 name_of(info.dtype), info.bytes);
  }
  if (*begin % size_of(info.dtype) != 0) {
    header.wrong(name, "its data begin at {}: expected a multiple of {}", *begin, size_of(info.dtype));
  }
  info.begin = header.data_begin() + *begin;
  return info;
}

std::map<std::string, std::string> read_metadata(const HeaderText& header, const json& value) {
  if (!value.is_object()) header.wrong(kMetadataKey, "{}: expected an object", brief(value));
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) header.wrong(kMetadataKey, "{} = {}: expected a string", printable(key), brief(text));
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

/// The tensors must tile the data: no overlap, no hole, nothing after the last.
void check_tiling(const HeaderText& header, const std::vector<TensorInfo>& tensors) {
  std::vector<const TensorInfo*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::pair(a->begin, a->bytes) < std::pair(b->begin, b->bytes);
  });
  std::int64_t end = header.data_begin();
  for (const auto* tensor : order) {
    if (tensor->begin != end) {
      throw Error(fmt::format("{}: at byte {}: the data of '{}' {}, expected at byte {}", header.source, tensor->begin,
                              printable(tensor->name),
                              tensor->begin < end ? "overlap the tensor before" : "leave a hole before them", end));
    }
    end += tensor->bytes;
  }
  if (end != header.data_begin() + header.data_bytes) {
    throw Error(fmt::format("{}: at byte {}: {} bytes after the last tensor", header.source, end,
                            header.data_begin() + header.data_bytes - end));
  }
}

std::string errno_text() { return std::strerror(errno); }

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view bytes, std::int64_t file_bytes, std::string_view source) {
  if (file_bytes < kLengthBytes || bytes.size() < static_cast<std::size_t>(kLengthBytes)) {
    throw Error(fmt::format("{}: at byte 0: {} bytes, too short for a safetensors file", source, file_bytes));
  }
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(bytes[static_cast<std::size_t>(i)]);
  const auto available = static_cast<std::uint64_t>(
      std::min<std::int64_t>(file_bytes, static_cast<std::int64_t>(bytes.size())) - kLengthBytes);
  if (length > static_cast<std::uint64_t>(kMaxSafetensorsHeader) || length > available) {
    throw Error(fmt::format("{}: at byte 0: header length {}: expected at most {}", source, length,
                            std::min(available, static_cast<std::uint64_t>(kMaxSafetensorsHeader))));
  }
  const HeaderText header{bytes.substr(kLengthBytes, length), source,
                          file_bytes - kLengthBytes - static_cast<std::int64_t>(length)};
  const json root = parse_json(header.text, source, kLengthBytes);
  if (!root.is_object())
    throw Error(fmt::format("{}: at byte 8: the header is {}: expected an object", source, brief(root)));
  SafetensorsHeader result;
  for (const auto& [name, entry] : root.items()) {
    if (name == kMetadataKey) {
      result.metadata = read_metadata(header, entry);
    } else {
      result.tensors.push_back(read_entry(header, name, entry));
    }
  }
  check_tiling(header, result.tensors);
  return result;
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not make us wait
  if (descriptor_ < 0) throw Error(fmt::format("{}: {}", path.string(), errno_text()));
  struct stat status {};
  const bool regular = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  bytes_ = regular ? status.st_size : 0;
  void* mapped = regular && bytes_ > 0
                     ? ::mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ, MAP_PRIVATE, descriptor_, 0)
                     : nullptr;
  if (!regular || mapped == MAP_FAILED) {
    const std::string reason = regular ? errno_text() : "not a file";
    ::close(descriptor_);
    throw Error(fmt::format("{}: {}", path.string(), reason));
  }
  data_ = static_cast<const char*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<char*>(data_), static_cast<std::size_t>(bytes_));
  ::close(descriptor_);
}

void MappedFile::check_size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0 || status.st_size < bytes_) {
    throw Error(fmt::format("{}: at byte {}: the file was {} bytes long when it was opened and has become shorter",
                            path_.string(), status.st_size, bytes_));
  }
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(std::make_shared<MappedFile>(path)) {
  const std::string_view bytes(file_->data(), static_cast<std::size_t>(file_->bytes()));
  header_ = parse_safetensors_header(bytes, file_->bytes(), path.string());
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto& tensors = header_.tensors;
  const auto at = std::lower_bound(tensors.begin(), tensors.end(), name,
                                   [](const TensorInfo& info, std::string_view wanted) { return info.name < wanted; });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

}  // namespace isomer
