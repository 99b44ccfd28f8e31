// A folder with a small seeded model and a tokenizer of its own, for tests of the program.
#pragma once

#include <nlohmann/json.hpp>

#include "model/checkpoint.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "model/text.h"
#include "study/program.h"

namespace isomer::testing {

/// model/: tiny-mla's shape, 400 tokens, 128 positions.
class ModelFolder {
 public:
  ModelFolder() {
    write("train.txt", std::string(default_text()).substr(0, 40000));
    const auto made = run_isomer(
        fmt::format("tokenizer train --data {0}/train.txt --vocab-size 400 --out {0}/model", folder_.path().string()));
    EXPECT_EQ(made.exit_code, 0) << made.err;
    nlohmann::json config = nlohmann::json::parse(load_model_config_text("tiny-mla"));
    config["vocab_size"] = 400;
    config["max_position_embeddings"] = 400;
    write("model/config.json", config.dump());
    const ModelConfig parsed = load_model_config(at("model"));
    write_checkpoint(folder_.path() / "model",
                     model_tensor_sources(initial_model_weights(parsed, 1, DType::f32, 0.2), DType::bf16), 1 << 30);
  }
  const std::filesystem::path& path() const { return folder_.path(); }
  std::string at(const std::string& name) const { return (folder_.path() / name).string(); }
  void write(const std::string& name, const std::string& text) const { folder_.write(name, text); }

 private:
  TempFolder folder_;
};

}  // namespace isomer::testing
