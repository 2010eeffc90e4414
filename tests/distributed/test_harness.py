"""A rank that fails or dies names its case, and the cases after it still run."""

from pathlib import Path

from tests.distributed.harness import Launch


def test_failures_name_case_and_rank(tmp_path: Path) -> None:
    names = ["one_rank_raises", "one_rank_dies", "all_ranks_leave", "nothing_wrong"]
    launch = Launch(2, names, tmp_path)
    results = {name: launch.outcome(name) for name in names}
    assert launch.process.wait() == 0
    assert "case one_rank_raises on 2 ranks: rank " in results["one_rank_raises"]
    assert "rank 1 ended with 1" in results["one_rank_raises"]
    assert "--- rank 1" in results["one_rank_raises"]
    assert "ValueError: seven is not eight" in results["one_rank_raises"]
    assert "case one_rank_dies on 2 ranks: rank " in results["one_rank_dies"]
    assert "rank 0 ended with 9" in results["one_rank_dies"]
    assert "last words" in results["one_rank_dies"]
    assert "case all_ranks_leave on 2 ranks: the ranks ended in it" in results["all_ranks_leave"]
    assert results["nothing_wrong"] == ""
