#include "train/token_file.h"

#include <gmock/gmock.h>
#include <rapidcheck.h>

#include <cstring>

#include "core/error.h"
#include "model/temp_folder.h"
#include "model/text.h"
#include "model/tokenizer_trainer.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;
using Documents = std::vector<std::vector<std::int32_t>>;

Documents documents_of(const TokenDataset& dataset) {
  Documents documents;
  for (std::int64_t i = 0; i < dataset.num_documents(); ++i) {
    const std::int64_t begin = dataset.document_begin(i), end = dataset.document_begin(i + 1);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(end - begin));
    dataset.read(begin, tokens);
    EXPECT_EQ(dataset.document_of(begin), i);
    EXPECT_EQ(dataset.document_of(end - 1), i);
    documents.push_back(tokens);
  }
  return documents;
}

std::string bytes_of(const std::filesystem::path& path) { return load_text_bytes(path.string()); }

TEST(TokenFile, WhatIsSavedIsMappedAgain) {
  const TempFolder folder;
  const auto path = folder.path() / "tokens";
  for (const std::int64_t vocab_size : {1, 7, 65536, 65537, 200000}) {
    EXPECT_TRUE(rc::check([&] {
      const auto ids = rc::gen::inRange<std::int32_t>(0, static_cast<std::int32_t>(vocab_size));
      auto documents = *rc::gen::container<Documents>(rc::gen::container<std::vector<std::int32_t>>(ids));
      const TokenDataset made = TokenDataset::from_tokens(documents, vocab_size, 0x123456789abcdef0, 42);
      made.save(path);
      const TokenDataset read = TokenDataset::open(path);
      std::erase_if(documents, [](const auto& document) { return document.empty(); });
      RC_ASSERT(documents_of(made) == documents);
      RC_ASSERT(documents_of(read) == documents);
      RC_ASSERT(read.vocab_size() == vocab_size);
      RC_ASSERT(read.tokenizer_hash() == 0x123456789abcdef0U);
      RC_ASSERT(read.num_text_bytes() == 42);
      RC_ASSERT(TokenDataset::is_token_file(path));
    }));
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);  // nothing partial stays
}

TEST(TokenFile, IdsAndPlacesOutOfRangeAreRefused) {
  EXPECT_THROW(TokenDataset::from_tokens({{0, 7}}, 7), std::invalid_argument);
  EXPECT_THROW(TokenDataset::from_tokens({{-1}}, 7), std::invalid_argument);
  EXPECT_THROW(TokenDataset::from_tokens({}, 0), std::invalid_argument);
  const TokenDataset dataset = TokenDataset::from_tokens({{1, 2}, {3}}, 7);
  std::vector<std::int32_t> out(2);
  EXPECT_THROW(dataset.read(2, out), std::invalid_argument);
  EXPECT_THROW(dataset.read(-1, out), std::invalid_argument);
  EXPECT_THROW(dataset.document_begin(3), std::invalid_argument);
  EXPECT_THROW(dataset.document_of(3), std::invalid_argument);
}

TEST(TokenFile, HostileFilesAreRefused) {
  const TempFolder folder;
  TokenDataset::from_tokens({{1, 2, 3}, {4, 5}}, 7).save(folder.path() / "good");
  const std::string good = bytes_of(folder.path() / "good");
  ASSERT_EQ(good.size(), 64U + 16 + 24);  // five ids of two bytes, padded to eight; three borders
  const auto message = [&](const std::string& bytes) -> std::string {
    try {
      TokenDataset::open(folder.write("bad", bytes));
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto with = [&](std::size_t offset, std::uint64_t value, std::size_t size) {
    std::string bytes = good;
    std::memcpy(bytes.data() + offset, &value, size);
    return message(bytes);
  };
  EXPECT_EQ(message(good), "accepted");
  EXPECT_THAT(message(""), HasSubstr("0 bytes"));
  EXPECT_THAT(message(good.substr(0, 63)), HasSubstr("63 bytes"));
  EXPECT_THAT(message(good.substr(0, 103)), HasSubstr("103 bytes, expected 104"));
  EXPECT_THAT(message(good + "x"), HasSubstr("105 bytes"));
  EXPECT_THAT(with(0, 'X', 1), HasSubstr("not a token file"));
  EXPECT_THAT(with(8, 2, 4), HasSubstr("version is 2"));
  EXPECT_THAT(with(12, 3, 4), HasSubstr("token_bytes is 3"));
  EXPECT_THAT(with(12, 4, 4), HasSubstr("bytes, expected"));
  EXPECT_THAT(with(16, 0, 8), HasSubstr("vocab_size is 0"));
  EXPECT_THAT(with(16, 65537, 8), HasSubstr("vocab_size is 65537"));
  EXPECT_THAT(with(16, 5, 8), HasSubstr("the id of token 4"));
  EXPECT_THAT(with(32, ~std::uint64_t{0}, 8), HasSubstr("num_tokens"));
  EXPECT_THAT(with(32, std::uint64_t{1} << 63, 8), HasSubstr("num_tokens"));
  EXPECT_THAT(with(40, ~std::uint64_t{0}, 8), HasSubstr("num_documents"));
  EXPECT_THAT(with(48, ~std::uint64_t{0}, 8), HasSubstr("num_text_bytes"));
  EXPECT_THAT(with(64, 7, 2), HasSubstr("the id of token 0"));
  EXPECT_THAT(with(80, 1, 8), HasSubstr("its documents are [1, 5)"));
  EXPECT_THAT(with(88, 0, 8), HasSubstr("document 0"));
  EXPECT_THAT(with(88, 6, 8), HasSubstr("document 1"));
  EXPECT_THAT(with(96, 4, 8), HasSubstr("its documents are [0, 4)"));
  EXPECT_THROW(TokenDataset::open(folder.path()), Error);
  EXPECT_THROW(TokenDataset::open(folder.path() / "absent"), Error);
  EXPECT_FALSE(TokenDataset::is_token_file(folder.write("text", "some text, long enough")));
  EXPECT_FALSE(TokenDataset::is_token_file(folder.path() / "absent"));
}

class FromText : public ::testing::Test {
 protected:
  FromText() {
    TokenizerTrainer trainer({.vocab_size = 400});
    trainer.add_text(default_text().substr(0, 20000));
    tokenizer_ = std::make_unique<Tokenizer>(trainer.train());
  }
  /// The texts of the documents, each checked to stand between BOS and EOS.
  std::vector<std::string> texts(const std::vector<std::string>& files, const TextOptions& options = {}) {
    std::vector<std::filesystem::path> paths;
    for (const std::string& text : files) paths.push_back(folder_.write(fmt::format("{}", paths.size()), text));
    const TokenDataset dataset = TokenDataset::from_text(paths, *tokenizer_, options);
    EXPECT_EQ(dataset.tokenizer_hash(), tokenizer_->hash());
    EXPECT_EQ(dataset.vocab_size(), 400);
    num_text_bytes_ = dataset.num_text_bytes();
    std::vector<std::string> found;
    for (const auto& ids : documents_of(dataset)) {
      EXPECT_EQ(ids.front(), tokenizer_->bos_id());
      EXPECT_EQ(ids.back(), tokenizer_->eos_id());
      found.push_back(tokenizer_->decode(std::span(ids).subspan(1, ids.size() - 2)));
    }
    return found;
  }

  TempFolder folder_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::int64_t num_text_bytes_ = 0;
};

TEST_F(FromText, AFileIsADocumentUnlessSeparatorsDivideIt) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(texts({"One.\n", "Two é."}), (Texts{"One.\n", "Two é."}));
  EXPECT_EQ(num_text_bytes_, 12);
  EXPECT_EQ(texts({"a\n<|endoftext|>\nb\n<|endoftext|>\n"}), (Texts{"a\n", "b\n"}));
  EXPECT_EQ(num_text_bytes_, 4);
  EXPECT_EQ(texts({"<|endoftext|>\r\na<|endoftext|>b\n<|endoftext|> \n<|endoftext|>"}),
            (Texts{"a<|endoftext|>b\n<|endoftext|> \n"}));
  EXPECT_EQ(texts({"a\n<|endoftext|>\nb"}, {.split_at_separator = false}), (Texts{"a\n<|endoftext|>\nb"}));
}

TEST_F(FromText, WhatIsNoTextIsRefused) {
  EXPECT_THROW(texts({""}), Error);
  EXPECT_THROW(TokenDataset::from_text({folder_.path() / "absent"}, *tokenizer_), Error);
  EXPECT_THROW(TokenDataset::from_text({folder_.path()}, *tokenizer_), Error);
  try {
    texts({"fine", "not\xffso"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("0xff at offset 3"));
  }
  EXPECT_EQ(texts({"not\xffso"}, {.lossy = true}), std::vector<std::string>{"not\xef\xbf\xbdso"});
}

}  // namespace
}  // namespace isomer
