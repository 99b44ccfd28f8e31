// The config.json that a GGUF file's metadata stand for.
#pragma once

#include <string>

#include "model/gguf.h"

namespace isomer {

/// Text of a config.json of the kinds llama and deepseek2 (deepseek_v2, or deepseek_v3 with its router). What isn't in
/// the metadata is told from the tensors present: tied embeddings, biases, the vocabulary's size, Llama 3's divisors of
/// frequencies (rope_freqs.weight, as longrope with one set). Throws isomer::Error naming key and byte for what is
/// missing, contradictory or not supported.
std::string gguf_config_json(const GgufFile& file);

}  // namespace isomer
