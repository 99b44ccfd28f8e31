#include "parallel/sequence/recompute.h"

namespace isomer {

namespace {

struct BlockSaved : SequenceScheme::Saved {
  Tensor x;  // [T, D]
};

//   forward    x → y, x kept
//   backward   x → y (dropped) and what the scheme saves; then its own backward
class RecomputedBlock : public SequenceScheme {
 public:
  explicit RecomputedBlock(std::unique_ptr<SequenceScheme> scheme) : scheme_(std::move(scheme)) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    auto saved = std::make_unique<BlockSaved>();
    saved->x = x;
    return {scheme_->forward(ctx, block, std::move(x)).y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    Forward again = scheme_->forward(ctx, block, std::move(static_cast<BlockSaved&>(*state).x));
    again.y = Tensor();
    return scheme_->backward(ctx, block, std::move(again.saved), std::move(dy));
  }

 private:
  std::unique_ptr<SequenceScheme> scheme_;
};

}  // namespace

Recompute recompute_of(const Layout& layout) {
  const std::string word = layout.option("recompute", "none");
  if (word == "none") return Recompute::none;
  if (word == "attention") return Recompute::attention;
  if (word == "up-projection") return Recompute::up_projection;
  if (word == "block") return Recompute::block;
  invalid_argument("recompute={}: it takes recompute=none, attention, up-projection or block", word);
}

std::unique_ptr<SequenceScheme> recompute_block(std::unique_ptr<SequenceScheme> scheme) {
  return std::make_unique<RecomputedBlock>(std::move(scheme));
}

}  // namespace isomer
