// A part's phases need the step's state, and what all parts do with it.
#pragma once
#include "linear.h"

namespace {

struct StepContext {
    StepContext(Workspace &workspace, const Step &step) : state(workspace, step) {}
    StepContext(const StepContext &) = delete;

    StepState state;
    RankSums sums{state};
    Norms norms{state, sums};
    Adapters adapters{state};
    LinearLayers linears{state, norms, adapters};
};

// The phases of one part derive from this, so that they have all of it at hand.
class PartPhases {
  public:
    explicit PartPhases(StepContext &context)
        : state_(context.state), m_(state_.model), s_(state_.step), sums_(context.sums), norms_(context.norms),
          adapters_(context.adapters), linears_(context.linears) {}

  protected:
    StepState &state_;
    const Model &m_;
    const Step &s_;
    RankSums &sums_;
    Norms &norms_;
    Adapters &adapters_;
    LinearLayers &linears_;
};

}  // namespace
