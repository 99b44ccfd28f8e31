// Tensor = dtype, shape, strides, device, shared storage. Views are free; storage is counted once in the rank's
// memory record and leaves it with its last view. A shape-only tensor has no data: reading it throws.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "core/memory_record.h"

namespace isomer {

using Shape = std::vector<std::int64_t>;
std::int64_t num_elements(const Shape& shape);
std::string to_string(const Shape& shape);

enum class Device : std::uint8_t { cpu };

/// A block of memory, aligned to 64 bytes, or the promise of one (shape-only: data() is null).
class Storage {
 public:
  /// `record` may be null (memory outside any rank, shared weights say).
  Storage(std::shared_ptr<MemoryRecord> record, std::string_view name, MemoryClass memory_class, std::int64_t bytes,
          bool shape_only);
  /// Wraps memory that `owner` keeps alive (a mapped file, say); read-only by convention.
  Storage(std::shared_ptr<const void> owner, const void* data, std::int64_t bytes);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  /// Enters the storage under another class in its record, if it has one.
  void reclassify(MemoryClass memory_class) const;
  std::int64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<MemoryRecord> record_;
  std::shared_ptr<const void> owner_;
  std::int64_t record_id_ = -1;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Shape shape, std::shared_ptr<Storage> storage);

  /// Memory outside any rank's record; for weights shared by ranks, references and tests.
  static Tensor unrecorded(std::string_view name, DType dtype, Shape shape, bool shape_only = false);

  bool defined() const { return storage_ != nullptr; }
  explicit operator bool() const { return defined(); }
  /// True if there is a shape and no storage behind it (dry run).
  bool shape_only() const { return storage_ && storage_->data() == nullptr && storage_->bytes() > 0; }

  DType dtype() const { return dtype_; }
  Device device() const { return Device::cpu; }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }  // in elements
  int dim() const { return static_cast<int>(shape_.size()); }
  std::int64_t size(int axis) const { return shape_.at(static_cast<std::size_t>(axis < 0 ? axis + dim() : axis)); }
  std::int64_t stride(int axis) const { return strides_.at(static_cast<std::size_t>(axis < 0 ? axis + dim() : axis)); }
  std::int64_t numel() const { return num_elements(shape_); }
  std::int64_t nbytes() const { return numel() * size_of(dtype_); }
  bool is_contiguous() const;
  /// True if both are the same view of one storage (or neither is defined).
  bool same_view(const Tensor& other) const {
    return storage_ == other.storage_ && offset_ == other.offset_ && shape_ == other.shape_;
  }

  /// First element. Throws for a shape-only tensor and for a wrong T. A tensor without elements gives a pointer that
  /// must not be read.
  template <class T>
  T* data() const {
    ISOMER_CHECK(kDTypeOf<T> == dtype_, "asked for {}, tensor is {}", name_of(kDTypeOf<T>), name_of(dtype_));
    return static_cast<T*>(raw());
  }
  /// The same without a type.
  void* raw() const;

  /// Enters the whole storage under another class in its record.
  void reclassify(MemoryClass memory_class) const { storage_->reclassify(memory_class); }

  // Views: no copy, the same storage.
  Tensor slice(int axis, std::int64_t begin, std::int64_t length) const;
  /// Every step-th index of `axis` from `begin` on, `length` of them.
  Tensor strided_slice(int axis, std::int64_t begin, std::int64_t length, std::int64_t step) const;
  /// The same elements `count` times along a new axis of stride 0, inserted at `axis`. Read-only by convention.
  Tensor broadcast(int axis, std::int64_t count) const;
  /// Removes `axis` at `index`.
  Tensor select(int axis, std::int64_t index) const;
  Tensor transpose(int axis_a, int axis_b) const;
  /// Another shape of a contiguous tensor.
  Tensor reshape(Shape shape) const;
  /// Splits `axis` into sizes whose product is its size; works on any strides.
  Tensor unflatten(int axis, Shape sizes) const;
  /// Joins axes [first, last] where their strides allow it without a copy; throws otherwise.
  Tensor flatten(int first, int last) const;

 private:
  DType dtype_ = DType::f32;
  Shape shape_;
  Shape strides_;
  std::int64_t offset_ = 0;
  std::shared_ptr<Storage> storage_;
};

}  // namespace isomer
