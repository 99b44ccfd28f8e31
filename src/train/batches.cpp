#include "train/batches.h"

#include <algorithm>

#include "core/error.h"
#include "train/permutation.h"

namespace isomer {

BatchOrder::BatchOrder(TokenDataset dataset, const BatchOptions& options)
    : dataset_(std::move(dataset)), options_(options) {
  if (options_.seq_len < 1) invalid_argument("seq_len {}: at least 1", options_.seq_len);
  const std::int64_t num_targets = dataset_.num_tokens() - 1;
  num_sequences_ = num_targets / options_.seq_len;
  if (options_.keep_tail && num_targets % options_.seq_len > 0) ++num_sequences_;
  if (num_sequences_ < 1) {
    invalid_argument("{} tokens of text for sequences of {}: a sequence takes {}; give more text or shorter sequences",
                     dataset_.num_tokens(), options_.seq_len, options_.keep_tail ? 2 : options_.seq_len + 1);
  }
}

std::int64_t BatchOrder::sequence_of(std::int64_t index) const {
  if (index < 0) invalid_argument("sample {}: they count from 0", index);
  const std::int64_t place = index % num_sequences_;
  if (!options_.shuffle) return place;
  return permuted(place, num_sequences_, options_.seed, static_cast<std::uint64_t>(index / num_sequences_));
}

Sample BatchOrder::sample(std::int64_t index) const {
  const std::int64_t seq_len = options_.seq_len;
  const std::int64_t begin = sequence_of(index) * seq_len;
  // The tail is shorter: `length` of its tokens have a successor in the data.
  const std::int64_t length = std::min(seq_len, dataset_.num_tokens() - 1 - begin);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(length) + 1);
  dataset_.read(begin, tokens);

  const auto size = static_cast<std::size_t>(seq_len);
  Sample sample{std::vector<std::int32_t>(size, 0), std::vector<std::int32_t>(size, -1),
                std::vector<std::int32_t>(size, 0), std::vector<std::int32_t>(size, 0)};
  std::int64_t document_end = dataset_.document_begin(dataset_.document_of(begin) + 1);
  std::int64_t document = dataset_.document_of(begin);
  std::int64_t segment_begin = 0;
  std::int32_t segment = 0;
  for (std::int64_t i = 0; i < seq_len; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool padding = i >= length;
    if (padding ? i == length : begin + i == document_end) {
      ++segment;
      segment_begin = i;
      if (!padding) document_end = dataset_.document_begin(++document + 1);
    }
    sample.segments[at] = segment;
    sample.positions[at] = static_cast<std::int32_t>(options_.restart_positions ? i - segment_begin : i);
    if (padding) continue;
    sample.ids[at] = tokens[at];
    if (begin + i + 1 < document_end) sample.targets[at] = tokens[at + 1];
  }
  return sample;
}

}  // namespace isomer
