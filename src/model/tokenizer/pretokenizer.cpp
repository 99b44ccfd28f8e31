#include "model/tokenizer/pretokenizer.h"

#include <algorithm>

namespace isomer {

const std::string_view kGpt2Pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

namespace {

struct Part {
  std::string_view text;
  bool matches = false;
};

/// Matches and what lies between them, in order, all of the text; calls found(Part).
template <class Found>
void for_each_part(const Pattern& pattern, bool invert, std::string_view text, PatternScratch& scratch, Found&& found) {
  std::size_t done = 0;
  for_each_match(pattern, text, scratch, [&](const PatternMatch& match) {
    if (match.begin > done) found(Part{text.substr(done, match.begin - done), invert});
    found(Part{text.substr(match.begin, match.end - match.begin), !invert});
    done = match.end;
  });
  if (done < text.size()) found(Part{text.substr(done), invert});
}

std::string_view joined(std::string_view left, std::string_view right) {
  return {left.data(), static_cast<std::size_t>(right.data() + right.size() - left.data())};
}

/// The behaviours that join neighbours. As in the reference, a match joins the part before it (or behind it) unless
/// that is a match itself.
std::vector<std::string_view> join_parts(std::vector<Part> parts, SplitBehavior behavior) {
  const bool backwards = behavior == SplitBehavior::merged_with_next;
  if (backwards) std::reverse(parts.begin(), parts.end());
  std::vector<std::string_view> pieces;
  bool previous = false;
  for (const Part& part : parts) {
    const bool joins = behavior == SplitBehavior::contiguous ? part.matches == previous : part.matches && !previous;
    previous = part.matches;
    if (!joins || pieces.empty()) {
      pieces.push_back(part.text);
    } else {
      pieces.back() = backwards ? joined(part.text, pieces.back()) : joined(pieces.back(), part.text);
    }
  }
  if (backwards) std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

}  // namespace

void PreTokenizer::add_split(Pattern pattern, SplitBehavior behavior, bool invert) {
  steps_.push_back({false, std::move(pattern), behavior, invert});
}

void PreTokenizer::add_prefix_space() { steps_.push_back({true}); }

void PreTokenizer::apply(std::size_t index, std::string_view text, PreTokenizerScratch& scratch,
                         const Sink& sink) const {
  if (text.empty()) return;
  if (index == steps_.size()) {
    sink(text);
    return;
  }
  const Step& step = steps_[index];
  if (step.prefix_space) {
    if (text.front() != ' ') text = scratch.made.emplace_back(" " + std::string(text));
    apply(index + 1, text, scratch, sink);
    return;
  }
  if (step.behavior == SplitBehavior::isolated || step.behavior == SplitBehavior::removed) {
    for_each_part(*step.pattern, step.invert, text, scratch.pattern, [&](const Part& part) {
      if (!part.matches || step.behavior == SplitBehavior::isolated) apply(index + 1, part.text, scratch, sink);
    });
    return;
  }
  std::vector<Part> parts;
  for_each_part(*step.pattern, step.invert, text, scratch.pattern, [&](const Part& part) { parts.push_back(part); });
  for (const std::string_view piece : join_parts(std::move(parts), step.behavior)) {
    apply(index + 1, piece, scratch, sink);
  }
}

}  // namespace isomer
