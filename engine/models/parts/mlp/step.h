// The gated MLP.
#pragma once
#include "native/step/context.h"

namespace {

class MlpPhases : PartPhases {
  public:
    using PartPhases::PartPhases;

    void run(StepThread &thread, int64_t index) {
        const Layer &layer = m_.layers[index];
        const MlpLayer &mlp = layer.mlp;
        linears_.shrink_normalised(thread, layer.mlp_norm, {index, kGateUp});
        linears_.with_normalised(thread, layer.mlp_norm, mlp.gate,
                                 [&](Source source) { linears_.gate(thread, mlp, source, {index, kGateUp}); });
        linears_.multiply_active(thread, mlp.down, {index, kDown});
    }
};

}  // namespace
