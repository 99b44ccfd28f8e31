#include "core/tensor.h"

#include <fmt/ranges.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/huge_pages.h"

namespace isomer {

namespace {

constexpr std::size_t kAlignment = 64;
// Rows of one head lie kilobytes apart, so kernels that walk a head touch a page a row; in small pages they spend
// several per cent of their time in page walks.
constexpr std::size_t kHugePagesFrom = 2 * kHugePageBytes;

/// Memory of `bytes`, in huge pages where it is large and the system has them; null if there is none.
void* allocate(std::size_t bytes) {
  if (bytes < kHugePagesFrom) return std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  const std::size_t rounded = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void* data = std::aligned_alloc(kHugePageBytes, rounded);
  if (data != nullptr) madvise(data, rounded, MADV_HUGEPAGE);  // advice: what it says about success does not matter
  return data;
}

Shape contiguous_strides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (std::size_t axis = shape.size(); axis-- > 1;)
    strides[axis - 1] = strides[axis] * std::max<std::int64_t>(1, shape[axis]);
  return strides;
}

}  // namespace

std::int64_t num_elements(const Shape& shape) {
  std::int64_t count = 1;
  for (auto size : shape) count *= size;
  return count;
}

std::string to_string(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

Storage::Storage(std::shared_ptr<MemoryRecord> record, std::string_view name, MemoryClass memory_class,
                 std::int64_t bytes, bool shape_only)
    : record_(std::move(record)), bytes_(bytes) {
  if (!shape_only && bytes > 0) {
    data_ = allocate(static_cast<std::size_t>(bytes));
    if (data_ == nullptr) throw Error(fmt::format("out of memory: {} bytes for tensor '{}'", bytes, name));
    if (record_ && record_->poison) std::memset(data_, 0xff, static_cast<std::size_t>(bytes));  // NaN in every dtype
  }
  if (record_) record_id_ = record_->allocated(name, memory_class, bytes);
}

Storage::Storage(std::shared_ptr<const void> owner, const void* data, std::int64_t bytes)
    : owner_(std::move(owner)), data_(const_cast<void*>(data)), bytes_(bytes) {}

Storage::~Storage() {
  if (record_) record_->freed(record_id_);
  if (!owner_) std::free(data_);
}

void Storage::reclassify(MemoryClass memory_class) const {
  if (record_) record_->reclassify(record_id_, memory_class);
}

Tensor::Tensor(DType dtype, Shape shape, std::shared_ptr<Storage> storage)
    : dtype_(dtype), shape_(std::move(shape)), strides_(contiguous_strides(shape_)), storage_(std::move(storage)) {
  ISOMER_CHECK(nbytes() <= storage_->bytes(), "shape {} of {} needs {} bytes, storage has {}", to_string(shape_),
               name_of(dtype_), nbytes(), storage_->bytes());
}

Tensor Tensor::unrecorded(std::string_view name, DType dtype, Shape shape, bool shape_only) {
  const auto bytes = num_elements(shape) * size_of(dtype);
  return {dtype, std::move(shape), std::make_shared<Storage>(nullptr, name, MemoryClass::weight, bytes, shape_only)};
}

bool Tensor::is_contiguous() const {
  std::int64_t expected = 1;
  for (int axis = dim(); axis-- > 0;) {
    if (size(axis) != 1 && stride(axis) != expected) return numel() == 0;
    expected *= size(axis);
  }
  return true;
}

void* Tensor::raw() const {
  ISOMER_CHECK(storage_ != nullptr, "the tensor is undefined");
  ISOMER_CHECK(!shape_only(), "a shape-only tensor of shape {} was read", to_string(shape_));
  return static_cast<char*>(storage_->data()) + offset_ * size_of(dtype_);
}

Tensor Tensor::slice(int axis, std::int64_t begin, std::int64_t length) const {
  const auto a = static_cast<std::size_t>(axis < 0 ? axis + dim() : axis);
  ISOMER_CHECK(begin >= 0 && length >= 0 && begin + length <= shape_.at(a), "slice [{}, {}) of axis {} of {}", begin,
               begin + length, axis, to_string(shape_));
  Tensor view = *this;
  view.offset_ += begin * strides_[a];
  view.shape_[a] = length;
  return view;
}

Tensor Tensor::strided_slice(int axis, std::int64_t begin, std::int64_t length, std::int64_t step) const {
  const auto a = static_cast<std::size_t>(axis < 0 ? axis + dim() : axis);
  ISOMER_CHECK(begin >= 0 && length >= 0 && step >= 1 && (length == 0 || begin + (length - 1) * step < shape_.at(a)),
               "{} indices from {} in steps of {} on axis {} of {}", length, begin, step, axis, to_string(shape_));
  Tensor view = *this;
  view.offset_ += begin * strides_[a];
  view.shape_[a] = length;
  view.strides_[a] *= step;
  return view;
}

Tensor Tensor::broadcast(int axis, std::int64_t count) const {
  ISOMER_CHECK(axis >= 0 && axis <= dim() && count >= 0, "{} repetitions along a new axis {} of {}", count, axis,
               to_string(shape_));
  Tensor view = *this;
  view.shape_.insert(view.shape_.begin() + axis, count);
  view.strides_.insert(view.strides_.begin() + axis, 0);
  return view;
}

Tensor Tensor::select(int axis, std::int64_t index) const {
  const auto a = static_cast<std::size_t>(axis < 0 ? axis + dim() : axis);
  Tensor view = slice(static_cast<int>(a), index, 1);
  view.shape_.erase(view.shape_.begin() + static_cast<std::ptrdiff_t>(a));
  view.strides_.erase(view.strides_.begin() + static_cast<std::ptrdiff_t>(a));
  return view;
}

Tensor Tensor::transpose(int axis_a, int axis_b) const {
  const auto a = static_cast<std::size_t>(axis_a < 0 ? axis_a + dim() : axis_a);
  const auto b = static_cast<std::size_t>(axis_b < 0 ? axis_b + dim() : axis_b);
  Tensor view = *this;
  std::swap(view.shape_.at(a), view.shape_.at(b));
  std::swap(view.strides_.at(a), view.strides_.at(b));
  return view;
}

Tensor Tensor::reshape(Shape shape) const {
  ISOMER_CHECK(is_contiguous(), "reshape of a strided view of shape {}", to_string(shape_));
  ISOMER_CHECK(num_elements(shape) == numel(), "reshape of {} to {}", to_string(shape_), to_string(shape));
  Tensor view = *this;
  view.strides_ = contiguous_strides(shape);
  view.shape_ = std::move(shape);
  return view;
}

Tensor Tensor::unflatten(int axis, Shape sizes) const {
  const auto a = static_cast<std::size_t>(axis < 0 ? axis + dim() : axis);
  ISOMER_CHECK(num_elements(sizes) == shape_.at(a), "axis {} of {} split into {}", axis, to_string(shape_),
               to_string(sizes));
  Tensor view = *this;
  Shape inner = contiguous_strides(sizes);
  for (auto& stride : inner) stride *= strides_[a];
  const auto at = static_cast<std::ptrdiff_t>(a);
  view.shape_.erase(view.shape_.begin() + at);
  view.strides_.erase(view.strides_.begin() + at);
  view.shape_.insert(view.shape_.begin() + at, sizes.begin(), sizes.end());
  view.strides_.insert(view.strides_.begin() + at, inner.begin(), inner.end());
  return view;
}

Tensor Tensor::flatten(int first, int last) const {
  const auto f = static_cast<std::size_t>(first < 0 ? first + dim() : first);
  const auto l = static_cast<std::size_t>(last < 0 ? last + dim() : last);
  ISOMER_CHECK(f <= l && l < shape_.size(), "flatten [{}, {}] of {}", first, last, to_string(shape_));
  std::int64_t joined = 1;
  std::int64_t stride = strides_[l];
  for (std::size_t axis = l + 1; axis-- > f;) {
    if (shape_[axis] == 1) continue;
    if (joined == 1) stride = strides_[axis];
    ISOMER_CHECK(numel() == 0 || strides_[axis] == stride * joined,
                 "axes {}..{} of a view of shape {} can't be joined without a copy", first, last, to_string(shape_));
    joined *= shape_[axis];
  }
  Tensor view = *this;
  const auto begin = static_cast<std::ptrdiff_t>(f);
  const auto end = static_cast<std::ptrdiff_t>(l);
  view.shape_.erase(view.shape_.begin() + begin, view.shape_.begin() + end);
  view.strides_.erase(view.strides_.begin() + begin, view.strides_.begin() + end);
  view.shape_[f] = joined;
  view.strides_[f] = stride;
  return view;
}

}  // namespace isomer
