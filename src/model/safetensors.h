// safetensors files: one file's header and bytes, and the writers. checkpoint.h joins shards and converts.
//
// Layout: 8 bytes little-endian length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data without
// holes. A file is hostile until parsed: everything is checked at open, before any of it is used.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "model/file_dtype.h"

namespace isomer {

inline constexpr std::int64_t kMaxSafetensorsHeader = 100'000'000;  // the limit of the reference implementation

struct TensorInfo {
  std::string name;
  FileDType dtype = FileDType::f32;
  Shape shape;
  std::int64_t begin = 0;  // byte offset in the file
  std::int64_t bytes = 0;
  std::string encoding = {};  // "Q4_1": blocks in a GGUF file, `dtype` when read; empty: elements of `dtype`

  std::string_view type_name() const { return encoding.empty() ? name_of(dtype) : std::string_view(encoding); }
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // by name
  std::map<std::string, std::string> metadata;
};

/// Parses and checks the header. `bytes` are the file from its beginning, at least to the header's end if there is one;
/// `file_bytes` is the size of the whole. Throws isomer::Error naming `source` and the byte offset.
SafetensorsHeader parse_safetensors_header(std::string_view bytes, std::int64_t file_bytes, std::string_view source);

/// A read-only mapping of a file; keeps the mapping while anybody uses it.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }
  /// Throws isomer::Error if the file has become shorter since it was opened.
  void check_size() const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  const char* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// One file, mapped and checked.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const SafetensorsHeader& header() const { return header_; }
  const std::shared_ptr<const MappedFile>& file() const { return file_; }
  /// nullptr if there is none of this name.
  const TensorInfo* find(std::string_view name) const;

 private:
  std::shared_ptr<const MappedFile> file_;
  SafetensorsHeader header_;
};

/// A tensor to write, made when its turn comes, so that a large checkpoint never stands in memory at once.
struct TensorSource {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::function<Tensor()> make;
  /// Instead of `make`, elements of any file's type as they stand: copied bit for bit, `dtype` is not looked at.
  struct Raw {
    FileDType dtype = FileDType::f32;
    std::function<std::string_view()> bytes;
  };
  std::optional<Raw> raw = std::nullopt;

  FileDType file_dtype() const { return raw ? raw->dtype : file_dtype_of(dtype); }
  std::int64_t num_bytes() const { return num_elements(shape) * size_of(file_dtype()); }
};
/// A source of a tensor that stands already (any strides).
TensorSource tensor_source(std::string name, Tensor tensor);

using SafetensorsMetadata = std::map<std::string, std::string>;

/// Writes one file under a temporary name and renames it, so that a reader sees the old file or the new one. Data is
/// aligned to 64 bytes at its start. Throws std::invalid_argument for duplicate, empty or reserved names, isomer::Error
/// for trouble with the file.
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorSource>& tensors,
                       const SafetensorsMetadata& metadata = {});

/// Writes a checkpoint directory: model.safetensors if it fits one shard, else model-00001-of-0000N.safetensors, in the
/// given order, and the index last. Refuses a directory in which another checkpoint would be left to mix with this one.
void write_checkpoint(const std::filesystem::path& directory, const std::vector<TensorSource>& tensors,
                      std::int64_t max_shard_bytes, const SafetensorsMetadata& metadata = {});

}  // namespace isomer
