#include "core/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

namespace isomer {

namespace {

constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which older headers lack

struct AddressRange {
  std::uintptr_t begin, end;
};

/// In order of address; those less than a huge page apart are one, since what lies between is mapped or makes the call
/// fail for this range alone.
std::vector<AddressRange> joined(std::vector<AddressRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::vector<AddressRange> result;
  for (const AddressRange& range : ranges) {
    if (!result.empty() && range.begin < result.back().end + kHugePageBytes) {
      result.back().end = std::max(result.back().end, range.end);
    } else {
      result.push_back(range);
    }
  }
  return result;
}

}  // namespace

void collapse_into_huge_pages(const std::vector<Tensor>& tensors) {
  std::vector<AddressRange> ranges;
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.shape_only() || !tensor.is_contiguous() || tensor.nbytes() == 0) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.raw());
    ranges.push_back({begin, begin + static_cast<std::uintptr_t>(tensor.nbytes())});
  }
  for (const AddressRange& range : joined(std::move(ranges))) {
    const std::uintptr_t begin = (range.begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    // Page by page: one that can't be collapsed must not keep the others from it.
    for (std::uintptr_t page = begin; page + kHugePageBytes <= range.end; page += kHugePageBytes) {
      madvise(reinterpret_cast<void*>(page), kHugePageBytes, kCollapse);  // advice: its success does not matter
    }
  }
}

}  // namespace isomer
