#include "model/tokenizer_trainer.h"

#include <gmock/gmock.h>
#include <rapidcheck.h>

#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/temp_folder.h"
#include "model/text.h"
#include "model/tokenizer/merge_learner.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;

/// Recounts everything before each merge: what the incremental learner must equal.
std::vector<MergeLearner::Pair> merges_by_recounting(std::vector<CountedPiece> pieces, int num_merges,
                                                     std::int64_t min_count) {
  std::vector<MergeLearner::Pair> merges;
  for (int round = 0; round < num_merges; ++round) {
    std::map<MergeLearner::Pair, std::int64_t> counts;
    for (const CountedPiece& piece : pieces) {
      for (std::size_t i = 0; i + 1 < piece.tokens.size(); ++i) {
        counts[{piece.tokens[i], piece.tokens[i + 1]}] += piece.count;
      }
    }
    MergeLearner::Pair best;
    std::int64_t most = min_count - 1;
    for (const auto& [pair, count] : counts) {  // in ascending order: of equals the first stays
      if (count > most) {
        most = count;
        best = pair;
      }
    }
    if (most < min_count) break;
    merges.push_back(best);
    for (CountedPiece& piece : pieces) {
      std::vector<std::int32_t> merged;
      for (std::size_t i = 0; i < piece.tokens.size(); ++i) {
        const bool here =
            i + 1 < piece.tokens.size() && piece.tokens[i] == best.first && piece.tokens[i + 1] == best.second;
        merged.push_back(here ? 1000 + round : piece.tokens[i]);
        i += here;
      }
      piece.tokens = merged;
    }
  }
  return merges;
}

TEST(MergeLearner, EqualsRecounting) {
  EXPECT_TRUE(rc::check([] {
    std::vector<CountedPiece> pieces;
    const auto num_pieces = *rc::gen::inRange(0, 12);
    for (int i = 0; i < num_pieces; ++i) {
      // Few distinct tokens: runs such as aaaa, where a pair overlaps itself, are frequent.
      pieces.push_back(
          {*rc::gen::container<std::vector<std::int32_t>>(rc::gen::inRange(0, 3)), *rc::gen::inRange(1, 5)});
    }
    const std::int64_t min_count = *rc::gen::inRange(1, 4);
    MergeLearner learner(pieces, min_count);
    std::vector<MergeLearner::Pair> merges;
    MergeLearner::Pair pair;
    while (merges.size() < 20 && learner.next(pair)) {
      merges.push_back(pair);
      learner.merge(pair, static_cast<std::int32_t>(1000 + merges.size() - 1));
    }
    RC_ASSERT(merges == merges_by_recounting(pieces, 20, min_count));
  }));
}

Tokenizer trained(std::int64_t vocab_size, const std::string& pattern, std::string_view text) {
  TokenizerTrainer trainer({.vocab_size = vocab_size, .pattern = pattern, .special_tokens = {"<|pad|>"}});
  trainer.add_text(text);
  return trainer.train();
}

TEST(TokenizerTrainer, MakesATokenizerOfTheGivenSize) {
  for (const std::string pattern : {"llama3", "gpt2"}) {
    const Tokenizer tokenizer = trained(1000, pattern, default_text());
    EXPECT_EQ(tokenizer.vocab_size(), 1000);
    EXPECT_EQ(tokenizer.id_of("<|endoftext|>"), 0);
    EXPECT_EQ(tokenizer.id_of("<|pad|>"), 1);
    EXPECT_EQ(tokenizer.bos_id(), 0);
    EXPECT_EQ(tokenizer.eos_id(), 0);
    const std::string text(default_text().substr(0, 20000));
    const auto ids = tokenizer.encode(text);
    EXPECT_EQ(tokenizer.decode(ids), text);
    EXPECT_LT(3 * ids.size(), text.size() * 11 / 10);  // about three bytes a token: it has learnt English
    EXPECT_EQ(tokenizer.encode("a", true).front(), 0);
  }
}

TEST(TokenizerTrainer, DependsOnTheTextAlone) {
  const std::string_view text = default_text().substr(0, 100000);
  const std::size_t cut = text.find("\n\n", 50000);
  TokenizerTrainer parts({.vocab_size = 600, .special_tokens = {"<|pad|>"}});
  parts.add_text(text.substr(cut));
  parts.add_text("<|endoftext|><|pad|>");
  parts.add_text(text.substr(0, cut));
  TokenizerTrainer whole({.vocab_size = 600, .special_tokens = {"<|pad|>"}});
  whole.add_text(std::string(text.substr(0, cut)) + "<|endoftext|>" + std::string(text.substr(cut)));
  EXPECT_EQ(parts.train().to_json(), whole.train().to_json());
}

TEST(TokenizerTrainer, RefusesWhatCannotBe) {
  const auto message = [](const TokenizerTrainerOptions& options, std::string_view text) -> std::string {
    try {
      TokenizerTrainer trainer(options);
      trainer.add_text(text);
      trainer.train();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message({.vocab_size = 256}, "a"), HasSubstr("256 tokens: it takes 257"));
  EXPECT_EQ(message({.vocab_size = 257}, "a"), "");
  EXPECT_THAT(message({.vocab_size = 300}, "abab abab"), HasSubstr("the text gives 259"));
  EXPECT_THAT(message({.vocab_size = 300, .pattern = "gpt5"}, ""), HasSubstr("'gpt5'"));
  EXPECT_THAT(message({.vocab_size = 300, .special_tokens = {"<|endoftext|>"}}, ""), HasSubstr("twice"));
  EXPECT_THAT(message({.vocab_size = 300, .special_tokens = {"a"}}, ""), HasSubstr("stands for a byte"));
  EXPECT_THAT(message({.vocab_size = 257}, "ab\xff"), HasSubstr("offset 2"));
}

TEST(TokenizerTrainer, SavesADirectoryThatLoads) {
  const TempFolder folder;
  TokenizerTrainer trainer({.vocab_size = 300});
  trainer.add_text(default_text().substr(0, 10000));
  const Tokenizer tokenizer = trainer.train();
  save_tokenizer(folder.path() / "new", tokenizer, trainer.config_json());
  const Tokenizer loaded = Tokenizer::load(folder.path() / "new");
  EXPECT_EQ(loaded.hash(), tokenizer.hash());
  EXPECT_EQ(loaded.to_json(), tokenizer.to_json());
  folder.write("file", "");
  EXPECT_THROW(save_tokenizer(folder.path() / "file", tokenizer, ""), Error);
}

}  // namespace
}  // namespace isomer
