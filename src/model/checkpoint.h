// A checkpoint: one safetensors file, shards under an index, or a GGUF file. Any slice of any tensor is read without
// the rest.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "model/safetensors.h"

namespace isomer {

/// [begin, begin + length) of an axis; without a length, to its end.
struct AxisRange {
  std::int64_t begin = 0;
  std::optional<std::int64_t> length;
};

/// Part of a tensor: rows are axis 0, columns axis 1. Columns need a tensor of two axes.
struct TensorSlice {
  AxisRange rows;
  AxisRange columns;
};

class GgufWeights;

class Checkpoint {
 public:
  /// A directory with model.safetensors, or model.safetensors.index.json and its shards; or one of these files; or a
  /// GGUF file, whose tensors then have their Hugging Face names and shapes and are dequantised as they are read. All
  /// headers are checked, and index against shards, before this returns; throws isomer::Error with file and offset.
  /// A shard must lie in the index's directory (links into a Hugging Face cache's blobs/ are followed).
  static Checkpoint open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// Sorted by name.
  std::vector<std::string_view> names() const;
  bool is_gguf() const { return gguf_ != nullptr; }
  bool contains(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  /// Throws isomer::Error if there is no such tensor.
  const TensorInfo& info(std::string_view name) const;
  /// The file that a tensor stands in.
  const std::filesystem::path& file_of(std::string_view name) const;
  /// Of the first safetensors file; empty for GGUF.
  const SafetensorsMetadata& metadata() const;

  /// A tensor or a slice of it in `dtype`. Where the file has the dtype already and its data is aligned, the result is
  /// a read-only view of the mapping, which it keeps alive (strided for a slice of columns); else a new contiguous
  /// tensor, as always from GGUF. FP8 takes "<name>_scale_inv" with it, float32 [⌈rows/128⌉, ⌈columns/128⌉]. Throws
  /// isomer::Error for integers, an FP8 tensor without its scales, and a slice outside the tensor.
  Tensor read(std::string_view name, DType dtype, const TensorSlice& slice = {}) const;

  /// The tensor's bytes as they stand in the file, valid as long as this checkpoint. Throws isomer::Error for GGUF.
  std::string_view bytes(std::string_view name) const;

  /// Rows in any order, repeats allowed: [row_ids.size(), columns], always a new tensor.
  Tensor read_rows(std::string_view name, std::span<const std::int64_t> row_ids, DType dtype) const;

 private:
  struct Entry {
    const TensorInfo* info;
    std::size_t file;  // which of files_; of a GGUF file, which of its tensors
  };
  const Entry& entry(std::string_view name) const;
  void add_file(const std::filesystem::path& path);
  void add_index(const std::filesystem::path& path);
  void add_gguf(const std::filesystem::path& path);
  /// The file that an entry stands in, mapped.
  const MappedFile& mapped(const Entry& entry) const;
  Tensor view(const Entry& entry) const;
  Tensor read_gguf(const Entry& entry, DType dtype, const TensorSlice& slice) const;
  Tensor fp8_scales(const Entry& entry) const;
  [[noreturn]] void complain(const Entry& entry, std::string_view what) const;

  std::filesystem::path path_;
  std::vector<SafetensorsFile> files_;
  std::shared_ptr<const GgufWeights> gguf_;
  std::map<std::string, Entry, std::less<>> entries_;
};

/// weight_map of a model.safetensors.index.json: tensor → file. File names are plain: no directory, no "..".
std::map<std::string, std::string> parse_weight_map(std::string_view text, std::string_view source);

}  // namespace isomer
