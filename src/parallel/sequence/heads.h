// Steps that several schemes share once a rank holds all tokens of its heads.
#pragma once

#include "parallel/sequence/scheme.h"

namespace isomer {

/// One run a sequence of the batch and range of positions that the rank's group holds, of rows interleaved by batch.
std::vector<TokenRun> group_runs(const SequenceBlock& block);

/// Causal attention of whole sequences (one group); q, k, v [S·batch, heads, width], rope parts optional.
AttentionInputs whole_sequence_inputs(const SequenceBlock& block, Tensor q, Tensor k, Tensor v, Tensor q_rope = {},
                                      Tensor k_rope = {});

/// [k_nope | k_pe on every head]: k_nope [rows, heads, n] strided, k_pe [rows, r] → [rows, heads, n + r].
Tensor concatenate_keys(RankContext& ctx, const Tensor& k_nope, const Tensor& k_pe, MemoryClass memory_class);

}  // namespace isomer
