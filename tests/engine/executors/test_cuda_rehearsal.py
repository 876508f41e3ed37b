"""What only a GPU would show, on one that computes nothing: see `tests.support.cuda_rehearsal`.

`make test-ops` drives it for longer, and without graphs.
"""

import shutil
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

if not shutil.which("g++"):
    pytest.skip("there is no g++ here, which the rehearsal needs", allow_module_level=True)

from penstock.engine.ranks.torch_group import ALL_GATHER
from tests.support.run_rehearsal import check_serving, rehearsal

# The rehearsal takes 20 seconds.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return rehearsal("1")


def test_serving_compiles_nothing_and_waits_for_the_device_only_for_requested_outputs(
    report: dict[str, Any],
) -> None:
    check_serving(report)


def test_a_step_of_decodes_alone_is_one_graph_and_sends_nothing(report: dict[str, Any]) -> None:
    decode = report["decode"]
    assert decode["launches"] == []
    assert decode["replays"] == decode["steps"]
    # Five launches a layer, here two of them, and the output layer is one more of `_skinny`.
    layers = {"_skinny": 9, "_decode": 2}
    assert {name: decode["launches_in_graph"][name] for name in layers} == layers
    assert sum(decode["launches_in_graph"].values()) == 10 + 12
    assert decode["operations_in_graph"] == []
    # The ids need no copy.
    assert decode["downloads"] == []


def test_where_kernels_do_not_reach_pinned_memory_the_ids_are_copied() -> None:
    report = rehearsal("1", "--unmapped")
    check_serving(report)
    decode = report["decode"]
    assert decode["launches"] == [] and decode["replays"] == decode["steps"]
    assert len(decode["downloads"]) == decode["steps"]


def test_a_chunk_graph_fills_its_padding_once_and_not_in_every_layer(
    report: dict[str, Any],
) -> None:
    graphs = report["operations_in_chunk_graphs"]
    assert len(graphs) == 7 and all(graph["mm"] == 8 for graph in graphs)  # two layers
    assert [graph["fill_"] + graph["new_zeros"] for graph in graphs] == [2] * 7


def test_a_step_of_gemma_4s_decodes_is_one_graph_too() -> None:
    """Of layers with heads of two shapes, the last of which read the keys of others."""
    report = rehearsal("1", "gemma4")
    check_serving(report)
    decode = report["decode"]
    assert decode["launches"] == [] and decode["operations_in_graph"] == []
    assert decode["replays"] == decode["steps"]
    # A work list for each shape.
    names = {"_decode": 6, "_plan_decode": 2, "_gate_input": 6, "_add_table_rows": 1, "_softcap": 1}
    assert {name: decode["launches_in_graph"][name] for name in names} == names
    assert "_rotate_and_store" not in decode["launches_in_graph"]


def test_with_adapters_a_step_without_one_is_as_before_and_others_are_graphs_too() -> None:
    report = rehearsal("1", "--enable-lora")
    check_serving(report)
    layers = {"_skinny": 9, "_decode": 2}
    decode, adapted = report["decode"], report["adapted_decode"]
    assert {name: decode["launches_in_graph"][name] for name in layers} == layers
    assert "_shrink" not in decode["launches_in_graph"]
    # For each of four linear layers, in two layers.
    assert adapted["launches_in_graph"]["_shrink"] == adapted["launches_in_graph"]["_expand"] == 8
    for steps in (decode, adapted):
        assert steps["replays"] == steps["steps"]
        assert steps["launches"] == steps["uploads"] == steps["waits"] == []


def test_steps_with_drafts_are_graphs_and_those_without_are_as_before() -> None:
    report = rehearsal("1", "--drafts")
    check_serving(report)
    decode, drafted = report["decode"], report["drafted"]
    assert decode["replays"] == decode["steps"] and sum(decode["launches_in_graph"].values()) == 22
    assert "_combine_queries" not in decode["launches_in_graph"]
    assert drafted["compiled"] == drafted["waits"] == drafted["operations_in_graph"] == []
    assert drafted["replays"] == drafted["steps"]
    # Two launches a layer more than without drafts.
    layers = {"_skinny": 9, "_rotate_and_store": 2, "_decode": 2, "_combine_queries": 2}
    steps = {"_gather_drafted": 1, "_plan_decode": 1, "_accept_drafts": 1}
    names = layers | steps
    assert {name: drafted["launches_in_graph"][name] for name in names} == names


def test_recurrent_states_are_in_graphs_too() -> None:
    report = rehearsal("1", "qwen3_5")
    check_serving(report)
    decode = report["decode"]
    assert decode["replays"] == decode["steps"]
    assert decode["launches"] == decode["operations_in_graph"] == []
    # A layer of each kind. The second product is of the gates of the recurrence.
    layers = {"_skinny": 5 + 4 + 1, "_convolve_decodes": 1, "_recur_decodes": 1, "_decode": 1}
    assert {name: decode["launches_in_graph"][name] for name in layers} == layers
    graphs = report["operations_in_chunk_graphs"]
    assert [graph["new_zeros"] for graph in graphs] == [2] * 7


def test_a_mixture_sorts_its_rows_in_one_launch() -> None:
    report = rehearsal("1", "qwen3_moe")
    check_serving(report)
    decode = report["decode"]
    assert decode["launches"] == [] and decode["operations_in_graph"] == ["add_"]  # of the end
    # Of three sequences, which are padded to four; QKV, output and the router in two layers.
    layers = {"_skinny": 7, "_route": 2, "_sort": 2, "_gate_up": 2, "_down": 2}
    assert {name: decode["launches_in_graph"][name] for name in layers} == layers
    # As many as a dense model's.
    graphs = report["operations_in_chunk_graphs"]
    assert [graph["fill_"] + graph["new_zeros"] for graph in graphs] == [2] * 7
    assert not any({"sort", "scatter_add_", "cumsum"} & graph.keys() for graph in graphs)


def test_blocks_go_to_pinned_memory_and_come_back_and_their_kernels_are_compiled_before() -> None:
    report = rehearsal("1", "fp8", "--offload")
    check_serving(report)
    memory = report["memory_tier"]
    assert memory["hit_blocks_total"] > 50 and not memory["damaged_blocks_total"]
    assert memory["written_bytes_total"] > memory["read_bytes_total"] > 0


def test_the_rehearsal_fails_on_what_a_gpu_forbids(report: dict[str, Any]) -> None:
    assert [name for name, refusal in report["rules"].items() if not refusal] == []
    assert len(report["rules"]) == 15


@pytest.mark.parametrize(
    "rank",
    [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)],
)
def test_a_stage_of_three_has_a_graph_and_passes_states_outside_of_it(rank: int) -> None:
    report = rehearsal("1", f"--stage-rank={rank}")
    decode = report["decode"]
    # Rank 0 has the last stage. Cohorts take turns, so each step has other rows than the one
    # before; and rank 1, with the first stage, gets the ids from the host.
    uploads, decode["uploads"] = decode["uploads"], []
    check_serving(report)
    assert len(uploads) == (2 if rank == 1 else 1) * decode["steps"]
    assert decode["launches"] == (["_update_table"] * decode["steps"] if rank == 1 else [])
    assert decode["replays"] == decode["steps"] and decode["operations_in_graph"] == []
    num_transfers = 2 if rank == 2 else 1
    assert decode["collectives"] == ["broadcast"] * num_transfers * decode["steps"]
    in_graph = decode["launches_in_graph"]
    assert (in_graph["_skinny"], in_graph["_decode"]) == (5 if rank == 0 else 4, 1)
    assert ("_embed" in in_graph, "_store_sampled" in in_graph) == (rank == 1, rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_compiles_nothing_and_waits_for_no_host_either(rank: int) -> None:
    report = rehearsal("1", f"--rank={rank}")
    check_serving(report)
    decode = report["decode"]
    assert decode["replays"] == decode["steps"]
    # The embedding, both halves of two layers, and the columns of the logits: those of two ranks.
    copies = ["copy_"] * (2 if rank == 0 else 0)
    assert decode["operations_in_graph"] == ["all_reduce"] * 5 + [ALL_GATHER, *copies]
    layers = {"_skinny": 9, "_decode": 2}
    assert {name: decode["launches_in_graph"][name] for name in layers} == layers
    # Rank 0 samples after the graph, and the ids pass to the others.
    assert decode["launches"].count("_store_sampled") == decode["steps"]
    assert (len(decode["launches"]) > decode["steps"]) == (rank == 0)


@pytest.mark.parametrize(
    ("flag", "kernels"),
    [
        ("--rank=1", {"_recur_decodes", "_decode"}),
        # The first stage has a recurrence, and the one after it attention.
        ("--stage-rank=1", {"_recur_decodes"}),
        ("--stage-rank=2", {"_decode"}),
    ],
)
def test_nor_does_one_with_recurrent_states(flag: str, kernels: set[str]) -> None:
    report = rehearsal("1", "qwen3_5", flag)
    decode = report["decode"]
    decode["uploads"] = []  # those of a stage are as above
    check_serving(report)
    assert decode["replays"] == decode["steps"]
    assert {"_recur_decodes", "_decode"} & decode["launches_in_graph"].keys() == kernels


def test_a_rank_with_its_part_of_codes_compiles_nothing_while_it_serves() -> None:
    report = rehearsal("1", "codes-int4", "--rank=1")
    check_serving(report)
    # Half of one matrix of each layer ends in a group of 16, and is plain.
    layers = {"_skinny_grouped": 6, "_skinny": 2 + 1}
    assert {name: report["decode"]["launches_in_graph"][name] for name in layers} == layers
