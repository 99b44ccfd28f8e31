// Recomputation: what a scheme drops after its forward and computes again in its backward, sending again where it must.
#pragma once

#include "parallel/sequence/scheme.h"

namespace isomer {

/// recompute=none|attention|up-projection|block. `attention`: the core's output and log-sum-exp, or probabilities.
/// `up_projection`: K and V, from the latent rows that are kept. `block`: everything but x.
enum class Recompute : std::uint8_t { none, attention, up_projection, block };

/// Throws std::invalid_argument for another word.
Recompute recompute_of(const Layout& layout);

/// Keeps only x, and runs `scheme`'s forward again in the backward.
std::unique_ptr<SequenceScheme> recompute_block(std::unique_ptr<SequenceScheme> scheme);

}  // namespace isomer
