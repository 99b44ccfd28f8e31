// Views and storage of tensors.
#include <gtest/gtest.h>

#include <cstring>

#include "core/rank_context.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using testing::values_of;
using Values = std::vector<double>;

/// 0, 1, 2, … in order of memory.
Tensor counted(Shape shape) {
  Values values(static_cast<std::size_t>(num_elements(shape)));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i);
  return testing::tensor_of(values, DType::f32, std::move(shape));
}

TEST(Tensor, IsContiguousAndAlignedWhenNew) {
  const Tensor t = counted({2, 3, 4});
  EXPECT_EQ(t.strides(), (Shape{12, 4, 1}));
  EXPECT_EQ(t.numel(), 24);
  EXPECT_EQ(t.nbytes(), 96);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.raw()) % 64, 0u);
  EXPECT_EQ(t.size(-1), 4);
  EXPECT_EQ(t.stride(-2), 4);
  EXPECT_THROW(t.size(3), std::out_of_range);
  EXPECT_THROW(t.size(-4), std::out_of_range);
}

TEST(Tensor, SlicesAreViewsOfTheSameElements) {
  const Tensor t = counted({3, 4});
  EXPECT_EQ(values_of(t.slice(0, 1, 2)), (Values{4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(values_of(t.slice(1, 1, 2)), (Values{1, 2, 5, 6, 9, 10}));
  EXPECT_EQ(values_of(t.slice(-1, 1, 2)), (Values{1, 2, 5, 6, 9, 10}));
  EXPECT_EQ(values_of(t.slice(0, 1, 2).slice(1, 2, 1)), (Values{6, 10}));
  EXPECT_FALSE(t.slice(1, 1, 2).is_contiguous());
  EXPECT_TRUE(t.slice(0, 1, 2).is_contiguous());
  t.slice(1, 1, 1).data<float>()[4] = -1;  // row 1, column 1
  EXPECT_EQ(values_of(t)[5], -1);
  EXPECT_EQ(t.slice(0, 3, 0).numel(), 0);
  EXPECT_THROW(t.slice(0, 2, 2), CheckFailure);
  EXPECT_THROW(t.slice(0, -1, 2), CheckFailure);
  EXPECT_THROW(t.slice(0, 1, -1), CheckFailure);
  EXPECT_ANY_THROW(t.slice(2, 0, 1));
}

TEST(Tensor, StridedSlices) {
  const Tensor t = counted({7, 2});
  EXPECT_EQ(values_of(t.strided_slice(0, 1, 3, 2)), (Values{2, 3, 6, 7, 10, 11}));
  EXPECT_EQ(values_of(t.strided_slice(0, 0, 7, 1)), values_of(t));
  EXPECT_EQ(values_of(t.strided_slice(0, 1, 3, 2).strided_slice(0, 0, 2, 2)), (Values{2, 3, 10, 11}));
  EXPECT_EQ(t.strided_slice(0, 6, 0, 5).numel(), 0);
  EXPECT_NO_THROW(t.strided_slice(0, 0, 4, 2));
  EXPECT_THROW(t.strided_slice(0, 1, 4, 2), CheckFailure);
  EXPECT_THROW(t.strided_slice(0, 0, 2, 0), CheckFailure);
}

TEST(Tensor, BroadcastRepeatsWithAStrideOfZero) {
  const Tensor t = counted({2, 2});
  EXPECT_EQ(t.broadcast(1, 3).shape(), (Shape{2, 3, 2}));
  EXPECT_EQ(values_of(t.broadcast(1, 3)), (Values{0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3}));
  EXPECT_EQ(values_of(t.broadcast(2, 2)), (Values{0, 0, 1, 1, 2, 2, 3, 3}));
  EXPECT_EQ(t.broadcast(0, 0).numel(), 0);
  EXPECT_FALSE(t.broadcast(0, 2).is_contiguous());
  EXPECT_THROW(t.broadcast(-1, 2), CheckFailure);
  EXPECT_THROW(t.broadcast(3, 2), CheckFailure);
  EXPECT_THROW(t.broadcast(0, -2), CheckFailure);
}

TEST(Tensor, SelectAndTranspose) {
  const Tensor t = counted({2, 3, 4});
  EXPECT_EQ(values_of(t.select(1, 2)), (Values{8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(t.select(-1, 0).shape(), (Shape{2, 3}));
  EXPECT_THROW(t.select(1, 3), CheckFailure);
  EXPECT_THROW(t.select(1, -1), CheckFailure);
  EXPECT_EQ(t.transpose(0, 2).shape(), (Shape{4, 3, 2}));
  EXPECT_EQ(values_of(t.transpose(0, -1).select(0, 1)), (Values{1, 13, 5, 17, 9, 21}));
  EXPECT_EQ(values_of(t.transpose(0, 1).transpose(0, 1)), values_of(t));
  EXPECT_ANY_THROW(t.transpose(0, 3));
}

TEST(Tensor, ReshapeWantsContiguousElementsOfTheSameNumber) {
  const Tensor t = counted({2, 6});
  EXPECT_EQ(t.reshape({3, 4}).strides(), (Shape{4, 1}));
  EXPECT_EQ(values_of(t.reshape({12})), values_of(t));
  EXPECT_EQ(values_of(t.slice(0, 1, 1).reshape({2, 3})), (Values{6, 7, 8, 9, 10, 11}));
  EXPECT_THROW(t.reshape({5}), CheckFailure);
  EXPECT_THROW(t.transpose(0, 1).reshape({12}), CheckFailure);
  EXPECT_THROW(t.slice(1, 0, 3).reshape({6}), CheckFailure);
}

TEST(Tensor, UnflattenWorksOnAnyStrides) {
  const Tensor t = counted({2, 6});
  const Tensor split = t.transpose(0, 1).unflatten(0, {2, 3});
  EXPECT_EQ(split.shape(), (Shape{2, 3, 2}));
  EXPECT_EQ(split.strides(), (Shape{3, 1, 6}));
  EXPECT_EQ(values_of(split), (Values{0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11}));
  EXPECT_EQ(values_of(split.flatten(0, 1)), values_of(t.transpose(0, 1)));
  EXPECT_EQ(t.unflatten(-1, {1, 6}).shape(), (Shape{2, 1, 6}));
  EXPECT_THROW(t.unflatten(1, {4, 2}), CheckFailure);
}

TEST(Tensor, FlattenJoinsWhatStridesAllow) {
  const Tensor t = counted({2, 3, 4});
  EXPECT_EQ(t.flatten(0, 2).shape(), (Shape{24}));
  EXPECT_EQ(t.flatten(1, -1).strides(), (Shape{12, 1}));
  EXPECT_EQ(values_of(t.slice(2, 1, 2).flatten(0, 1)), values_of(t.slice(2, 1, 2)));
  EXPECT_THROW(t.slice(2, 1, 2).flatten(1, 2), CheckFailure);
  EXPECT_THROW(t.transpose(0, 1).flatten(0, 1), CheckFailure);
  EXPECT_THROW(t.select(0, 0).broadcast(0, 2).flatten(0, 1), CheckFailure);
  EXPECT_THROW(t.flatten(2, 1), CheckFailure);
  EXPECT_THROW(t.flatten(0, 3), CheckFailure);
}

TEST(Tensor, FlattenIgnoresTheStridesOfAxesOfOne) {
  const Tensor t = counted({4, 6});
  // [4, 1, 2]: the middle axis has a stride that nothing follows.
  const Tensor column = t.unflatten(1, {3, 2}).slice(1, 2, 1);
  EXPECT_EQ(values_of(column.flatten(0, 1)), values_of(column));
  EXPECT_EQ(values_of(column.flatten(1, 2)), (Values{4, 5, 10, 11, 16, 17, 22, 23}));
  EXPECT_THROW(column.flatten(0, 2), CheckFailure);
  const Tensor ones = t.slice(0, 2, 1).slice(1, 3, 1).unflatten(1, {1, 1});
  EXPECT_EQ(values_of(ones.flatten(0, 2)), Values{15});
  EXPECT_EQ(values_of(t.slice(1, 1, 1).flatten(0, 1)), (Values{1, 7, 13, 19}));
  EXPECT_EQ(t.slice(0, 0, 0).transpose(0, 1).flatten(0, 1).shape(), Shape{0});
}

TEST(Tensor, ReadingTheWrongTypeOrNothingThrows) {
  const Tensor t = counted({2});
  EXPECT_THROW(t.data<bf16>(), CheckFailure);
  EXPECT_THROW(Tensor().raw(), CheckFailure);
  EXPECT_FALSE(Tensor().defined());
}

TEST(Tensor, ShapeOnlyHasViewsAndNoValues) {
  RankContext dry({.dry_run = true});
  const Tensor t = dry.empty("t", MemoryClass::saved, DType::bf16, {1 << 20, 1 << 15});
  EXPECT_TRUE(t.shape_only());
  EXPECT_TRUE(t.slice(0, 5, 7).transpose(0, 1).shape_only());
  EXPECT_EQ(t.slice(0, 5, 7).shape(), (Shape{7, 1 << 15}));
  EXPECT_THROW(t.raw(), CheckFailure);
  EXPECT_THROW(t.slice(0, 0, 1).data<bf16>(), CheckFailure);
  EXPECT_NO_THROW(dry.zeros("z", MemoryClass::saved, DType::f32, {1 << 30}));
  EXPECT_EQ(dry.memory().current_bytes(MemoryClass::saved), std::int64_t{1} << 36);
}

TEST(Tensor, StorageIsCountedOnceAndGoesWithItsLastView) {
  RankContext ctx({});
  const auto saved = [&] { return ctx.memory().current_bytes(MemoryClass::saved); };
  Tensor t = ctx.empty("t", MemoryClass::saved, DType::f32, {10, 10});
  EXPECT_EQ(saved(), 400);
  Tensor view = t.slice(0, 2, 1), other = view.transpose(0, 1);
  EXPECT_EQ(saved(), 400);
  t = Tensor();
  view = Tensor();
  EXPECT_EQ(saved(), 400);
  other = Tensor();
  EXPECT_EQ(saved(), 0);
  EXPECT_TRUE(ctx.memory().standing().empty());
}

TEST(Tensor, MayOutliveItsRank) {
  Tensor t;
  {
    RankContext ctx({});
    t = ctx.zeros("t", MemoryClass::saved, DType::f32, {4});
  }
  EXPECT_EQ(values_of(t), Values(4, 0.0));
}

TEST(Tensor, PoisonedMemoryIsNanInEveryType) {
  RankContext ctx({});
  ctx.memory().poison = true;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (const double value : values_of(ctx.empty("t", MemoryClass::workspace, dtype, {5})))
      EXPECT_TRUE(std::isnan(value));
    EXPECT_EQ(values_of(ctx.zeros("z", MemoryClass::workspace, dtype, {5})), Values(5, 0.0));
  }
}

TEST(Tensor, WrapsMemoryThatAnOwnerKeeps) {
  auto owner = std::make_shared<std::vector<float>>(std::vector<float>{1, 2, 3, 4});
  const std::weak_ptr<std::vector<float>> watch = owner;
  Tensor t(DType::f32, {2, 2}, std::make_shared<Storage>(owner, owner->data(), 16));
  EXPECT_THROW(Tensor(DType::f32, {5}, std::make_shared<Storage>(owner, owner->data(), 16)), CheckFailure);
  owner.reset();
  EXPECT_EQ(values_of(t.select(1, 1)), (Values{2, 4}));
  t = Tensor();
  EXPECT_TRUE(watch.expired());
}

TEST(FunctionScope, KeepsTemporariesUnderAFrameworksPolicyOnly) {
  for (const MemoryPolicy policy : {MemoryPolicy::lean, MemoryPolicy::framework_eager}) {
    RankContext ctx({.memory_policy = policy});
    const auto standing = [&] { return ctx.memory().current_activation_bytes(); };
    {
      FunctionScope scope(ctx);
      Tensor t = ctx.empty("t", MemoryClass::workspace, DType::f32, {25});
      scope.release(std::move(t));
      EXPECT_FALSE(t.defined());
      EXPECT_EQ(standing(), policy == MemoryPolicy::lean ? 0 : 100);
    }
    EXPECT_EQ(standing(), 0);
  }
}

}  // namespace
}  // namespace isomer
