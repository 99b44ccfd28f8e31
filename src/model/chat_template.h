// How a model that was tuned to chat wants a conversation written down.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace isomer {

/// ChatML: <|im_start|>ROLE\n…<|im_end|>\n for each message. Templates in tokenizer_config.json are programs in Jinja;
/// none is run here: one that writes these two tokens is taken for ChatML.
class ChatTemplate {
 public:
  /// `config_json`: text of a tokenizer_config.json, empty for none. Throws std::invalid_argument where it has no
  /// chat_template, or one of another kind; isomer::Error for text that is not JSON. `source` goes into messages.
  static ChatTemplate parse(std::string_view config_json, std::string_view source);

  /// A system message that the template puts first unless another is given.
  const std::optional<std::string>& default_system() const { return default_system_; }
  /// One question, up to where the model's answer begins. An empty `system` means none at all; nullopt the default.
  /// Throws std::invalid_argument for a message that has one of the two tokens in it.
  std::string prompt(std::string_view question, const std::optional<std::string>& system = std::nullopt) const;

 private:
  std::optional<std::string> default_system_;
};

}  // namespace isomer
