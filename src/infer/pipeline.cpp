#include "infer/pipeline.h"

namespace isomer {

Pipeline::Pipeline(Communicator& comm, const DecodeLayout& layout, const ModelConfig& config)
    : comm_(comm), num_layers_(config.num_hidden_layers) {
  if (layout.pp == 1) return;
  const int ranks = layout.stage_devices(), rank = comm.rank();
  stage_ = comm.split(rank / ranks, rank % ranks);
  line_ = comm.split(rank % ranks, rank / ranks);
}

Tensor Pipeline::receive(RankContext& ctx, std::int64_t rows, std::int64_t width, DType dtype) const {
  Tensor x = ctx.empty("x of the stage before", MemoryClass::communication, dtype, {rows, width});
  line_->issue_receive("x between stages", x, stage() - 1).wait();
  return x;
}

Work Pipeline::send(const Tensor& x) const {
  if (stage() + 1 == num_stages()) return {};
  return line_->issue_send("x between stages", x, stage() + 1);
}

void Pipeline::share(RankContext& ctx, const Tensor& x) const {
  if (num_stages() == 1) return;
  const PhaseScope phase(ctx, Phase::report);
  line_->broadcast("x of the last stage", x, num_stages() - 1);
}

}  // namespace isomer
