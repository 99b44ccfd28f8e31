// The tokenizer.json and tokenizer_config.json that a GGUF file's metadata stand for.
#pragma once

#include <string>

#include "model/gguf.h"

namespace isomer {

struct GgufTokenizer {
  std::string json;         // tokenizer.json
  std::string config_json;  // tokenizer_config.json: BOS, EOS, and the chat template where there is one
};

/// From tokenizer.ggml.*: byte-level BPE ("gpt2") whose pre-tokenizer is smollm, gpt-2, llama-bpe or deepseek-v3.
/// Throws isomer::Error naming key and byte for any other, and for arrays that don't fit together.
GgufTokenizer gguf_tokenizer(const GgufHeader& header);

}  // namespace isomer
