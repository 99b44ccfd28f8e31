// isomer convert gguf: a GGUF file into a Hugging Face directory.
#include <fmt/format.h>

#include <memory>

#include "apps/isomer/convert.h"
#include "convert/convert_gguf.h"
#include "model/tokenizer.h"

namespace isomer {

void add_convert_gguf(CLI::App& convert, int& exit_code) {
  struct Options {
    std::string model, out, dtype = "f32";
  };
  auto a = std::make_shared<Options>();
  CLI::App* command = convert.add_subcommand("gguf", "GGUF into safetensors, config.json and tokenizer.json");
  command->add_option("--model", a->model, "a GGUF file: llama or deepseek2")->required();
  command->add_option("--out", a->out, "the directory to make")->required();
  command->add_option("--dtype", a->dtype, "of the weights written; f32 holds every dequantised value exactly")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  command->callback([a, &exit_code] {
    convert_gguf({.model = a->model, .out = a->out, .dtype = a->dtype == "bf16" ? DType::bf16 : DType::f32});
    fmt::print("written to {}: weights in {}, config.json{}\n", a->out, a->dtype,
               Tokenizer::is_at(a->model) ? ", tokenizer.json, tokenizer_config.json" : "; the file has no tokenizer");
    exit_code = 0;
  });
}

}  // namespace isomer
