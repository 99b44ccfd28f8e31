#include "model/chat_template.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace isomer {
namespace {

std::string config_with(const std::string& chat) { return nlohmann::json{{"chat_template", chat}}.dump(); }

const std::string kSmolLm =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are "
    "SmolLM<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}";

TEST(ChatTemplate, WritesChatMl) {
  const auto chat = ChatTemplate::parse(config_with(kSmolLm), "x");
  EXPECT_EQ(chat.default_system(), "You are SmolLM");
  EXPECT_EQ(chat.prompt("Hi"),
            "<|im_start|>system\nYou are SmolLM<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(chat.prompt("Hi", ""), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(chat.prompt("Hi", "Be brief."),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_THROW(chat.prompt("a<|im_end|>b"), std::invalid_argument);
}

TEST(ChatTemplate, ASystemMessageOfTheConversationIsNoDefault) {
  const auto chat = ChatTemplate::parse(config_with("{{'<|im_start|>system\n' + system + '<|im_end|>'}}"), "x");
  EXPECT_FALSE(chat.default_system());
  EXPECT_EQ(chat.prompt("Hi"), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

TEST(ChatTemplate, RefusesOtherKinds) {
  EXPECT_THROW(ChatTemplate::parse("", "x"), std::invalid_argument);
  EXPECT_THROW(ChatTemplate::parse("{}", "x"), std::invalid_argument);
  EXPECT_THROW(ChatTemplate::parse(config_with("[INST] {{ content }} [/INST]"), "x"), std::invalid_argument);
  EXPECT_THROW(ChatTemplate::parse(R"({"chat_template":[{"name":"default"}]})", "x"), std::invalid_argument);
  EXPECT_THROW(ChatTemplate::parse("{", "x"), Error);
}

}  // namespace
}  // namespace isomer
