// Tokenizers against golden cases that PyPI's `tokenizers` made (tests/golden/make_tokenizer_golden.py), and on their
// own.
#include "model/tokenizer.h"

#include <gmock/gmock.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/json_text.h"
#include "model/temp_folder.h"

namespace isomer {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

const fs::path kGolden = fs::path(ISOMER_SOURCE_DIR) / "tests/golden/tokenizer";

json golden(const std::string& name) { return parse_json(read_text_file(kGolden / (name + ".json"), 1 << 24), name); }

Tokenizer golden_tokenizer(const std::string& name) { return Tokenizer::parse(golden(name)["tokenizer"].dump(), name); }

std::string bytes_of_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

class GoldenTokenizer : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenTokenizer, SameTokensAsTheReference) {
  const json file = golden(GetParam());
  const Tokenizer tokenizer = Tokenizer::parse(file["tokenizer"].dump(), GetParam());
  ASSERT_GT(file["cases"].size(), 50U);
  for (const json& item : file["cases"]) {
    const std::string text = item[0];
    const std::vector<std::int32_t> ids = item[1];
    EXPECT_EQ(tokenizer.encode(text), ids) << printable(text, 400);
    EXPECT_EQ(tokenizer.encode(text, true), item[2].get<std::vector<std::int32_t>>()) << printable(text, 400);
    if (!item[3].is_null()) {
      EXPECT_EQ(tokenizer.decode(ids), bytes_of_hex(item[3])) << printable(text, 400);
    }
  }
}

TEST_P(GoldenTokenizer, MergesAsTextOrAsPairsAreTheSame) {
  json file = golden(GetParam());
  const Tokenizer before = Tokenizer::parse(file["tokenizer"].dump());
  for (json& merge : file["tokenizer"]["model"]["merges"]) {
    if (merge.is_array()) {
      merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    } else {
      const std::string text = merge;
      merge = json::array({text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)});
    }
  }
  const Tokenizer after = Tokenizer::parse(file["tokenizer"].dump());
  EXPECT_NE(before.hash(), after.hash());
  for (const json& item : file["cases"]) {
    EXPECT_EQ(before.encode(item[0].get<std::string>()), after.encode(item[0].get<std::string>()));
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GoldenTokenizer,
                         ::testing::Values("gpt2", "llama3", "deepseek", "gpt4o", "prefix_space", "digits",
                                           "digit_runs", "removed", "inverted", "contiguous", "empty_matches", "whole"),
                         [](const auto& param) { return param.param; });

// Kinds that neither remove nor add text.
class RoundTrip : public ::testing::TestWithParam<std::string> {};

TEST_P(RoundTrip, AnyTextComesBack) {
  const Tokenizer tokenizer = golden_tokenizer(GetParam());
  EXPECT_TRUE(rc::check([&] {
    // Bytes, made UTF-8: control characters, and rare ones, are as likely as any.
    const auto bytes = *rc::gen::container<std::string>(rc::gen::arbitrary<char>());
    const auto points = *rc::gen::container<std::vector<std::uint16_t>>(rc::gen::arbitrary<std::uint16_t>());
    std::string text = replace_invalid_utf8(bytes);
    for (const std::uint16_t point : points) {
      if (point < 0x800 || (point >= 0xd800 && point < 0xe000)) continue;
      text += {static_cast<char>(0xe0 | point >> 12), static_cast<char>(0x80 | (point >> 6 & 0x3f)),
               static_cast<char>(0x80 | (point & 0x3f))};
    }
    RC_ASSERT(!invalid_utf8_at(text));
    RC_ASSERT(tokenizer.decode(tokenizer.encode(text)) == text);
  }));
}

TEST_P(RoundTrip, LongPiecesAreMergedAsShortOnes) {
  // The heap takes over at 32 bytes: "ab" over and over has its tokens over and over, whichever does it.
  const Tokenizer tokenizer = golden_tokenizer(GetParam());
  for (const std::size_t size : {31, 32, 33, 63, 64, 65, 1000, 100000}) {
    std::string text;
    while (text.size() < size) text += "thethat";
    text.resize(size);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, RoundTrip, ::testing::Values("gpt2", "llama3", "deepseek", "gpt4o", "contiguous"),
                         [](const auto& param) { return param.param; });

TEST(Tokenizer, DecodesSplitCharactersByteByByte) {
  const Tokenizer tokenizer = golden_tokenizer("gpt4o");
  const std::string text = "🫨";
  const auto ids = tokenizer.encode(text);
  ASSERT_GT(ids.size(), 1U);
  std::string bytes;
  for (const std::int32_t id : ids) bytes += tokenizer.decode(std::vector{id});
  EXPECT_EQ(bytes, text);
  EXPECT_EQ(tokenizer.decode(std::span(ids).first(1)).size(), 1U);
}

TEST(Tokenizer, SpecialTokens) {
  const Tokenizer tokenizer = golden_tokenizer("llama3");
  const auto begin = tokenizer.id_of("<|begin_of_text|>");
  ASSERT_TRUE(begin);
  EXPECT_EQ(tokenizer.bos_id(), begin);  // the template puts it first
  EXPECT_EQ(tokenizer.eos_id(), std::nullopt);
  EXPECT_TRUE(tokenizer.is_special(*begin));
  EXPECT_EQ(tokenizer.token_of(*begin), "<|begin_of_text|>");
  const auto ids = tokenizer.encode("a<|end_of_text|>b", true);
  EXPECT_EQ(tokenizer.decode(ids), "<|begin_of_text|>a<|end_of_text|>b");
  EXPECT_EQ(tokenizer.decode(ids, true), "ab");
  EXPECT_EQ(tokenizer.id_of("no such token"), std::nullopt);
  EXPECT_EQ(tokenizer.token_of(-1), std::nullopt);
  EXPECT_EQ(tokenizer.token_of(static_cast<std::int32_t>(tokenizer.vocab_size())), std::nullopt);
  EXPECT_THROW(tokenizer.decode(std::vector{static_cast<std::int32_t>(tokenizer.vocab_size())}), std::invalid_argument);
  EXPECT_THROW(tokenizer.decode(std::vector{-1}), std::invalid_argument);
}

TEST(Tokenizer, ConfigurationNamesTheEnds) {
  const std::string text = golden("gpt2")["tokenizer"].dump();
  const auto parse = [&](const std::string& config) { return Tokenizer::parse(text, "gpt2", config); };
  const auto separator = Tokenizer::parse(text).id_of("<|endoftext|>");
  ASSERT_TRUE(separator);
  EXPECT_EQ(Tokenizer::parse(text).bos_id(), separator);
  EXPECT_EQ(parse(R"({"bos_token": null})").bos_id(), std::nullopt);
  EXPECT_EQ(parse(R"({"bos_token": null})").eos_id(), separator);
  EXPECT_EQ(parse(R"({"eos_token": {"content": "!"}})").eos_id(), 0);
  EXPECT_THROW(parse(R"({"eos_token": "<nothing>"})"), Error);
  EXPECT_NE(parse(R"({"bos_token": null})").hash(), Tokenizer::parse(text).hash());
}

TEST(Tokenizer, TextThatIsNotUtf8IsRefusedOrReplaced) {
  const Tokenizer tokenizer = golden_tokenizer("gpt2");
  // One U+FFFD for each maximal part, as Python's decode("utf-8", "replace") has it.
  const std::vector<std::tuple<std::string, std::size_t, int>> cases = {{"\x80", 0, 1},
                                                                        {"abcdefghij\xff", 10, 1},
                                                                        {"a\xc3", 1, 1},
                                                                        {"\xc0\xaf", 0, 2},
                                                                        {"\xed\xa0\x80", 0, 3},
                                                                        {"\xe2\x82", 0, 1},
                                                                        {"\xf4\x90\x80\x80", 0, 4},
                                                                        {"\xf0\x9f\x98x", 0, 1},
                                                                        {"\xe0\x80\x80", 0, 3},
                                                                        {"\xf0\x80\x80\x80", 0, 4}};
  for (const auto& [text, offset, count] : cases) {
    EXPECT_EQ(invalid_utf8_at(text), offset) << printable(text);
    const std::string replaced = replace_invalid_utf8(text);
    int found = 0;
    for (std::size_t at = 0; (at = replaced.find("\xef\xbf\xbd", at)) != std::string::npos; ++at) ++found;
    EXPECT_EQ(found, count) << printable(text);
    EXPECT_EQ(invalid_utf8_at(replaced), std::nullopt);
    try {
      tokenizer.encode(text);
      ADD_FAILURE() << printable(text);
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), HasSubstr(fmt::format("offset {}", offset)));
    }
  }
}

/// What is refused, and how: the message must name the field and the value.
struct Refusal {
  std::string pointer, value, message;
};

TEST(Tokenizer, WhatIsNotSupportedIsRefusedByName) {
  const json good = golden("llama3")["tokenizer"];
  const std::vector<Refusal> refusals = {
      {"/normalizer", R"({"type": "NFC"})", "normalizer.type: \"NFC\""},
      {"/truncation", R"({"max_length": 5})", "truncation: an object"},
      {"/padding", R"({"length": 5})", "padding: an object"},
      {"/decoder", R"({"type": "Metaspace"})", "decoder.type: \"Metaspace\""},
      {"/decoder", "null", "decoder: 0 steps"},
      {"/pre_tokenizer", "null", "must end in ByteLevel"},
      {"/pre_tokenizer", R"({"type": "Whitespace"})", "must end in ByteLevel"},
      {"/pre_tokenizer/pretokenizers/0/type", R"("Punctuation")", "pretokenizers[0].type: \"Punctuation\""},
      {"/pre_tokenizer/pretokenizers/0/behavior", R"("Sideways")", "behavior: \"Sideways\""},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "a(b"})", "pattern.Regex"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "a\\1"})", "'\\1' is not supported"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "[a&&b]"})", "intersection"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "[a[b]]"})", "class within a class"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "a{2}+"})", "interval"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "\\p{Cn}"})", "property 'Cn'"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"j({"Regex": "(?<x>a)"})j", "kind of group"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "a(?i)b"})", "kind of group"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "a", "String": "a"})", "one of Regex and String"},
      {"/post_processor", R"({"type": "RobertaProcessing"})", "post_processor.type: \"RobertaProcessing\""},
      {"/model/type", R"("Unigram")", "model.type: \"Unigram\""},
      {"/model/dropout", "0.1", "model.dropout: 0.1"},
      {"/model/end_of_word_suffix", R"("</w>")", "model.end_of_word_suffix: \"</w>\""},
      {"/model/novelty", "true", "'novelty' (true)"},
      {"/model/merges/3", R"("q")", "model.merges[3]: \"q\""},
      {"/model/merges/3", R"("q ☃")", "'☃' is none"},
      {"/model/merges/3", R"(["q", "q", "q"])", "model.merges[3]"},
      {"/model/vocab/!", "1", "an id of its own"},
      {"/model/vocab/!", "-1", "model.vocab[\"!\"]: -1"},
      {"/model/vocab/!", "4194304", "model.vocab[\"!\"]: 4194304"},
      {"/model/vocab/!", "18446744073709551615", "18446744073709551615"},
      {"/model/vocab/!", "1.5", "1.5"},
      {"/added_tokens/0/id", "100000", "added_tokens[0].id: 100000"},
      {"/added_tokens/0/content", R"("")", "added_tokens[0].content"},
      {"/added_tokens/1/content", R"("<|begin_of_text|>")", "not added before"},
      {"/added_tokens/1/lstrip", "3", "lstrip: 3"},
  };
  for (const Refusal& refusal : refusals) {
    json changed = good;
    changed[json::json_pointer(refusal.pointer)] = json::parse(refusal.value);
    try {
      Tokenizer::parse(changed.dump(), "t.json");
      ADD_FAILURE() << refusal.pointer << " = " << refusal.value << " was accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(refusal.message)) << refusal.pointer << " = " << refusal.value;
      EXPECT_THAT(error.what(), HasSubstr("t.json")) << refusal.pointer;
    }
  }
  json missing = good;
  missing["model"]["vocab"].erase("Ā");
  EXPECT_THROW(Tokenizer::parse(missing.dump()), Error);
}

TEST(Tokenizer, AHostilePatternEndsInAnError) {
  json file = golden("gpt2")["tokenizer"];
  file["pre_tokenizer"] = json::parse(
      R"({"type": "Sequence", "pretokenizers": [
          {"type": "Split", "pattern": {"Regex": "(?:(?:a+)+)+[bc]"}, "behavior": "Isolated", "invert": false},
          {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})");
  const Tokenizer tokenizer = Tokenizer::parse(file.dump());
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("aab")), "aab");
  EXPECT_THROW(tokenizer.encode(std::string(60, 'a')), Error);
}

TEST(Tokenizer, LongRunsAreNoHostilePattern) {
  // \s*[\r\n]+ walks back over all of the blanks before it gives up.
  const Tokenizer tokenizer = golden_tokenizer("llama3");
  const std::string text = std::string(11'000'000, ' ') + "x";
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

TEST(Tokenizer, LoadsADirectory) {
  const TempFolder folder;
  folder.write("tokenizer.json", golden("gpt2")["tokenizer"].dump());
  folder.write("tokenizer_config.json", R"({"bos_token": "!", "eos_token": null})");
  const Tokenizer tokenizer = Tokenizer::load(folder.path());
  EXPECT_EQ(tokenizer.bos_id(), 0);
  EXPECT_EQ(tokenizer.hash(), Tokenizer::load(folder.path() / "tokenizer.json").hash());
  EXPECT_THROW(Tokenizer::load(folder.path() / "nothing"), Error);
}

TEST(Tokenizer, DeepSeekV3) {
  const char* given = std::getenv("ISOMER_DEEPSEEK_TOKENIZER");
  const fs::path path =
      given != nullptr ? given : fs::path(ISOMER_SOURCE_DIR) / "../shared/data/tokenizers/deepseek-v3";
  if (!fs::exists(path / "tokenizer.json")) {
    GTEST_SKIP() << "no DeepSeek-V3 tokenizer at " << path << "; ISOMER_DEEPSEEK_TOKENIZER names its directory";
  }
  const Tokenizer tokenizer = Tokenizer::load(path);
  EXPECT_EQ(tokenizer.vocab_size(), 128815);
  EXPECT_EQ(tokenizer.bos_id(), 0);
  EXPECT_EQ(tokenizer.eos_id(), 1);
  EXPECT_EQ(tokenizer.encode("Hello, world! 你好 12345"),
            (std::vector<std::int32_t>{19923, 14, 2058, 3, 223, 30594, 223, 6895, 1883}));
}

}  // namespace
}  // namespace isomer
