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
                                 [&](Source source) { gate(thread, index, source); });
        linears_.multiply_active(thread, mlp.down, {index, kDown});
    }

  private:
    // activation(gate) * up, by the thread that computed both.
    void gate(StepThread &thread, int64_t index, Source source) {
        const MlpLayer &mlp = m_.layers[index].mlp;
        const int64_t bands = banded_rows(mlp.size) / kBand;
        linears_.for_bands(thread, bands, s_.tokens, [&](int64_t first, int64_t count, int64_t band) {
            const Input in = source();
            float *gate = thread.worker.products.get(), *up = gate + kChunk * kBand;
            linears_.multiply(mlp.gate, in, first, count, band, gate);
            linears_.multiply(mlp.up, in, first, count, band, up);
            if (adapters_.any()) {
                adapters_.add({index, kGateUp}, 0, band, first, count, gate);
                adapters_.add({index, kGateUp}, 1, band, first, count, up);
            }
            const int64_t columns = std::min(kBand, mlp.size - band * kBand);
            linears_.put_active(mlp.down, gate, up, kBand, count, columns, first, band * kBand);
        });
    }
};

}  // namespace
