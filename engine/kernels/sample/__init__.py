"""Samples ids from logits in a captured graph: the semantics of `penstock.engine.sampling.sampler`
(with a different random draw), in few passes.

`DeviceSampler` owns the sampling parameters of each slot's request, in tables on the device whose
memory is fixed. A step reads them by the row's slot, without the host.

**The draw** is a race of exponential variables: each id has an exponential time, divided by its
weight, and the first wins, or the lowest id of a tie. (Gumbel-max is its logarithm, and takes one
more.) The times are a hash of (seed, position, id) alone: the SplitMix64 stream that starts at
output `position` of the seed's. So a row's id does not depend on its row, its slot or the other
rows of the batch. It differs from the CPU's draw, which has the same distribution.

**The filters** are thresholds on z = (largest - x) / temperature, whose bits have the same order as
its values; it is rounded twice, as in the CPU sampler. Sums are of integers, so they are the same
in any order.

1. `_scan`: each chunk's largest logit; its winner, for a row that draws without filters; its part
   of the log-sum-exp, for a row that needs logprobs. For all rows; most need only this pass.
   A chunk with NaN or +inf has the peak +inf, which makes its row invalid.
2. `_coarse`: how many of a chunk's ids fall in each of 16 buckets of z, and their mass.
3. `_gather`: lists the ids up to a bucket that certainly includes all survivors, mostly a few
   hundred of 128,256.
4. `_select`: the exact thresholds, by a search over the bits of the list, and the draw from the
   survivors. If more than `_MAX_LISTED` ids qualify, it reads the row instead of the list, some 25
   times.

Passes 2 to 4 return at once for rows without filters. Each of 1 to 3 reads all logits and writes
almost nothing: with V = 128,256 in float32 at 4.3 TB/s that takes 0.12 us for one row, where a
launch takes 2, and 31 us for 256 rows; in bfloat16, half. Noise takes another 80 instructions per
id: by their count 0.1 ms for 256 rows that draw, so that pass is bound by arithmetic. `_select` has
up to 24 short rounds over its list, some 10 us. None of this has been timed on a device yet.

Sources: Gumbel-max, Maddison et al. 2014 (arXiv:1411.0030); sampling without sorting, FlashInfer
(Ye et al. 2025, arXiv:2501.01005), which rejects where this selects; SplitMix64, Steele, Lea and
Flood 2014.
"""
