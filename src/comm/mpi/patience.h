// Waiting for MPI, which has to be asked again and again: eagerly at first, then giving way, then asleep.
#pragma once

namespace isomer {

class Patience {
 public:
  /// True from pause() about every `look_s` seconds of waiting.
  Patience(int num_ranks, double look_s);
  /// Between two questions. True if it is time to look after the peers.
  bool pause();
  /// Something happened.
  void reset() { since_s_ = 0; }

 private:
  bool crowded_;  // more ranks than cores: give way at once
  double look_s_;
  double next_look_s_;
  double since_s_ = 0;
  int questions_ = 0;
};

}  // namespace isomer
