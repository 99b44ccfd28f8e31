#include "comm/block.h"

#include <cstring>

namespace isomer {

std::optional<Block> block_of(const Tensor& tensor, bool shape_only) {
  if (tensor.numel() == 0) return Block{};
  // Innermost axes that lie without gaps make the row; what is left must be
  // axes that join to one or two.
  int axis = tensor.dim() - 1;
  std::int64_t row = 1;
  for (; axis >= 0; --axis) {
    if (tensor.size(axis) == 1) continue;
    if (tensor.stride(axis) != row) break;
    row *= tensor.size(axis);
  }
  std::int64_t rows = 1, stride = row;  // one group
  std::int64_t groups = 1, group_stride = 0;
  for (; axis >= 0; --axis) {
    if (tensor.size(axis) == 1) continue;
    const std::int64_t next = tensor.stride(axis);
    if (rows == 1) {
      stride = next;
      rows = tensor.size(axis);
    } else if (groups == 1 && next == stride * rows) {
      rows *= tensor.size(axis);
    } else if (groups == 1 || next == group_stride * groups) {
      if (groups == 1) group_stride = next;
      groups *= tensor.size(axis);
    } else {
      return std::nullopt;
    }
  }
  const std::int64_t width = size_of(tensor.dtype());
  Block block{nullptr, rows * groups, row * width, stride * width};
  if (groups > 1) {
    block.rows_per_group = rows;
    block.group_stride_bytes = group_stride * width;
  }
  if (!shape_only) block.data = static_cast<std::byte*>(tensor.raw());
  return block;
}

Block contiguous_block(void* data, std::int64_t bytes) {
  if (bytes == 0) return {};
  return {static_cast<std::byte*>(data), 1, bytes, bytes};
}

void copy_block(const Block& from, const Block& to) {
  if (from.bytes() == 0 || (from.data == to.data && from.contiguous() && to.contiguous())) return;
  if (from.contiguous() && to.contiguous()) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(from.bytes()));
    return;
  }
  if (from.row_bytes == to.row_bytes) {
    for (std::int64_t row = 0; row < from.rows; ++row)
      std::memcpy(to.row(row), from.row(row), static_cast<std::size_t>(from.row_bytes));
    return;
  }
  std::int64_t done = 0;
  for_each_piece(from, 0, from.bytes(), [&](const std::byte* source, std::int64_t bytes) {
    for_each_piece(to, done, done + bytes, [&](std::byte* target, std::int64_t length) {
      std::memcpy(target, source, static_cast<std::size_t>(length));
      source += length;
    });
    done += bytes;
  });
}

}  // namespace isomer
