// GGUF files: header, metadata and table of tensors of one file. model/gguf/ has what is made of them: weights,
// config.json and tokenizer.json.
//
// Layout (github.com/ggml-org/ggml, docs/gguf.md), little-endian: "GGUF", version, number of tensors, number of
// metadata; each key, type, value; each tensor's name, sizes (fastest first), type, offset; padding; data. A file is
// hostile until parsed: everything is checked at open, before any of it is used.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/tensor.h"
#include "model/safetensors.h"

namespace isomer {

/// Element types that are read; the numbers are the file's.
enum class GgufType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q8_0 = 8,
  q4_k = 12,
  q6_k = 14,
  bf16 = 30,
};

/// Elements are stored in blocks along a row: `elements` of them in `bytes`.
struct GgufBlock {
  std::string_view name;  // "Q4_1"
  std::int64_t elements = 1, bytes = 0;
};
GgufBlock block_of(GgufType type);

struct GgufTensor {
  std::string name;
  GgufType type = GgufType::f32;
  Shape shape;             // slowest first, as everywhere here: the file has them the other way round
  std::int64_t begin = 0;  // byte offset in the file
  std::int64_t bytes = 0;

  /// Elements of a row (the last size), and how many rows there are.
  std::int64_t width() const { return shape.back(); }
  std::int64_t num_rows() const { return num_elements(shape) / width(); }
};

/// A value of the metadata: any integer, any float, a flag, a text, or an array of one of them.
struct GgufValue {
  using Integers = std::vector<std::int64_t>;
  using Numbers = std::vector<double>;
  using Texts = std::vector<std::string>;
  std::variant<std::int64_t, double, bool, std::string, Integers, Numbers, Texts> value;
  std::int64_t begin = 0;  // byte offset of its key
};

class GgufHeader {
 public:
  std::vector<GgufTensor> tensors;  // by name
  std::map<std::string, GgufValue, std::less<>> metadata;
  std::string source;  // what errors call the file

  bool has(std::string_view key) const { return metadata.find(key) != metadata.end(); }
  /// nullptr if there is none of this name.
  const GgufTensor* find(std::string_view name) const;

  // A value by its key. Throws isomer::Error with source and byte where it is missing, of another type, or outside
  // [low, high].
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high) const;
  std::int64_t integer_or(std::string_view key, std::int64_t low, std::int64_t high, std::int64_t absent) const;
  double number(std::string_view key) const;  // finite; an integer is one too
  double number_or(std::string_view key, double absent) const;
  bool flag_or(std::string_view key, bool absent) const;
  const std::string& text(std::string_view key) const;
  std::string text_or(std::string_view key, std::string_view absent) const;
  const GgufValue::Texts& texts(std::string_view key) const;
  const GgufValue::Integers& integers(std::string_view key) const;

  /// Throws: "source: at byte N: 'key': what" (byte 0 for a key that isn't there).
  [[noreturn]] void wrong(std::string_view key, std::string_view what) const;

 private:
  template <class T>
  const T& get(std::string_view key, std::string_view expected) const;
};

/// Parses and checks a whole file's beginning: `bytes` must reach to the end of the tensor table; `file_bytes` is the
/// size of the whole. Throws isomer::Error naming `source` and the byte offset.
GgufHeader parse_gguf_header(std::string_view bytes, std::int64_t file_bytes, std::string_view source);

/// One file, mapped and checked.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);

  const GgufHeader& header() const { return header_; }
  const MappedFile& file() const { return file_; }

 private:
  MappedFile file_;
  GgufHeader header_;
};

/// A regular file that begins with "GGUF". Never throws.
bool is_gguf_file(const std::filesystem::path& path);

}  // namespace isomer
