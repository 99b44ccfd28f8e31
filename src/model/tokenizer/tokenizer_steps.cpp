#include "model/tokenizer/tokenizer_steps.h"

#include "core/error.h"
#include "model/json_text.h"

namespace isomer {

namespace {

constexpr std::size_t kMaxSteps = 64;

/// The members of a Sequence, also of sequences within it; any other step is its own only member.
void flatten(const Field& step, std::string_view list_name, std::vector<Field>& steps) {
  if (step.at("type").text() != "Sequence") {
    steps.push_back(step);
  } else {
    step.only({"type", list_name});
    for (const Field& item : step.at(list_name).items()) flatten(item, list_name, steps);
  }
  if (steps.size() > kMaxSteps) step.fail(fmt::format("at most {} steps", kMaxSteps));
}

std::vector<Field> steps_of(const Field& root, std::string_view name, std::string_view list_name) {
  std::vector<Field> steps;
  if (const auto field = root.find(name)) flatten(*field, list_name, steps);
  return steps;
}

SplitBehavior behavior_of(const Field& field) {
  const std::string& name = field.text();
  if (name == "Removed") return SplitBehavior::removed;
  if (name == "Isolated") return SplitBehavior::isolated;
  if (name == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehavior::merged_with_next;
  if (name == "Contiguous") return SplitBehavior::contiguous;
  field.fail("Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

void add_split(PreTokenizer& result, const Field& step) {
  step.only({"type", "pattern", "behavior", "invert"});
  const Field pattern = step.at("pattern");
  pattern.only({"Regex", "String"});
  const auto regex = pattern.find("Regex"), literal = pattern.find("String");
  if (regex.has_value() == literal.has_value()) pattern.fail("one of Regex and String");
  const Field& text = regex ? *regex : *literal;
  result.add_split(Pattern(text.text(), regex ? Pattern::Kind::regex : Pattern::Kind::literal, text.place()),
                   behavior_of(step.at("behavior")), step.flag("invert", false));
}

void add_byte_level(PreTokenizer& result, const Field& step) {
  step.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  if (step.flag("add_prefix_space", true)) result.add_prefix_space();
  if (!step.flag("use_regex", true)) return;
  result.add_split(Pattern(kGpt2Pattern, Pattern::Kind::regex, step.place()), SplitBehavior::isolated, false);
}

void add_digits(PreTokenizer& result, const Field& step) {
  step.only({"type", "individual_digits"});
  const auto behavior = step.flag("individual_digits", false) ? SplitBehavior::isolated : SplitBehavior::contiguous;
  // Rust's char::is_numeric, of Unicode 17, which brought thirteen.
  constexpr std::string_view kNumeric = R"([\p{N}\x{11de0}-\x{11de9}\x{16ff4}-\x{16ff6}])";
  result.add_split(Pattern(kNumeric, Pattern::Kind::regex, step.place()), behavior, false);
}

/// The ids of one side of a template; the sequence itself divides the sides.
void read_template(TokenizerData& data, const Field& step) {
  step.only({"type", "single", "pair", "special_tokens"});
  bool seen_text = false;
  for (const Field& piece : step.at("single").items()) {
    piece.only({"SpecialToken", "Sequence"});
    if (const auto sequence = piece.find("Sequence")) {
      if (sequence->at("id").text() != "A" || seen_text) sequence->fail("the sequence A, once");
      seen_text = true;
      continue;
    }
    const std::string& name = piece.at("SpecialToken").at("id").text();
    const Field tokens = step.at("special_tokens").at(name);
    for (const Field& id : tokens.at("ids").items()) {
      const auto value = static_cast<std::int32_t>(id.integer(0, static_cast<std::int64_t>(data.tokens.size()) - 1));
      if (!data.tokens[static_cast<std::size_t>(value)].known) id.fail("the id of a token");
      (seen_text ? data.template_suffix : data.template_prefix).push_back(value);
    }
  }
  if (!seen_text) step.at("single").fail("the sequence A in it");
}

}  // namespace

void check_normalizer(const Field& root) {
  const auto steps = steps_of(root, "normalizer", "normalizers");
  if (!steps.empty()) steps.front().at("type").fail("no normalizer: none is supported");
}

PreTokenizer read_pre_tokenizer(const Field& root) {
  const auto steps = steps_of(root, "pre_tokenizer", "pretokenizers");
  if (steps.empty() || steps.back().at("type").text() != "ByteLevel") {
    const Field last = steps.empty() ? root : steps.back();
    throw Error(fmt::format("{}{}pre_tokenizer: it must end in ByteLevel: only byte-level tokenizers are supported",
                            last.place(), steps.empty() ? "" : ": "));
  }
  PreTokenizer result;
  for (const Field& step : steps) {
    const Field type = step.at("type");
    const std::string& name = type.text();
    if (name == "Split") {
      add_split(result, step);
    } else if (name == "Digits") {
      add_digits(result, step);
    } else if (name == "ByteLevel" && &step == &steps.back()) {
      add_byte_level(result, step);
    } else {
      type.fail("Split or Digits, and ByteLevel last");
    }
  }
  return result;
}

void check_decoder(const Field& root) {
  const auto steps = steps_of(root, "decoder", "decoders");
  if (steps.size() != 1)
    throw Error(fmt::format("{}decoder: {} steps, expected ByteLevel alone", root.place(), steps.size()));
  const Field type = steps.front().at("type");
  if (type.text() != "ByteLevel") type.fail("\"ByteLevel\"");
}

void read_post_processor(TokenizerData& data, const Field& root) {
  bool seen = false;
  for (const Field& step : steps_of(root, "post_processor", "processors")) {
    const Field type = step.at("type");
    if (type.text() == "ByteLevel") continue;
    if (type.text() != "TemplateProcessing" || seen) type.fail("ByteLevel or one TemplateProcessing");
    read_template(data, step);
    seen = true;
  }
}

}  // namespace isomer
