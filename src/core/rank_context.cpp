#include "core/rank_context.h"

#include <cstring>

namespace isomer {

std::string_view name_of(MemoryPolicy policy) { return policy == MemoryPolicy::lean ? "lean" : "framework-eager"; }

RankContext::RankContext(const RankOptions& options)
    : options_(options), memory_(std::make_shared<MemoryRecord>()), threads_(options.num_threads) {}

Communicator& RankContext::comm() {
  ISOMER_CHECK(communicator_ != nullptr, "rank {} of {} has no communicator", rank(), world_size());
  return *communicator_;
}

Tensor RankContext::empty(std::string_view name, MemoryClass memory_class, DType dtype, Shape shape) {
  const auto bytes = num_elements(shape) * size_of(dtype);
  auto storage = std::make_shared<Storage>(memory_, name, memory_class, bytes, options_.dry_run);
  return {dtype, std::move(shape), std::move(storage)};
}

Tensor RankContext::zeros(std::string_view name, MemoryClass memory_class, DType dtype, Shape shape) {
  Tensor tensor = empty(name, memory_class, dtype, std::move(shape));
  if (!options_.dry_run && tensor.numel() > 0) std::memset(tensor.raw(), 0, static_cast<std::size_t>(tensor.nbytes()));
  return tensor;
}

}  // namespace isomer
