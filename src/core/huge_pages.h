// Huge pages for memory that was filled in small pieces. A stream of weights spends a tenth of its time in page walks
// and in starting anew at every small page.
#pragma once

#include <vector>

#include "core/tensor.h"

namespace isomer {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

/// Asks the system to put the storage of these tensors into huge pages, as far as neighbours in memory make up whole
/// ones. Nothing changes but speed; where the system cannot (before Linux 6.1, no huge pages left, a file's pages)
/// nothing happens. Shape-only tensors are passed over.
void collapse_into_huge_pages(const std::vector<Tensor>& tensors);

}  // namespace isomer
