#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "model/json_text.h"
#include "model/safetensors.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kDataAlignment = 64;

/// A new file that disappears unless it is renamed into place.
class TemporaryFile {
 public:
  explicit TemporaryFile(const fs::path& final_path)
      : final_path_(final_path), path_(fmt::format("{}.tmp-{}", final_path.string(), ::getpid())) {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (descriptor_ < 0) fail();
  }
  ~TemporaryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    std::error_code code;
    if (!renamed_) fs::remove(path_, code);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const void* data, std::int64_t bytes) {
    const auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const auto written = ::write(descriptor_, at, static_cast<std::size_t>(std::min<std::int64_t>(bytes, 1 << 30)));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail();
      at += written;
      bytes -= written;
    }
  }
  void close() {
    if (::fsync(descriptor_) != 0) fail();
    const int descriptor = std::exchange(descriptor_, -1);
    if (::close(descriptor) != 0) fail();
  }
  void rename() {
    if (::rename(path_.c_str(), final_path_.c_str()) != 0) fail();
    renamed_ = true;
  }

 private:
  [[noreturn]] void fail() const { throw Error(fmt::format("{}: {}", final_path_.string(), std::strerror(errno))); }

  fs::path final_path_, path_;
  int descriptor_ = -1;
  bool renamed_ = false;
};

void check_names(const std::vector<TensorSource>& tensors) {
  std::set<std::string_view> names;
  for (const auto& tensor : tensors) {
    if (tensor.name.empty() || tensor.name == "__metadata__") {
      invalid_argument("tensor name '{}': expected neither an empty nor a reserved name", tensor.name);
    }
    if (!names.insert(tensor.name).second) invalid_argument("tensor name '{}': given twice", printable(tensor.name));
  }
}

/// Length and header, padded with spaces so that the data begin aligned. Offsets follow the order of `tensors`.
std::string header_text(const std::vector<const TensorSource*>& tensors, const SafetensorsMetadata& metadata) {
  nlohmann::json header = nlohmann::json::object();
  header["__metadata__"] = metadata;
  header["__metadata__"].emplace("format", "pt");  // transformers refuses files without
  std::int64_t offset = 0;
  for (const auto* tensor : tensors) {
    const auto end = offset + tensor->num_bytes();
    header[tensor->name] = {
        {"dtype", name_of(tensor->file_dtype())}, {"shape", tensor->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    invalid_argument("tensor names and metadata: expected UTF-8");
  }
  text.append((kDataAlignment - (text.size() + 8) % kDataAlignment) % kDataAlignment, ' ');
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return length + text;
}

/// The elements in row-major order, whatever the strides.
void write_elements(TemporaryFile& file, const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  if (tensor.is_contiguous()) {
    file.write(tensor.raw(), tensor.nbytes());
  } else if (tensor.dim() > 1) {
    for (std::int64_t i = 0; i < tensor.size(0); ++i) write_elements(file, tensor.select(0, i));
  } else {
    const auto size = static_cast<std::size_t>(size_of(tensor.dtype()));
    std::string gathered(static_cast<std::size_t>(tensor.numel()) * size, '\0');
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      std::memcpy(gathered.data() + static_cast<std::size_t>(i) * size, tensor.slice(0, i, 1).raw(), size);
    }
    file.write(gathered.data(), static_cast<std::int64_t>(gathered.size()));
  }
}

void write_tensors(TemporaryFile& file, std::vector<const TensorSource*> tensors, const SafetensorsMetadata& metadata) {
  // Wide elements first, so that every tensor is aligned to its own.
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorSource* a, const TensorSource* b) {
    return size_of(a->file_dtype()) > size_of(b->file_dtype());
  });
  const std::string header = header_text(tensors, metadata);
  file.write(header.data(), static_cast<std::int64_t>(header.size()));
  for (const auto* source : tensors) {
    if (source->raw) {
      const std::string_view bytes = source->raw->bytes();
      const auto size = static_cast<std::int64_t>(bytes.size());
      ISOMER_CHECK(size == source->num_bytes(), "'{}': {} bytes were announced as {}", source->name, size,
                   source->num_bytes());
      file.write(bytes.data(), size);
      continue;
    }
    const Tensor tensor = source->make();
    ISOMER_CHECK(tensor.dtype() == source->dtype && tensor.shape() == source->shape,
                 "'{}': {} {} was announced as {} {}", source->name, name_of(tensor.dtype()), to_string(tensor.shape()),
                 name_of(source->dtype), to_string(source->shape));
    write_elements(file, tensor);
  }
  file.close();
}

/// Which tensors go into which shard: in order, a new shard where the next tensor would exceed the limit.
std::vector<std::vector<const TensorSource*>> split(const std::vector<TensorSource>& tensors, std::int64_t limit) {
  std::vector<std::vector<const TensorSource*>> shards(1);
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    const auto size = tensor.num_bytes();
    if (!shards.back().empty() && bytes + size > limit) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(&tensor);
    bytes += size;
  }
  return shards;
}

std::string shard_name(std::size_t shard, std::size_t num_shards) {
  return num_shards == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, num_shards);
}

void refuse_foreign_files(const fs::path& directory, const std::set<std::string>& ours) {
  std::error_code code;
  for (const auto& item : fs::directory_iterator(directory, code)) {
    const auto name = item.path().filename().string();
    const bool weights = name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".index.json"));
    if (weights && !ours.contains(name)) {
      invalid_argument("directory {}: {} of another checkpoint is there; choose an empty directory", directory.string(),
                       name);
    }
  }
}

std::string index_text(const std::vector<std::vector<const TensorSource*>>& shards) {
  nlohmann::json weight_map = nlohmann::json::object();
  std::int64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (const auto* tensor : shards[i]) {
      weight_map[tensor->name] = shard_name(i, shards.size());
      total += tensor->num_bytes();
    }
  }
  return nlohmann::json{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}}.dump(2) + "\n";
}

}  // namespace

TensorSource tensor_source(std::string name, Tensor tensor) {
  const auto dtype = tensor.dtype();
  Shape shape = tensor.shape();
  return {std::move(name), dtype, std::move(shape), [tensor = std::move(tensor)] { return tensor; }};
}

void write_safetensors(const fs::path& path, const std::vector<TensorSource>& tensors,
                       const SafetensorsMetadata& metadata) {
  check_names(tensors);
  std::vector<const TensorSource*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  TemporaryFile file(path);
  write_tensors(file, std::move(order), metadata);
  file.rename();
}

void write_checkpoint(const fs::path& directory, const std::vector<TensorSource>& tensors, std::int64_t max_shard_bytes,
                      const SafetensorsMetadata& metadata) {
  constexpr auto kIndexFile = "model.safetensors.index.json";
  check_names(tensors);
  const auto shards = split(tensors, max_shard_bytes);
  std::set<std::string> ours;
  for (std::size_t i = 0; i < shards.size(); ++i) ours.insert(shard_name(i, shards.size()));
  if (shards.size() > 1) ours.insert(kIndexFile);
  std::error_code code;
  fs::create_directories(directory, code);
  if (code) throw Error(fmt::format("{}: {}", directory.string(), code.message()));
  refuse_foreign_files(directory, ours);
  // All of it is written before any of it gets its name.
  std::vector<std::unique_ptr<TemporaryFile>> files;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    files.push_back(std::make_unique<TemporaryFile>(directory / shard_name(i, shards.size())));
    write_tensors(*files.back(), shards[i], metadata);
  }
  if (shards.size() > 1) {
    const std::string text = index_text(shards);
    files.push_back(std::make_unique<TemporaryFile>(directory / kIndexFile));
    files.back()->write(text.data(), static_cast<std::int64_t>(text.size()));
    files.back()->close();
  }
  for (auto& file : files) file->rename();
}

}  // namespace isomer
