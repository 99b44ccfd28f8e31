#include "plan/nelder_mead.h"

#include <algorithm>

namespace isomer {

namespace {

struct Vertex {
  std::vector<double> x;
  double loss = 0;
};

/// from + t·(from − to), coordinate by coordinate.
std::vector<double> beyond(const std::vector<double>& from, const std::vector<double>& to, double t) {
  std::vector<double> x(from.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = from[i] + t * (from[i] - to[i]);
  return x;
}

std::vector<double> centre_without_last(const std::vector<Vertex>& simplex) {
  std::vector<double> centre(simplex.front().x.size());
  for (std::size_t v = 0; v + 1 < simplex.size(); ++v) {
    for (std::size_t i = 0; i < centre.size(); ++i) {
      centre[i] += simplex[v].x[i] / static_cast<double>(simplex.size() - 1);
    }
  }
  return centre;
}

}  // namespace

std::vector<double> nelder_mead(const std::function<double(const std::vector<double>&)>& loss,
                                const std::vector<double>& start, double edge, int steps) {
  const auto vertex = [&](std::vector<double> x) {
    const double value = loss(x);
    return Vertex{std::move(x), value};
  };
  std::vector<Vertex> simplex = {vertex(start)};
  for (std::size_t i = 0; i < start.size(); ++i) {
    std::vector<double> x = start;
    x[i] += edge;
    simplex.push_back(vertex(std::move(x)));
  }
  const auto by_loss = [](const Vertex& a, const Vertex& b) { return a.loss < b.loss; };
  for (int step = 0; step < steps; ++step) {
    std::stable_sort(simplex.begin(), simplex.end(), by_loss);
    if (simplex.back().loss - simplex.front().loss < 1e-9) break;
    const std::vector<double> centre = centre_without_last(simplex);
    Vertex& worst = simplex.back();
    Vertex reflected = vertex(beyond(centre, worst.x, 1));
    if (reflected.loss < simplex.front().loss) {
      Vertex expanded = vertex(beyond(centre, worst.x, 2));
      worst = expanded.loss < reflected.loss ? std::move(expanded) : std::move(reflected);
    } else if (reflected.loss < simplex[simplex.size() - 2].loss) {
      worst = std::move(reflected);
    } else {
      Vertex contracted = vertex(beyond(centre, worst.x, reflected.loss < worst.loss ? 0.5 : -0.5));
      if (contracted.loss < std::min(reflected.loss, worst.loss)) {
        worst = std::move(contracted);
      } else {
        for (std::size_t v = 1; v < simplex.size(); ++v) {
          simplex[v] = vertex(beyond(simplex.front().x, simplex[v].x, -0.5));
        }
      }
    }
  }
  return std::min_element(simplex.begin(), simplex.end(), by_loss)->x;
}

}  // namespace isomer
