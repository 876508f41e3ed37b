"""Attention that reads keys and values in place in the paged pool, in Triton.

Decode is bound by reading the context, so every multiprocessor has to read all the time. Rows are
split into pieces of about equal length (split-KV), however different their lengths; the pieces are
listed on the device once a step, and all layers share the list. So a captured CUDA graph is valid
for any lengths. As many programs as the device holds take the pieces in turn, so none starts in
vain. The one that finishes a row's last piece combines them by their log-sum-exps, always in the
row's order. In a step of decodes alone, the same kernel rotates queries and keys, and stores the
new keys and values: one launch a layer. A row with drafts has a few queries, which are rows of the
same tiles, so that its keys are read once; a kernel before rotates them, since the new keys of a
row may be in two pieces. Where the values of a draft are not finite, neither are the results of the
queries before it, which multiply them by 0.

Prefill is bound by arithmetic: each tile has some query tokens of one sequence, with all the query
heads of one KV head, and loops over the keys that they attend to.

Sources: flash attention, Dao et al. 2022 (arXiv:2205.14135); split-KV decode, "Flash-Decoding",
Dao et al. 2023; one work list for rows of different lengths, FlashInfer, Ye et al. 2025
(arXiv:2501.01005). All KV heads of a piece run next to each other, because they read the same cache
lines.
"""
