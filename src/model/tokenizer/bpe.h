// Byte-pair encoding of one piece: the pair of the lowest rank is joined, the leftmost first, until none is left.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace isomer {

struct Merge {
  std::int32_t left = 0, right = 0;
  std::int32_t result = 0;
};

/// (left, right) → rank and result, in one open-addressed table.
class MergeTable {
 public:
  struct Entry {
    std::uint64_t key = ~std::uint64_t{0};  // left and right; all ones: empty
    std::int32_t rank = 0, result = 0;
  };
  MergeTable() = default;
  /// Ranks are indices. Of two merges of the same pair the later one counts, as in the reference.
  explicit MergeTable(const std::vector<Merge>& merges);
  const Entry* find(std::int32_t left, std::int32_t right) const;

 private:
  std::vector<Entry> entries_;  // a power of two, at most half full
};

class BytePairEncoder {
 public:
  static constexpr std::int32_t kNoToken = -1;

  BytePairEncoder() = default;
  /// `byte_ids`: the token of each byte; a byte with kNoToken is passed over, and its neighbours may be joined.
  /// `whole_pieces`: pieces that are tokens as they stand, whatever the merges (ignore_merges); empty for none.
  BytePairEncoder(const std::array<std::int32_t, 256>& byte_ids, const std::vector<Merge>& merges,
                  std::unordered_map<std::string, std::int32_t> whole_pieces);
  /// Appends the tokens of `piece`. Time n·log n.
  void encode(std::string_view piece, std::vector<std::int32_t>& ids) const;

 private:
  std::array<std::int32_t, 256> byte_ids_{};
  MergeTable merges_;
  std::unordered_map<std::string, std::int32_t> whole_pieces_;
};

}  // namespace isomer
