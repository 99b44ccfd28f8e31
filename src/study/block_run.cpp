#include "study/block_run.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "comm/communicator.h"
#include "kernels/elementwise.h"
#include "parallel/sequence/scheme.h"

namespace isomer {

namespace {

std::int64_t weight_bytes(const AttentionWeights& weights) {
  std::int64_t bytes = 0;
  weights.for_each([&](std::string_view, const Tensor& tensor) { bytes += tensor.nbytes(); });
  return bytes;
}

/// The rank's rows of a shared tensor, in memory of its own.
Tensor local_rows(RankContext& ctx, std::string_view name, MemoryClass memory_class, const Tensor& shared,
                  const TokenShards& tokens) {
  const Tensor local = ctx.empty(name, memory_class, shared.dtype(), {tokens.rows(ctx.rank()), shared.size(1)});
  if (ctx.dry_run()) return local;
  std::int64_t row = 0;
  for (const IndexRange& range : tokens.positions(ctx.rank())) {
    const std::int64_t count = range.count * tokens.batch;
    copy(ctx, "input", shared.slice(0, range.begin * tokens.batch, count), local.slice(0, row, count));
    row += count;
  }
  return local;
}

struct Times {
  double forward = 0, backward = 0, waiting = 0, kernels = 0;
  double total() const { return forward + backward; }
};

/// One rank's run of one scheme.
class BlockRank {
 public:
  BlockRank(RankContext& ctx, const BlockProblem& problem, const BlockData& data, const Layout& layout,
            const BlockRunOptions& options)
      : ctx_(ctx),
        data_(data),
        options_(options),
        scheme_(make_sequence_scheme(layout, problem.config)),
        block_{.layer = {problem.config, data.weights, {}},
               .tokens = token_shards_of(layout, problem.seq, problem.batch),
               .groups = make_sequence_groups(ctx, layout),
               .core = core_of(problem, layout),
               .first_position = problem.first_position},
        virtual_(clock_is_virtual(options.group)) {
    block_.layer.rope =
        make_rope_rows(ctx, problem.config, problem.dtype, problem.first_position, block_.tokens.positions(ctx.rank()),
                       problem.batch, problem.first_position + problem.seq);
    weights_id_ = ctx.memory().allocated("weights", MemoryClass::weight, weight_bytes(data.weights));
    ctx.memory().poison = options.poison_memory;
    ctx.comm().drop_transfers(options.drop_transfers);
  }
  ~BlockRank() { ctx_.memory().freed(weights_id_); }
  BlockRank(const BlockRank&) = delete;
  BlockRank& operator=(const BlockRank&) = delete;

  /// Repeats until timed; the last repetition is the one that is accounted for and whose results stay.
  RankMeasure measure(BlockRun& run) {
    std::vector<Times> times;
    int remaining = ctx_.dry_run() ? 1 : 0;
    if (!ctx_.dry_run() && options_.repetitions != 1) {
      const Times warm_up = repetition(nullptr);
      const double longest = ctx_.comm().max_over_ranks(warm_up.total());
      remaining = options_.repetitions > 0 ? options_.repetitions - 1 : (longest > 2 ? 1 : 3);
    }
    for (remaining = std::max(remaining, 1); remaining > 0; --remaining) {
      times.push_back(repetition(remaining == 1 ? &run : nullptr));
    }
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end(),
                     [](const Times& a, const Times& b) { return a.total() < b.total(); });
    return summarise(times[times.size() / 2]);
  }

 private:
  /// Time in collectives so far, on the run's clock.
  double waited() const { return virtual_ ? ctx_.clock().waited_s() : ctx_.ops().waiting_wall_s(); }
  double now() const { return virtual_ ? ctx_.clock().now_s() : wall_clock_s(); }

  template <class Body>
  auto in_phase(Phase phase, Body&& body) {
    const PhaseScope scope(ctx_, phase);
    return body();
  }

  Times repetition(BlockRun* results) {
    ctx_.ledger().clear();
    ctx_.ops().clear();
    Tensor x = local_rows(ctx_, "x", MemoryClass::saved, data_.x, block_.tokens);
    Tensor dy = local_rows(ctx_, "dy", MemoryClass::workspace, data_.dy, block_.tokens);
    ctx_.ops().clear();
    ctx_.memory().open_window();
    Times times;
    if (results != nullptr && options_.dump && !ctx_.dry_run()) {
      ctx_.set_observer(
          [this](std::string_view name, const Tensor& t) { options_.dump(ctx_.rank(), std::string(name), t); });
    }

    ctx_.comm().barrier();
    double begin = now(), waited_before = waited();
    SequenceScheme::Forward forward =
        in_phase(Phase::forward, [&] { return scheme_->forward(ctx_, block_, std::move(x)); });
    times.forward = now() - begin;
    times.waiting = waited() - waited_before;
    saved_bytes_ = ctx_.memory().current_bytes(MemoryClass::saved);
    if (results != nullptr && options_.collect_results) results->y = collect("y", forward.y);
    dump("y", forward.y, results);
    forward.y = Tensor();

    ctx_.comm().barrier();
    begin = now();
    waited_before = waited();
    SequenceScheme::Backward backward = in_phase(
        Phase::backward, [&] { return scheme_->backward(ctx_, block_, std::move(forward.saved), std::move(dy)); });
    times.backward = now() - begin;
    times.waiting += waited() - waited_before;
    times.kernels = virtual_ ? ctx_.ops().cpu_s() : ctx_.ops().wall_s();
    ctx_.memory().close_window();
    ctx_.set_observer({});

    if (results != nullptr) finish(*results, backward);
    return times;
  }

  void dump(const std::string& name, const Tensor& tensor, const BlockRun* results) const {
    if (results != nullptr && options_.dump && !ctx_.dry_run()) options_.dump(ctx_.rank(), name, tensor);
  }

  void finish(BlockRun& results, SequenceScheme::Backward& backward) {
    dump("dx", backward.dx, &results);
    if (options_.dump && !ctx_.dry_run()) {
      backward.gradients.tensors.for_each([&](std::string_view name, Tensor& gradient) {
        options_.dump(ctx_.rank(), fmt::format("partial_grad.{}", name), gradient);
      });
    }
    sync_gradients(ctx_, block_, backward.gradients);
    if (!options_.collect_results) return;
    results.dx = collect("dx", backward.dx);
    if (ctx_.rank() == 0) results.gradients = backward.gradients.tensors;
  }

  /// All ranks' rows at rank 0; undefined elsewhere and in a dry run.
  Tensor collect(std::string_view name, const Tensor& local) {
    if (ctx_.dry_run()) return {};
    const PhaseScope scope(ctx_, Phase::report);
    ctx_.comm().drop_transfers(false);
    Tensor whole;
    if (ctx_.rank() != 0) {
      for_ranges(ctx_.rank(), local,
                 [&](const Tensor& rows, std::int64_t) { ctx_.comm().issue_send(name, rows, 0).wait(); });
    } else {
      whole = Tensor::unrecorded(name, local.dtype(), {block_.tokens.total_rows(), local.size(1)});
      for_ranges(0, local, [&](const Tensor& rows, std::int64_t begin) {
        copy(ctx_, "collect", rows, whole.slice(0, begin, rows.size(0)));
      });
      for (int peer = 1; peer < ctx_.world_size(); ++peer) {
        for (const IndexRange& range : block_.tokens.positions(peer)) {
          const std::int64_t batch = block_.tokens.batch;
          ctx_.comm().issue_receive(name, whole.slice(0, range.begin * batch, range.count * batch), peer).wait();
        }
      }
    }
    ctx_.comm().drop_transfers(options_.drop_transfers);
    return whole;
  }

  /// Calls body(rows of one range of the rank's positions, their first row among all) for each of them.
  template <class Body>
  void for_ranges(int rank, const Tensor& local, Body&& body) const {
    std::int64_t row = 0;
    for (const IndexRange& range : block_.tokens.positions(rank)) {
      const std::int64_t count = range.count * block_.tokens.batch;
      body(local.slice(0, row, count), range.begin * block_.tokens.batch);
      row += count;
    }
  }

  RankMeasure summarise(const Times& times) {
    RankMeasure m;
    m.rank = ctx_.rank();
    const Ledger& ledger = ctx_.ledger();
    m.bytes_forward = ledger.bytes_sent(Phase::forward);
    m.bytes_backward = ledger.bytes_sent(Phase::backward);
    m.bytes_gradient_sync = ledger.bytes_sent(Phase::gradient_sync);
    m.bytes_received_forward = ledger.bytes_received(Phase::forward);
    m.bytes_received_backward = ledger.bytes_received(Phase::backward);
    for (const LedgerEntry& entry : ledger.entries()) {
      if (entry.phase != Phase::forward && entry.phase != Phase::backward) continue;
      if (entry.collective == Collective::barrier) continue;
      const auto key = fmt::format("{} {} {}", name_of(entry.phase), name_of(entry.collective), entry.tensor);
      m.bytes_by_tensor[key] += entry.bytes_sent;
      m.bytes_received_by_tensor[key] += entry.bytes_received;
      m.messages += entry.messages;
    }
    m.peak_activation_bytes = ctx_.memory().peak_activation_bytes();
    m.standing_at_peak = ctx_.memory().standing_at_peak();
    m.saved_bytes = saved_bytes_;
    m.untracked_bytes = ctx_.memory().untracked_bytes();
    m.flops_forward = ctx_.ops().flops(Phase::forward);
    m.flops_backward = ctx_.ops().flops(Phase::backward);
    for (const auto& [key, summary] : ctx_.ops().summaries()) {
      if (key.phase != Phase::forward && key.phase != Phase::backward) continue;
      const std::string name = fmt::format("{} {}", name_of(key.phase), key.name);
      m.flops_by_op[name] += summary.cost.flops;
      m.seconds_by_op[name] += virtual_ ? summary.cpu_s : summary.wall_s;
    }
    m.seconds = times.total();
    m.seconds_forward = times.forward;
    m.seconds_waiting = times.waiting;
    m.seconds_kernels = times.kernels;
    return m;
  }

  RankContext& ctx_;
  const BlockData& data_;
  const BlockRunOptions& options_;
  std::unique_ptr<SequenceScheme> scheme_;
  SequenceBlock block_;
  bool virtual_;
  std::int64_t weights_id_ = -1;
  std::int64_t saved_bytes_ = 0;
};

nlohmann::json to_json(const RankMeasure& m) {
  nlohmann::json standing = nlohmann::json::array();
  for (const StandingTensor& t : m.standing_at_peak) {
    standing.push_back({t.name, static_cast<int>(t.memory_class), t.bytes});
  }
  return {{"rank", m.rank},
          {"bytes",
           {m.bytes_forward, m.bytes_backward, m.bytes_gradient_sync, m.bytes_received_forward,
            m.bytes_received_backward, m.messages, m.peak_activation_bytes, m.saved_bytes, m.untracked_bytes}},
          {"by_tensor", m.bytes_by_tensor},
          {"received_by_tensor", m.bytes_received_by_tensor},
          {"standing", standing},
          {"flops", {m.flops_forward, m.flops_backward}},
          {"by_op", m.flops_by_op},
          {"seconds_by_op", m.seconds_by_op},
          {"seconds", {m.seconds, m.seconds_forward, m.seconds_waiting, m.seconds_kernels}}};
}

RankMeasure measure_from(const nlohmann::json& json) {
  RankMeasure m;
  m.rank = json.at("rank");
  const auto& bytes = json.at("bytes");
  std::int64_t* fields[] = {
      &m.bytes_forward,           &m.bytes_backward, &m.bytes_gradient_sync,   &m.bytes_received_forward,
      &m.bytes_received_backward, &m.messages,       &m.peak_activation_bytes, &m.saved_bytes,
      &m.untracked_bytes};
  for (std::size_t i = 0; i < std::size(fields); ++i) *fields[i] = bytes.at(i);
  m.bytes_by_tensor = json.at("by_tensor").get<std::map<std::string, std::int64_t>>();
  m.bytes_received_by_tensor = json.at("received_by_tensor").get<std::map<std::string, std::int64_t>>();
  for (const auto& t : json.at("standing")) {
    m.standing_at_peak.push_back({t.at(0), static_cast<MemoryClass>(t.at(1).get<int>()), t.at(2)});
  }
  m.flops_forward = json.at("flops").at(0);
  m.flops_backward = json.at("flops").at(1);
  m.flops_by_op = json.at("by_op").get<std::map<std::string, double>>();
  m.seconds_by_op = json.at("seconds_by_op").get<std::map<std::string, double>>();
  const auto& seconds = json.at("seconds");
  m.seconds = seconds.at(0);
  m.seconds_forward = seconds.at(1);
  m.seconds_waiting = seconds.at(2);
  m.seconds_kernels = seconds.at(3);
  return m;
}

}  // namespace

AttentionCore core_of(const BlockProblem& problem, const Layout& layout) {
  const std::string value = layout.option("attention", name_of(problem.core));
  if (value == "eager") return AttentionCore::eager;
  if (value == "fused") return AttentionCore::fused;
  invalid_argument("attention={}: it takes attention=eager or attention=fused", value);
}

const RankMeasure& BlockRun::largest(std::int64_t RankMeasure::*field) const {
  ISOMER_CHECK(!ranks.empty(), "the run has no measures here");
  return *std::max_element(ranks.begin(), ranks.end(),
                           [&](const auto& a, const auto& b) { return a.*field < b.*field; });
}

double BlockRun::seconds() const {
  double longest = 0;
  for (const RankMeasure& rank : ranks) longest = std::max(longest, rank.seconds);
  return longest;
}

BlockRun run_block(const BlockProblem& problem, const BlockData& data, const Layout& given,
                   const BlockRunOptions& options) {
  if (const auto reason =
          why_unfit(given, problem.config, options.group.num_ranks, problem.seq, core_of(problem, given));
      !reason.empty()) {
    invalid_argument("{}", reason);
  }
  const Layout layout = sized_layout(given, options.group.num_ranks);
  if (data_ranks_of(layout) > 1) {
    invalid_argument("layout '{}': replicas along dp repeat one block's work on other sequences; leave dp out",
                     to_string(given));
  }
  BlockRun run;
  run.virtual_clock = clock_is_virtual(options.group);
  run.threads_per_rank = threads_per_rank(options.group);
  run_group(options.group, [&](RankContext& ctx) {
    BlockRun elsewhere;  // ranks other than 0 collect nothing
    BlockRun& results = ctx.rank() == 0 ? run : elsewhere;
    BlockRank rank(ctx, problem, data, layout, options);
    const RankMeasure measure = rank.measure(results);
    if (ctx.dry_run()) {
      run.ranks.push_back(measure);
      return;
    }
    for (const std::string& text : ctx.comm().gather_text(to_json(measure).dump())) {
      results.ranks.push_back(measure_from(nlohmann::json::parse(text)));
    }
  });
  // Dry ranks that split their group go on in any order.
  std::sort(run.ranks.begin(), run.ranks.end(),
            [](const RankMeasure& a, const RankMeasure& b) { return a.rank < b.rank; });
  return run;
}

}  // namespace isomer
