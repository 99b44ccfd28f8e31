// The tokenizer.json and tokenizer_config.json that a GGUF file's metadata stand for.
#pragma once

#include "model/gguf.h"
#include "model/tokenizer.h"

namespace isomer {

/// tokenizer_config.json has BOS, EOS, and the chat template where there is one. From tokenizer.ggml.*: byte-level BPE
/// ("gpt2") whose pre-tokenizer is smollm, gpt-2, llama-bpe or deepseek-v3. Throws isomer::Error naming key and byte
/// for any other, and for arrays that don't fit together.
TokenizerTexts gguf_tokenizer(const GgufHeader& header);

}  // namespace isomer
