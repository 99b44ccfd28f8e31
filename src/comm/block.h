// A block: what a tensor view looks like to a transport, equal contiguous rows at one stride, or groups of such rows at
// a second one ([t, h/P, v] cut out of [t, h, n + v]).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/tensor.h"

namespace isomer {

struct Block {
  std::byte* data = nullptr;  // null for an empty block, and in a dry run
  std::int64_t rows = 0;
  std::int64_t row_bytes = 0;
  std::int64_t stride_bytes = 0;
  std::int64_t rows_per_group = 0;  // 0: all rows are one group
  std::int64_t group_stride_bytes = 0;

  std::int64_t bytes() const { return rows * row_bytes; }
  bool contiguous() const { return rows <= 1 || (row_bytes == stride_bytes && rows_per_group == 0); }
  std::byte* row(std::int64_t index) const {
    if (rows_per_group == 0) return data + index * stride_bytes;
    return data + index / rows_per_group * group_stride_bytes + index % rows_per_group * stride_bytes;
  }
};

/// The block of `tensor`, in one row if it is contiguous; nothing if its rows stand at more than two strides.
/// `shape_only`: without a pointer.
std::optional<Block> block_of(const Tensor& tensor, bool shape_only);

/// A block of contiguous bytes.
Block contiguous_block(void* data, std::int64_t bytes);

/// Copies a block to one of the same number of bytes, whose rows may be cut differently.
void copy_block(const Block& from, const Block& to);

/// The contiguous pieces of `block` in [begin, end) of its logical bytes, in order: body(pointer, bytes).
template <class Body>
void for_each_piece(const Block& block, std::int64_t begin, std::int64_t end, Body&& body) {
  while (begin < end) {
    const std::int64_t row = begin / block.row_bytes;
    const std::int64_t within = begin - row * block.row_bytes;
    const std::int64_t left = block.row_bytes - within;
    const std::int64_t length = left < end - begin ? left : end - begin;
    body(block.row(row) + within, length);
    begin += length;
  }
}

}  // namespace isomer
