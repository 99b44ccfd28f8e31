#include "model/chat_template.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/json_text.h"

namespace isomer {

namespace {

constexpr std::string_view kBegin = "<|im_start|>", kEnd = "<|im_end|>";

/// What stands in the template between "<|im_start|>system\n" and "<|im_end|>", if that is plain text.
std::optional<std::string> system_of(std::string_view text) {
  for (const std::string_view opening : {"<|im_start|>system\n", "<|im_start|>system\\n"}) {
    const auto begin = text.find(opening);
    if (begin == std::string_view::npos) continue;
    const auto from = begin + opening.size(), end = text.find(kEnd, from);
    if (end == std::string_view::npos || end == from) continue;
    const std::string_view message = text.substr(from, end - from);
    // A piece of program: the message comes from the conversation.
    if (message.find_first_of("'\"{}") != std::string_view::npos) continue;
    return std::string(message);
  }
  return std::nullopt;
}

void add_message(std::string& conversation, std::string_view role, std::string_view text) {
  for (const std::string_view token : {kBegin, kEnd}) {
    if (text.find(token) != std::string_view::npos) {
      invalid_argument("the {} message has {} in it, which ends messages; take it out", role, token);
    }
  }
  conversation += fmt::format("{}{}\n{}{}\n", kBegin, role, text, kEnd);
}

}  // namespace

ChatTemplate ChatTemplate::parse(std::string_view config_json, std::string_view source) {
  constexpr const char* kKey = "chat_template";
  const nlohmann::json config = config_json.empty() ? nlohmann::json::object() : parse_json(config_json, source);
  const auto found = config.is_object() ? config.find(kKey) : config.end();
  if (found == config.end() || !found->is_string()) {
    invalid_argument("--chat: {} has no chat_template: the model was not tuned to chat, or is written down otherwise",
                     source);
  }
  const auto& text = found->get_ref<const std::string&>();
  if (text.find(kBegin) == std::string::npos || text.find(kEnd) == std::string::npos) {
    invalid_argument(
        "--chat: the chat_template of {} is not ChatML ({} and {}), the only kind supported; write the "
        "conversation into --prompt",
        source, kBegin, kEnd);
  }
  ChatTemplate result;
  result.default_system_ = system_of(text);
  return result;
}

std::string ChatTemplate::prompt(std::string_view question, const std::optional<std::string>& system) const {
  std::string conversation;
  const std::optional<std::string>& first = system ? system : default_system_;
  if (first && !first->empty()) add_message(conversation, "system", *first);
  add_message(conversation, "user", question);
  return conversation + std::string(kBegin) + "assistant\n";
}

}  // namespace isomer
