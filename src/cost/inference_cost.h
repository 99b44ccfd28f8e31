// FLOPs and bytes of the operations of inference by shape, for the planner: element sizes are numbers, since formats of
// other machines (NVFP4: 0.5625 bytes with its scales) are no dtypes here. Bytes are those that must move at least.
#pragma once

#include <cstdint>

#include "core/record.h"

namespace isomer {

/// Bytes of one element of: what is multiplied with (weights, cache), what goes in, what comes out.
struct ElementBytes {
  double stored = 2;
  double in = 2;
  double out = 2;
};

/// out[m, n] = in[m, k]·stored[k, n], `batch` times.
OpCost product_cost(std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k, ElementBytes bytes);

/// Experts of a layer cut over tp × ep devices; `inter` is the whole intermediate width.
struct ExpertShape {
  std::int64_t tokens = 0, hidden = 0, inter = 0, experts = 1, top_k = 1, tp = 1, ep = 1;
};
/// (token, expert) pairs on one device, routing uniform: tokens·top_k / ep.
double expert_pairs(const ExpertShape& shape);
/// Experts of one device that at least one token visits, expected under uniform routing:
/// experts/ep·(1 − (1 − top_k/experts)^tokens).
double expected_active_experts(const ExpertShape& shape);
/// Gate, up and down projection of the visited experts: 6·pairs·hidden·inter/tp FLOPs; weights of active experts alone.
OpCost experts_cost(const ExpertShape& shape, ElementBytes bytes);
/// Distinct devices among `ep` that a token visits, expected under uniform routing without replacement:
/// ep·(1 − C(E − E/ep, k) / C(E, k)).
double expected_devices_visited(std::int64_t experts, std::int64_t top_k, std::int64_t ep);

/// One decode step over `context` cached rows of `batch` sequences. Keys are key_width wide, values value_width;
/// a row of the cache takes row_elements (MLA: latent + rope, read once for keys and values).
struct DecodeShape {
  std::int64_t batch = 0, heads = 0, context = 0, key_width = 0, value_width = 0, row_elements = 0;
};
/// 2·batch·heads·context·(key_width + value_width) FLOPs; the cache is read once.
OpCost decode_attention_cost(const DecodeShape& shape, ElementBytes bytes);

/// Bytes that one of `devices` sends (and receives) by the direct algorithm: (N − 1)/N·x; an all-reduce twice that.
double exchanged_bytes(std::int64_t devices, double bytes);

}  // namespace isomer
