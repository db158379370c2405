"""A seeded shuffle without replacement, epoch after epoch, whoever resumes it."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import CPU, fresh, rows, save
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stages import select, tables
from stages.errors import InputError
from stages.select import Config


def ids(count: int) -> list[str]:
    return [f"p{i:02d}" for i in range(count)]


def pool(parent: Path, prompt_ids: list[str]) -> Path:
    given_rows = ({"prompt_id": prompt_id} for prompt_id in prompt_ids)
    return save(fresh(parent, "prompts"), "prompts", rows("prompts", *given_rows))


def run(prompts: Path, previous: Path | None = None, **config: int) -> Path:
    out = fresh(prompts.parent)
    select.run(prompts=prompts, previous=previous, out=out, config=Config(**config), machine=CPU)
    return out


def drawn(selection: Path) -> list[str]:
    return tables.read(selection, "selection")["prompt_id"].to_list()


@settings(max_examples=30)
@given(count=st.integers(1, 9), sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_chained_selections_are_one_stream_of_whole_epochs(count: int, sizes: list[int]) -> None:
    with TemporaryDirectory() as parent:
        prompts = pool(Path(parent), ids(count))
        selection, chained = None, []
        for size in sizes:
            selection = run(prompts, selection, size=size)
            chained += drawn(selection)
        at_once = tables.read(run(prompts, size=sum(sizes)), "selection")
    assert chained == at_once["prompt_id"].to_list()
    for (epoch,), one in at_once.group_by("epoch", maintain_order=True):
        assert one["prompt_id"].is_unique().all()
        if epoch < at_once["epoch"].max():
            assert sorted(one["prompt_id"]) == ids(count)
    assert at_once["position"].to_list() == list(range(sum(sizes)))


def test_the_order_of_the_file_does_not_matter(tmp_path: Path) -> None:
    forwards, backwards = pool(tmp_path, ids(20)), pool(tmp_path, ids(20)[::-1])
    assert drawn(run(forwards, size=30)) == drawn(run(backwards, size=30))


def test_another_seed_is_another_order_and_so_is_another_epoch(tmp_path: Path) -> None:
    prompts = pool(tmp_path, ids(20))
    first, second = drawn(run(prompts, size=40)), drawn(run(prompts, size=40, seed=1))
    assert first != second
    assert first[:20] != first[20:]
    assert sorted(first[:20]) == sorted(second[:20])


def test_one_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    prompts = pool(tmp_path, ids(5))
    files = [run(prompts, size=8, seed=3) / "selection" / "part-00000.parquet" for _ in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_group_ids_are_unique_over_rounds_and_steps(tmp_path: Path) -> None:
    prompts = pool(tmp_path, ids(3))
    selections = [
        run(prompts, size=4, step=step, round=number) for step in (1, 2, 11) for number in (0, 1)
    ]
    frame = tables.read(selections, "selection")
    assert frame["group_id"].n_unique() == len(frame) == 24
    assert set(frame.select("step", "round").iter_rows()) == {
        (step, number) for step in (1, 2, 11) for number in (0, 1)
    }


def test_a_prompt_drawn_twice_in_one_round_is_two_groups(tmp_path: Path) -> None:
    frame = tables.read(run(pool(tmp_path, ids(1)), size=3), "selection")
    assert frame["group_id"].n_unique() == 3
    assert frame["epoch"].to_list() == [0, 1, 2]


def test_unusable_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'p00' occurs more than once"):
        run(pool(tmp_path, ["p00", "p00"]))
    with pytest.raises(InputError, match="no rows"):
        run(pool(tmp_path, []))


def test_a_previous_selection_without_rows_is_refused(tmp_path: Path) -> None:
    empty = save(tmp_path / "empty", "selection", rows("selection"))
    with pytest.raises(InputError, match="previous selection has no rows"):
        run(pool(tmp_path, ids(3)), empty)


def test_a_round_of_no_prompts_is_refused() -> None:
    with pytest.raises(ValidationError, match="size"):
        Config(size=0)
