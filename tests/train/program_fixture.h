// A model, its tokenizer and a text for tests that run isomer train as a program.
#pragma once

#include "model/tokenizer_trainer.h"
#include "study/program.h"
#include "train/train_fixture.h"

namespace isomer::testing {

inline const std::string kNovel = std::string(ISOMER_SOURCE_DIR) + "/data/text/pride-and-prejudice.txt";

class TrainFolder {
 public:
  TrainFolder() {
    std::filesystem::create_directory(path() / "model");
    nlohmann::json config = nlohmann::json::parse(kLatentModel);
    config["vocab_size"] = 300;
    folder_.write("model/config.json", config.dump());
    folder_.write("text.txt", text_of(kNovel).substr(2000, 40000));
    const auto made =
        run_isomer(fmt::format("tokenizer train --data {}/text.txt --vocab-size 300 --out {}/tok", at(), at()));
    if (made.exit_code != 0) throw std::runtime_error(made.err);
    std::filesystem::copy(path() / "tok", path() / "model", std::filesystem::copy_options::recursive);
  }
  const std::filesystem::path& path() const { return folder_.path(); }
  std::string at() const { return path().string(); }
  std::filesystem::path write(const std::string& name, std::string_view bytes) const {
    return folder_.write(name, bytes);
  }
  /// The options of a small run to `out`; `more` as a shell takes it.
  std::string train(const std::string& out, const std::string& more = {}) const {
    return fmt::format("train --config {0}/model --data {0}/text.txt --seq 24 --batch 4 --threads 1 --out {0}/{1} {2}",
                       at(), out, more);
  }

 private:
  TempFolder folder_;
};

inline std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

/// Losses of metrics.jsonl by line; its steps must be 1, 2, 3, …
inline std::vector<double> losses_in(const std::filesystem::path& run) {
  std::ifstream file(run / "metrics.jsonl");
  std::vector<double> losses;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (json.is_discarded() || json.at("step") != losses.size() + 1) {
      throw std::runtime_error(fmt::format("line {} of metrics.jsonl: {}", losses.size() + 1, line));
    }
    losses.push_back(json.at("loss"));
  }
  return losses;
}

}  // namespace isomer::testing
