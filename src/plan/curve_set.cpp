// Which curve prices an operation.
#include <cstdlib>

#include "core/error.h"
#include "plan/curves.h"
#include "plan/hardware.h"

namespace isomer {

namespace {

constexpr int kNumKinds = static_cast<int>(OperationKind::send_receive) + 1;
constexpr int kNumLoads = static_cast<int>(ExpertLoad::power_law_1_2) + 1;

/// Where no measurement of a kind is at hand: shares of peak that well-tuned libraries reach on large sizes.
Curve default_curve(OperationKind kind) {
  Curve curve;
  curve.kind = kind;
  curve.variant = "default";
  curve.launch_s = 2.5e-6;
  if (is_collective(kind)) {
    curve.launch_s = 0;  // the tier's latency stands for it
    curve.bytes_share = 0.8;
  }
  return curve;
}

/// The kind whose curve stands in where a kind has none.
OperationKind stand_in(OperationKind kind) {
  switch (kind) {
    case OperationKind::prefill_gqa: return OperationKind::prefill_mla;
    case OperationKind::prefill_mla: return OperationKind::prefill_gqa;
    case OperationKind::decode_gqa: return OperationKind::decode_mla;
    case OperationKind::decode_mla: return OperationKind::decode_gqa;
    case OperationKind::send_receive: return OperationKind::all_to_all;
    default: return kind;
  }
}

int distance(Precision a, Precision b) { return std::abs(static_cast<int>(a) - static_cast<int>(b)); }

/// 0: made for this. A collective moves bytes of any precision.
int mismatch(const Curve& curve, Precision compute, Precision storage, ExpertLoad load) {
  if (is_collective(curve.kind) || curve.kind == OperationKind::elementwise) return 0;
  const int other_load = curve.kind == OperationKind::moe && curve.load != load ? 1 : 0;
  return 100 * distance(curve.compute, compute) + 10 * distance(curve.storage, storage) + other_load;
}

std::size_t place(OperationKind kind, Precision compute, Precision storage, ExpertLoad load) {
  const int index = ((static_cast<int>(kind) * kNumPrecisions + static_cast<int>(compute)) * kNumPrecisions +
                     static_cast<int>(storage)) *
                        kNumLoads +
                    static_cast<int>(load);
  return static_cast<std::size_t>(index);
}

}  // namespace

CurveSet::CurveSet(std::vector<Curve> curves) : curves_(std::move(curves)) {
  for (int kind = 0; kind < kNumKinds; ++kind) defaults_.push_back(default_curve(static_cast<OperationKind>(kind)));
  table_.resize(static_cast<std::size_t>(kNumKinds * kNumPrecisions * kNumPrecisions * kNumLoads));
  for (int kind = 0; kind < kNumKinds; ++kind) {
    for (int compute = 0; compute < kNumPrecisions; ++compute) {
      for (int storage = 0; storage < kNumPrecisions; ++storage) {
        for (int load = 0; load < kNumLoads; ++load) {
          const auto k = static_cast<OperationKind>(kind);
          const auto c = static_cast<Precision>(compute), s = static_cast<Precision>(storage);
          const auto l = static_cast<ExpertLoad>(load);
          table_[place(k, c, s, l)] = resolve(k, c, s, l);
        }
      }
    }
  }
}

const CurveSet::Alternatives& CurveSet::find(OperationKind kind, Precision compute, Precision storage,
                                             ExpertLoad load) const {
  return table_[place(kind, compute, storage, load)];
}

CurveSet::Alternatives CurveSet::resolve(OperationKind kind, Precision compute, Precision storage,
                                         ExpertLoad load) const {
  for (const OperationKind wanted : {kind, stand_in(kind)}) {
    Alternatives found;
    int best = -1;
    for (const Curve& curve : curves_) {
      if (curve.kind != wanted || !curve.priced) continue;
      const int penalty = mismatch(curve, compute, storage, load);
      if (best < 0 || penalty < best) {
        best = penalty;
        found = Alternatives{.exact = penalty == 0 && wanted == kind};
      }
      if (penalty > best) continue;
      if (found.count == kMaxAlternatives) {
        invalid_argument("curves: more than {} apply to {} at once; mark all but those with \"priced\": false",
                         kMaxAlternatives, name_of(wanted));
      }
      found.curves[static_cast<std::size_t>(found.count++)] = &curve;
    }
    if (found.count > 0) return found;
  }
  Alternatives fallback;
  fallback.curves[0] = &defaults_[static_cast<std::size_t>(kind)];
  fallback.count = 1;
  return fallback;
}

}  // namespace isomer
