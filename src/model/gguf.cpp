#include "model/gguf.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>

#include "core/error.h"
#include "model/json_text.h"

namespace isomer {

namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr std::int64_t kMaxDims = 4;
constexpr std::int64_t kMaxNameBytes = 1 << 16;
constexpr std::int64_t kMaxAlignment = 1 << 20;
constexpr std::int64_t kDefaultAlignment = 32;
constexpr std::string_view kAlignmentKey = "general.alignment";
constexpr std::int64_t kLeastTensorBytes = 8 + 4 + 8 + 4 + 8;  // of an entry of the table, with one size
constexpr std::int64_t kLeastMetadataBytes = 8 + 4 + 1;

/// Types of metadata, as the file numbers them.
enum class ValueType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text, array, u64, i64, f64, end };

std::int64_t least_bytes(ValueType type) {
  switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean: return 1;
    case ValueType::u16:
    case ValueType::i16: return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32: return 4;
    default: return 8;
  }
}

/// Reads from the file's beginning on; nothing is taken that isn't there.
class Cursor {
 public:
  Cursor(std::string_view bytes, std::string_view source) : bytes_(bytes), source_(source) {}

  std::int64_t at() const { return static_cast<std::int64_t>(at_); }
  std::int64_t left() const { return static_cast<std::int64_t>(bytes_.size() - at_); }

  template <class... Args>
  [[noreturn]] void wrong(std::int64_t byte, fmt::format_string<Args...> format, Args&&... args) const {
    throw Error(fmt::format("{}: at byte {}: {}", source_, byte, fmt::format(format, std::forward<Args>(args)...)));
  }

  template <class T>
  T number(std::string_view what) {
    if (left() < static_cast<std::int64_t>(sizeof(T))) wrong(at(), "the file ends in {} (truncated?)", what);
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  /// A count of things of at least `least_bytes` each: no more than the file has room for.
  std::int64_t count(std::string_view what, std::int64_t least) {
    const auto begin = at();
    const auto value = number<std::uint64_t>(what);
    if (value > static_cast<std::uint64_t>(left() / least)) {
      wrong(begin, "{} = {}: the file has {} bytes left", what, value, left());
    }
    return static_cast<std::int64_t>(value);
  }
  std::string text(std::string_view what, std::int64_t most = std::numeric_limits<std::int64_t>::max()) {
    const auto begin = at();
    const auto length = count(what, 1);
    if (length > most) wrong(begin, "{} of {} bytes: expected at most {}", what, length, most);
    std::string value(bytes_.substr(at_, static_cast<std::size_t>(length)));
    at_ += static_cast<std::size_t>(length);
    return value;
  }

 private:
  std::string_view bytes_;
  std::string_view source_;
  std::size_t at_ = 0;
};

std::int64_t read_integer(Cursor& in, ValueType type, std::string_view what) {
  switch (type) {
    case ValueType::u8: return in.number<std::uint8_t>(what);
    case ValueType::i8: return in.number<std::int8_t>(what);
    case ValueType::u16: return in.number<std::uint16_t>(what);
    case ValueType::i16: return in.number<std::int16_t>(what);
    case ValueType::u32: return in.number<std::uint32_t>(what);
    case ValueType::i32: return in.number<std::int32_t>(what);
    case ValueType::i64: return in.number<std::int64_t>(what);
    default: break;
  }
  const auto begin = in.at();
  const auto value = in.number<std::uint64_t>(what);
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    in.wrong(begin, "{} = {}: expected less than 2^63", what, value);
  }
  return static_cast<std::int64_t>(value);
}

double read_float(Cursor& in, ValueType type, std::string_view what) {
  return type == ValueType::f32 ? static_cast<double>(in.number<float>(what)) : in.number<double>(what);
}

bool read_flag(Cursor& in, std::string_view what) {
  const auto begin = in.at();
  const auto value = in.number<std::uint8_t>(what);
  if (value > 1) in.wrong(begin, "{} = {}: expected 0 or 1 for a flag", what, value);
  return value == 1;
}

ValueType read_type(Cursor& in, std::string_view what) {
  const auto begin = in.at();
  const auto type = in.number<std::uint32_t>(what);
  if (type >= static_cast<std::uint32_t>(ValueType::end)) {
    in.wrong(begin, "{} has type {}: expected 0 to {}", what, type, static_cast<std::uint32_t>(ValueType::end) - 1);
  }
  return static_cast<ValueType>(type);
}

void read_array(Cursor& in, std::string_view what, GgufValue& result) {
  const auto begin = in.at();
  const ValueType type = read_type(in, what);
  if (type == ValueType::array) in.wrong(begin, "{}: arrays within arrays are not supported", what);
  const auto size = in.count(what, least_bytes(type));
  const auto fill = [&](auto list, auto&& read) {
    for (std::int64_t i = 0; i < size; ++i) list.push_back(read());
    result.value = std::move(list);
  };
  if (type == ValueType::text) return fill(GgufValue::Texts(), [&] { return in.text(what); });
  if (type == ValueType::f32 || type == ValueType::f64) {
    return fill(GgufValue::Numbers(), [&] { return read_float(in, type, what); });
  }
  if (type == ValueType::boolean) {
    return fill(GgufValue::Integers(), [&] { return std::int64_t{read_flag(in, what)}; });
  }
  fill(GgufValue::Integers(), [&] { return read_integer(in, type, what); });
}

void read_metadata(Cursor& in, std::int64_t count, GgufHeader& header) {
  for (std::int64_t i = 0; i < count; ++i) {
    GgufValue value;
    value.begin = in.at();
    std::string key = in.text("a key of the metadata", kMaxNameBytes);
    const std::string what = fmt::format("'{}'", printable(key));
    const ValueType type = read_type(in, what);
    switch (type) {
      case ValueType::f32:
      case ValueType::f64: value.value = read_float(in, type, what); break;
      case ValueType::boolean: value.value = read_flag(in, what); break;
      case ValueType::text: value.value = in.text(what); break;
      case ValueType::array: read_array(in, what, value); break;
      default: value.value = read_integer(in, type, what);
    }
    const auto begin = value.begin;
    if (!header.metadata.emplace(std::move(key), std::move(value)).second) in.wrong(begin, "{} stands twice", what);
  }
}

std::int64_t alignment_of(const GgufHeader& header) {
  const auto alignment = header.integer_or(kAlignmentKey, 1, kMaxAlignment, kDefaultAlignment);
  if (!std::has_single_bit(static_cast<std::uint64_t>(alignment))) {
    header.wrong(kAlignmentKey, fmt::format("{}: expected a power of two", alignment));
  }
  return alignment;
}

GgufType read_tensor_type(Cursor& in, const std::string& what) {
  const auto begin = in.at();
  const auto number = in.number<std::uint32_t>(what);
  const auto type = static_cast<GgufType>(number);
  switch (type) {
    case GgufType::f32:
    case GgufType::f16:
    case GgufType::q4_0:
    case GgufType::q4_1:
    case GgufType::q8_0:
    case GgufType::q4_k:
    case GgufType::q6_k:
    case GgufType::bf16: return type;
  }
  in.wrong(begin,
           "{} has elements of type {}: expected F32 0, F16 1, Q4_0 2, Q4_1 3, Q8_0 8, Q4_K 12, Q6_K 14, BF16 30", what,
           number);
}

/// Its offset is still that within the data.
GgufTensor read_tensor(Cursor& in) {
  GgufTensor tensor;
  const auto begin = in.at();
  tensor.name = in.text("a tensor's name", kMaxNameBytes);
  if (tensor.name.empty()) in.wrong(begin, "a tensor without a name");
  const std::string what = fmt::format("tensor '{}'", printable(tensor.name));
  const auto dims_at = in.at();
  const auto num_dims = in.number<std::uint32_t>(what);
  if (num_dims < 1 || num_dims > kMaxDims)
    in.wrong(dims_at, "{}: {} sizes, expected 1 to {}", what, num_dims, kMaxDims);
  std::int64_t elements = 1;
  for (std::uint32_t i = 0; i < num_dims; ++i) {
    const auto size_at = in.at();
    const auto size = read_integer(in, ValueType::u64, what);
    if (size < 1 || __builtin_mul_overflow(elements, size, &elements)) {
      in.wrong(size_at, "{}: size {} of axis {}: expected at least 1, and no overflow of all together", what, size, i);
    }
    tensor.shape.insert(tensor.shape.begin(), size);
  }
  tensor.type = read_tensor_type(in, what);
  const GgufBlock block = block_of(tensor.type);
  if (tensor.width() % block.elements != 0) {
    in.wrong(dims_at, "{}: rows of {} elements, expected a multiple of {} for {}", what, tensor.width(), block.elements,
             block.name);
  }
  if (__builtin_mul_overflow(elements / block.elements, block.bytes, &tensor.bytes)) {
    in.wrong(dims_at, "{}: its bytes overflow", what);
  }
  tensor.begin = read_integer(in, ValueType::u64, what);
  return tensor;
}

/// Offsets become those in the file; data lie in the file, aligned, and no tensor's over another's.
void place_tensors(const Cursor& in, std::int64_t data_begin, std::int64_t alignment, std::int64_t file_bytes,
                   std::vector<GgufTensor>& tensors) {
  const std::int64_t data_bytes = std::max<std::int64_t>(file_bytes - data_begin, 0);
  for (auto& tensor : tensors) {
    const auto offset = tensor.begin;
    if (offset % alignment != 0) {
      in.wrong(data_begin, "tensor '{}': offset {} of its data, expected a multiple of {}", printable(tensor.name),
               offset, alignment);
    }
    if (offset > data_bytes || tensor.bytes > data_bytes - offset) {
      in.wrong(data_begin, "tensor '{}': {} bytes of data at offset {}: the file has {} (truncated?)",
               printable(tensor.name), tensor.bytes, offset, data_bytes);
    }
    tensor.begin = data_begin + offset;
  }
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].begin < tensors[i - 1].begin + tensors[i - 1].bytes) {
      in.wrong(tensors[i].begin, "the data of tensor '{}' overlap those of '{}'", printable(tensors[i].name),
               printable(tensors[i - 1].name));
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].name == tensors[i - 1].name) {
      in.wrong(tensors[i].begin, "tensor '{}' stands twice", printable(tensors[i].name));
    }
  }
}

}  // namespace

GgufBlock block_of(GgufType type) {
  switch (type) {
    case GgufType::f32: return {"F32", 1, 4};
    case GgufType::f16: return {"F16", 1, 2};
    case GgufType::bf16: return {"BF16", 1, 2};
    case GgufType::q8_0: return {"Q8_0", 32, 2 + 32};
    case GgufType::q4_0: return {"Q4_0", 32, 2 + 16};
    case GgufType::q4_1: return {"Q4_1", 32, 2 + 2 + 16};
    case GgufType::q4_k: return {"Q4_K", 256, 2 + 2 + 12 + 128};
    case GgufType::q6_k: return {"Q6_K", 256, 128 + 64 + 16 + 2};
  }
  ISOMER_CHECK(false, "type {}", static_cast<std::uint32_t>(type));
}

GgufHeader parse_gguf_header(std::string_view bytes, std::int64_t file_bytes, std::string_view source) {
  Cursor in(bytes.substr(0, static_cast<std::size_t>(std::max<std::int64_t>(file_bytes, 0))), source);
  if (!bytes.starts_with(kMagic)) in.wrong(0, "not a GGUF file: it doesn't begin with \"GGUF\"");
  in.number<std::uint32_t>("the magic number");
  const auto version = in.number<std::uint32_t>("the version");
  if (version != 2 && version != 3) {
    in.wrong(4, "version {}: expected 2 or 3{}", version, version == 3u << 24 ? "; the file is big-endian" : "");
  }
  GgufHeader header;
  header.source = source;
  const auto num_tensors = in.count("the number of tensors", kLeastTensorBytes);
  const auto num_metadata = in.count("the number of metadata", kLeastMetadataBytes);
  read_metadata(in, num_metadata, header);
  for (std::int64_t i = 0; i < num_tensors; ++i) header.tensors.push_back(read_tensor(in));
  const auto alignment = alignment_of(header);
  const auto data_begin = (in.at() + alignment - 1) / alignment * alignment;
  place_tensors(in, data_begin, alignment, file_bytes, header.tensors);
  return header;
}

const GgufTensor* GgufHeader::find(std::string_view name) const {
  const auto at =
      std::lower_bound(tensors.begin(), tensors.end(), name,
                       [](const GgufTensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

void GgufHeader::wrong(std::string_view key, std::string_view what) const {
  const auto found = metadata.find(key);
  throw Error(fmt::format("{}: at byte {}: '{}': {}", source, found == metadata.end() ? 0 : found->second.begin,
                          printable(key), what));
}

template <class T>
const T& GgufHeader::get(std::string_view key, std::string_view expected) const {
  const auto found = metadata.find(key);
  if (found == metadata.end()) wrong(key, fmt::format("it is missing: expected {}", expected));
  const T* value = std::get_if<T>(&found->second.value);
  if (value == nullptr) wrong(key, fmt::format("a value of another type: expected {}", expected));
  return *value;
}

std::int64_t GgufHeader::integer(std::string_view key, std::int64_t low, std::int64_t high) const {
  const auto value = get<std::int64_t>(key, "an integer");
  if (value < low || value > high) wrong(key, fmt::format("{}: expected {} to {}", value, low, high));
  return value;
}

std::int64_t GgufHeader::integer_or(std::string_view key, std::int64_t low, std::int64_t high,
                                    std::int64_t absent) const {
  return has(key) ? integer(key, low, high) : absent;
}

double GgufHeader::number(std::string_view key) const {
  const auto found = metadata.find(key);
  if (found != metadata.end() && std::holds_alternative<std::int64_t>(found->second.value)) {
    return static_cast<double>(std::get<std::int64_t>(found->second.value));
  }
  const auto value = get<double>(key, "a number");
  if (!std::isfinite(value)) wrong(key, fmt::format("{}: expected a finite number", value));
  return value;
}

double GgufHeader::number_or(std::string_view key, double absent) const { return has(key) ? number(key) : absent; }
bool GgufHeader::flag_or(std::string_view key, bool absent) const {
  return has(key) ? get<bool>(key, "a flag") : absent;
}
const std::string& GgufHeader::text(std::string_view key) const { return get<std::string>(key, "a text"); }
std::string GgufHeader::text_or(std::string_view key, std::string_view absent) const {
  return has(key) ? text(key) : std::string(absent);
}
const GgufValue::Texts& GgufHeader::texts(std::string_view key) const {
  return get<GgufValue::Texts>(key, "an array of texts");
}
const GgufValue::Integers& GgufHeader::integers(std::string_view key) const {
  return get<GgufValue::Integers>(key, "an array of integers");
}

GgufFile::GgufFile(const std::filesystem::path& path) : file_(path) {
  header_ = parse_gguf_header({file_.data(), static_cast<std::size_t>(file_.bytes())}, file_.bytes(), path.string());
}

bool is_gguf_file(const std::filesystem::path& path) {
  std::error_code code;
  if (!std::filesystem::is_regular_file(path, code)) return false;
  std::ifstream file(path, std::ios::binary);
  std::string begin(kMagic.size(), '\0');
  return file.read(begin.data(), static_cast<std::streamsize>(begin.size())) && begin == kMagic;
}

}  // namespace isomer
