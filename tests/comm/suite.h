// The communicator's suite runs on both backends: as threads of the test, or, when the test was started by mpirun, as
// the ranks of that world (cases of another number of ranks are skipped). With ISOMER_COMM_RESULTS=DIR each rank
// appends what it received to a file there, so that backends can be compared bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/group.h"

namespace isomer {

inline GroupOptions suite_options(int num_ranks) {
  GroupOptions options;
  options.backend = under_mpirun() ? Backend::mpi : Backend::threads;
  options.num_ranks = num_ranks;
  options.threads_per_rank = 1;
  options.timeout_s = 5;
  return options;
}

class Ranks : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (under_mpirun() && mpi_world().size != GetParam()) GTEST_SKIP() << "another number of ranks";
  }
  void run(const std::function<void(RankContext&)>& body) { run_group(suite_options(GetParam()), body); }
};

inline std::string rank_name(const testing::TestParamInfo<int>& info) { return fmt::format("P{}", info.param); }

inline Tensor make(RankContext& ctx, std::string_view name, DType dtype, Shape shape) {
  return ctx.empty(name, MemoryClass::workspace, dtype, std::move(shape));
}

/// A number in [−1, 1) with a full mantissa, by (a, b, index) alone.
inline double value_of(std::uint64_t a, std::uint64_t b, std::uint64_t index) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + index * 0x94d049bb133111ebu + 1;
  x ^= x >> 31;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 29;
  return static_cast<double>(x >> 11) * 0x1p-52 - 1.0;
}

/// Calls visit(offset of element, index) over the elements of a view in logical order.
template <class Visit>
void for_each_element(const Tensor& tensor, const Visit& visit) {
  Shape index(tensor.shape().size(), 0);
  for (std::int64_t flat = 0; flat < tensor.numel(); ++flat) {
    std::int64_t offset = 0;
    for (std::size_t axis = 0; axis < index.size(); ++axis) offset += index[axis] * tensor.strides()[axis];
    visit(offset, flat);
    for (std::size_t axis = index.size(); axis-- > 0;) {
      if (++index[axis] < tensor.shape()[axis]) break;
      index[axis] = 0;
    }
  }
}

/// tensor[i] = value_of(a, b, i) in its dtype.
inline void fill(const Tensor& tensor, std::uint64_t a, std::uint64_t b) {
  visit_dtype(tensor.dtype(), [&]<class T>() {
    if (tensor.numel() == 0) return;
    T* data = tensor.data<T>();
    for_each_element(tensor, [&](std::int64_t offset, std::int64_t i) {
      data[offset] = static_cast<T>(value_of(a, b, static_cast<std::uint64_t>(i)));
    });
  });
}

inline std::vector<double> values(const Tensor& tensor) {
  std::vector<double> result;
  visit_dtype(tensor.dtype(), [&]<class T>() {
    if (tensor.numel() == 0) return;
    const T* data = tensor.data<T>();
    for_each_element(tensor, [&](std::int64_t offset, std::int64_t) { result.push_back(data[offset]); });
  });
  return result;
}

/// What fill(a, b) writes into `count` elements of this dtype.
inline std::vector<double> filled(DType dtype, std::int64_t count, std::uint64_t a, std::uint64_t b) {
  std::vector<double> result;
  visit_dtype(dtype, [&]<class T>() {
    for (std::int64_t i = 0; i < count; ++i)
      result.push_back(static_cast<T>(value_of(a, b, static_cast<std::uint64_t>(i))));
  });
  return result;
}

/// The sum over ranks a of fill(a, b), in rank order in float32 (float64 for float64), rounded once.
inline std::vector<double> summed(DType dtype, std::int64_t count, int num_ranks, std::uint64_t b) {
  std::vector<double> result;
  visit_dtype(dtype, [&]<class T>() {
    using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
    for (std::int64_t i = 0; i < count; ++i) {
      Sum sum = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const auto term = static_cast<Sum>(
            static_cast<T>(value_of(static_cast<std::uint64_t>(rank), b, static_cast<std::uint64_t>(i))));
        sum = rank == 0 ? term : sum + term;
      }
      result.push_back(static_cast<T>(sum));
    }
  });
  return result;
}

/// Keeps what a rank computed for the comparison of backends.
inline void keep(const RankContext& ctx, const std::vector<double>& result) {
  const char* folder = std::getenv("ISOMER_COMM_RESULTS");
  if (folder == nullptr) return;
  std::ofstream file(
      std::string(folder) + "/P" + std::to_string(ctx.world_size()) + "-rank" + std::to_string(ctx.rank()),
      std::ios::binary | std::ios::app);
  file.write(reinterpret_cast<const char*>(result.data()), std::ssize(result) * 8);
}

/// What run_group throws, as text; empty if nothing.
inline std::string error_of(const GroupOptions& options, const std::function<void(RankContext&)>& body) {
  try {
    run_group(options, body);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace isomer
