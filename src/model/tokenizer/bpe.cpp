#include "model/tokenizer/bpe.h"

#include <queue>
#include <tuple>

namespace isomer {

namespace {

constexpr std::size_t kShortPiece = 32;  // up to here a scan beats a heap

std::uint64_t key_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

/// The multiplier spreads neighbouring keys; its high bits are the good ones.
std::size_t slot_of(std::uint64_t key, std::size_t mask) {
  const std::uint64_t hash = (key ^ key >> 29) * 0x9e3779b97f4a7c15;
  return static_cast<std::size_t>(hash >> 20) & mask;
}

/// A scan for the lowest rank after every merge; tokens of the piece in, merged tokens out.
void merge_short(const MergeTable& merges, std::vector<std::int32_t>& ids, std::size_t begin) {
  while (ids.size() - begin > 1) {
    const MergeTable::Entry* best = nullptr;
    std::size_t at = 0;
    for (std::size_t i = begin; i + 1 < ids.size(); ++i) {
      const MergeTable::Entry* entry = merges.find(ids[i], ids[i + 1]);
      if (entry != nullptr && (best == nullptr || entry->rank < best->rank)) {
        best = entry;
        at = i;
      }
    }
    if (best == nullptr) return;
    ids[at] = best->result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

/// The same order by a heap over a linked list.
class LongMerge {
 public:
  LongMerge(const MergeTable& merges, std::vector<std::int32_t>& ids, std::size_t begin)
      : merges_(merges), ids_(ids), begin_(begin) {
    const auto size = static_cast<std::int32_t>(ids.size() - begin);
    for (std::int32_t i = 0; i < size; ++i) nodes_.push_back({ids[begin + static_cast<std::size_t>(i)], i - 1, i + 1});
    nodes_.back().next = -1;
    for (std::int32_t i = 0; i < size; ++i) offer(i);
  }

  void run() {
    while (!queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      Node& node = nodes_[static_cast<std::size_t>(top.at)];
      // A candidate is stale if either side has changed since.
      if (node.id != top.left || node.next < 0 || nodes_[static_cast<std::size_t>(node.next)].id != top.right) continue;
      Node& right = nodes_[static_cast<std::size_t>(node.next)];
      node.id = top.result;
      right.id = -1;
      node.next = right.next;
      if (node.next >= 0) nodes_[static_cast<std::size_t>(node.next)].previous = top.at;
      if (node.previous >= 0) offer(node.previous);
      offer(top.at);
    }
    ids_.resize(begin_);
    for (std::int32_t i = 0; i >= 0; i = nodes_[static_cast<std::size_t>(i)].next) {
      ids_.push_back(nodes_[static_cast<std::size_t>(i)].id);
    }
  }

 private:
  struct Node {
    std::int32_t id, previous, next;
  };
  struct Candidate {
    std::int32_t rank, at, left, right, result;
    bool operator<(const Candidate& other) const {  // the heap's top is the largest
      return std::tie(rank, at) > std::tie(other.rank, other.at);
    }
  };

  void offer(std::int32_t at) {
    const Node& node = nodes_[static_cast<std::size_t>(at)];
    if (node.next < 0) return;
    const std::int32_t right = nodes_[static_cast<std::size_t>(node.next)].id;
    if (const auto* entry = merges_.find(node.id, right)) queue_.push({entry->rank, at, node.id, right, entry->result});
  }

  const MergeTable& merges_;
  std::vector<std::int32_t>& ids_;
  std::size_t begin_;
  std::vector<Node> nodes_;
  std::priority_queue<Candidate> queue_;
};

}  // namespace

MergeTable::MergeTable(const std::vector<Merge>& merges) {
  std::size_t size = 16;
  while (size < 2 * merges.size()) size *= 2;
  entries_.resize(size);
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const std::uint64_t key = key_of(merges[rank].left, merges[rank].right);
    std::size_t slot = slot_of(key, size - 1);
    while (entries_[slot].key != ~std::uint64_t{0} && entries_[slot].key != key) slot = (slot + 1) & (size - 1);
    entries_[slot] = {key, static_cast<std::int32_t>(rank), merges[rank].result};
  }
}

const MergeTable::Entry* MergeTable::find(std::int32_t left, std::int32_t right) const {
  const std::uint64_t key = key_of(left, right);
  const std::size_t mask = entries_.size() - 1;
  for (std::size_t slot = slot_of(key, mask);; slot = (slot + 1) & mask) {
    if (entries_[slot].key == key) return &entries_[slot];
    if (entries_[slot].key == ~std::uint64_t{0}) return nullptr;
  }
}

BytePairEncoder::BytePairEncoder(const std::array<std::int32_t, 256>& byte_ids, const std::vector<Merge>& merges,
                                 std::unordered_map<std::string, std::int32_t> whole_pieces)
    : byte_ids_(byte_ids), merges_(merges), whole_pieces_(std::move(whole_pieces)) {}

void BytePairEncoder::encode(std::string_view piece, std::vector<std::int32_t>& ids) const {
  if (!whole_pieces_.empty()) {
    if (const auto found = whole_pieces_.find(std::string(piece)); found != whole_pieces_.end()) {
      ids.push_back(found->second);
      return;
    }
  }
  const std::size_t begin = ids.size();
  for (const char byte : piece) {
    const std::int32_t id = byte_ids_[static_cast<unsigned char>(byte)];
    if (id != kNoToken) ids.push_back(id);
  }
  if (ids.size() == begin) return;
  if (piece.size() <= kShortPiece) {
    merge_short(merges_, ids, begin);
  } else {
    LongMerge(merges_, ids, begin).run();
  }
}

}  // namespace isomer
