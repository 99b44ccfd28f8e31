#include "model/tokenizer/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/error.h"
#include "model/json_text.h"
#include "model/tokenizer/pattern_translation.h"

namespace isomer {

namespace {

constexpr std::size_t kMaxPatternBytes = 1 << 16;
constexpr std::uint32_t kMaxGroups = 100;  // nested
// Steps of one attempt: a run of blanks may be walked back from its end to its beginning, a few times at most.
constexpr std::uint64_t kMinSteps = 10'000'000, kStepsPerByte = 16;
constexpr std::uint32_t kMaxHeapKib = 256 * 1024;  // of the interpreter

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

}  // namespace

PatternScratch::PatternScratch()
    : match_data_(pcre2_match_data_create(1, nullptr)), match_context_(pcre2_match_context_create(nullptr)) {
  ISOMER_CHECK(match_data_ != nullptr && match_context_ != nullptr, "PCRE2 got no memory");
  auto* context = static_cast<pcre2_match_context*>(match_context_);
  pcre2_set_heap_limit(context, kMaxHeapKib);
}

PatternScratch::~PatternScratch() {
  pcre2_match_data_free(static_cast<pcre2_match_data*>(match_data_));
  pcre2_match_context_free(static_cast<pcre2_match_context*>(match_context_));
}

Pattern::Pattern(std::string_view pattern, Kind kind, std::string_view field) : source_(printable(pattern)) {
  if (pattern.size() > kMaxPatternBytes) {
    throw Error(fmt::format("{}: a pattern of {} bytes, expected at most {}", field, pattern.size(), kMaxPatternBytes));
  }
  const std::string text = kind == Kind::regex ? translate_pattern(pattern, field) : std::string(pattern);
  // Oniguruma's ^ and $ stand at lines; PCRE2's do with MULTILINE.
  const std::uint32_t options =
      PCRE2_UTF | (kind == Kind::literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C);
  std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  ISOMER_CHECK(context != nullptr, "PCRE2 got no memory");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), kMaxGroups);
  int code = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* compiled = pcre2_compile(units(text), text.size(), options, &code, &offset, context.get());
  if (compiled == nullptr) {
    throw Error(fmt::format("{}: the pattern '{}' does not compile: {}", field, source_, message_of(code)));
  }
  pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);  // where it can't, the interpreter takes over
  code_ = std::shared_ptr<const void>(compiled, [compiled](const void*) { pcre2_code_free(compiled); });
}

std::optional<PatternMatch> Pattern::find(std::string_view text, std::size_t from, PatternScratch& scratch) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  auto* data = static_cast<pcre2_match_data*>(scratch.match_data_);
  auto* context = static_cast<pcre2_match_context*>(scratch.match_context_);
  const std::uint32_t options = PCRE2_NO_UTF_CHECK;
  const std::uint64_t steps = kMinSteps + kStepsPerByte * (text.size() - from);
  pcre2_set_match_limit(context, static_cast<std::uint32_t>(std::min<std::uint64_t>(steps, UINT32_MAX)));
  int result = pcre2_match(code, units(text), text.size(), from, options, data, context);
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) {  // the interpreter keeps its state on the heap
    result = pcre2_match(code, units(text), text.size(), from, options | PCRE2_NO_JIT, data, context);
  }
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0) {
    throw Error(fmt::format("the tokenizer's pattern '{}' gives up at byte {} of a text of {}: {}", source_, from,
                            text.size(), message_of(result)));
  }
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data);
  // A \K or a lookahead could put the beginning behind the end; the translation lets neither through.
  ISOMER_CHECK(bounds[0] <= bounds[1] && bounds[1] <= text.size(), "match [{}, {})", bounds[0], bounds[1]);
  return PatternMatch{bounds[0], bounds[1]};
}

}  // namespace isomer
