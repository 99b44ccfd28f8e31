// The steps of a tokenizer.json around its model.
#pragma once

#include "model/tokenizer/tokenizer_data.h"
#include "model/tokenizer/tokenizer_fields.h"

namespace isomer {

/// Only no normaliser, or an empty sequence.
void check_normalizer(const Field& root);
/// ByteLevel alone, or a sequence of Split and Digits that ends in ByteLevel.
PreTokenizer read_pre_tokenizer(const Field& root);
/// Only ByteLevel.
void check_decoder(const Field& root);
/// ByteLevel (which moves offsets only) and at most one TemplateProcessing. Needs the tokens.
void read_post_processor(TokenizerData& data, const Field& root);

}  // namespace isomer
