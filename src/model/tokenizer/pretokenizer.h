// Cuts a text into the pieces that merges never reach across.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer/pattern.h"

namespace isomer {

/// What becomes of a match, in the words of tokenizer.json.
enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

/// GPT-2's pattern, which ByteLevel with use_regex applies.
extern const std::string_view kGpt2Pattern;
/// Llama 3's, for the tokenizers that are trained here.
extern const std::string_view kLlama3Pattern;

/// What one call needs; one a thread. Pieces that had to be made stay here as long as it lives.
struct PreTokenizerScratch {
  PatternScratch pattern;
  std::deque<std::string> made;
};

class PreTokenizer {
 public:
  void add_split(Pattern pattern, SplitBehavior behavior, bool invert);
  /// A space before every piece that doesn't begin with one.
  void add_prefix_space();

  using Sink = std::function<void(std::string_view)>;
  /// Calls sink(piece) for the pieces of `text` (valid UTF-8), from left to right, none of them empty. They point into
  /// `text` or into the scratch.
  void run(std::string_view text, PreTokenizerScratch& scratch, const Sink& sink) const {
    apply(0, text, scratch, sink);
  }

 private:
  struct Step {
    bool prefix_space = false;
    std::optional<Pattern> pattern = {};
    SplitBehavior behavior = SplitBehavior::isolated;
    bool invert = false;
  };
  void apply(std::size_t step, std::string_view text, PreTokenizerScratch& scratch, const Sink& sink) const;

  std::vector<Step> steps_;
};

}  // namespace isomer
