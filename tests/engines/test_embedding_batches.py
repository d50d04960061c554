"""Which texts share a batch: by tokens, of similar lengths, and fairly among requests."""

import random

from model_worker.engines.embedding.batches import JOIN_S, Batches


def drain(batches: Batches[str]) -> list[list[tuple[str, int]]]:
    taken = []
    while batches:
        taken.append(batches.take().texts)
    return taken


def test_each_text_is_given_out_once_and_no_batch_is_too_large() -> None:
    drawn = random.Random(1)
    for _ in range(50):
        lengths = {name: [drawn.randint(1, 600) for _ in range(drawn.randint(1, 60))] for name in "abcdef"}
        batches = Batches[str](1000)
        for name, texts in lengths.items():
            batches.add(name, texts, 0.0)
        seen = []
        while batches:
            batch = batches.take()
            assert len(batch.texts) * batch.longest <= 1000
            assert batch.longest == max(lengths[name][number] for name, number in batch.texts)
            seen += batch.texts
        assert sorted(seen) == sorted((name, number) for name, texts in lengths.items() for number in range(len(texts)))


def test_a_text_that_is_longer_than_a_batch_is_alone() -> None:
    batches = Batches[str](100)
    batches.add("a", [10, 500, 20], 0.0)
    assert drain(batches) == [[("a", 1)], [("a", 2), ("a", 0)]]


def test_long_and_short_texts_are_apart_unless_the_batch_is_small() -> None:
    batches = Batches[str](8000)
    batches.add("a", [1000, 900, 100, 90], 0.0)
    assert drain(batches) == [[("a", 0), ("a", 1)], [("a", 2), ("a", 3)]]
    batches.add("b", [100, 10, 1], 0.0)
    assert drain(batches) == [[("b", 0), ("b", 1), ("b", 2)]]


def test_a_request_of_thousands_of_texts_delays_another_by_one_batch() -> None:
    batches = Batches[str](1000)
    batches.add("big", [100] * 2000, 0.0)
    batches.take()
    batches.add("small", [100], 0.0)
    assert ("small", 0) in batches.take().texts


def test_small_requests_that_keep_coming_do_not_starve_a_big_one() -> None:
    batches = Batches[str](1000)
    batches.add("big", [1000] * 10, 0.0)
    for client in range(3):
        batches.add(f"{client}", [400], 0.0)
    big = rounds = 0
    while big < 10:
        rounds += 1
        for name, _ in batches.take().texts:
            if name == "big":
                big += 1
            else:  # each client sends its next text as soon as it has the answer
                batches.remove(name)
                batches.add(f"{int(name) + 3}", [400], 0.0)
    assert rounds < 50  # a fourth of the tokens is the share of each


def test_requests_of_equal_right_share_a_batch_evenly() -> None:
    batches = Batches[str](1000)
    for name in "abcd":
        batches.add(name, [50] * 100, 0.0)
    names = [name for name, _ in batches.take().texts]
    assert {name: names.count(name) for name in names} == dict.fromkeys("abcd", 5)


def test_a_single_client_never_waits_and_many_wait_for_each_other() -> None:
    batches = Batches[str](1000)
    batches.add("a", [10], 0.0)
    assert batches.joins_until(0.0) is None
    for name in "bcd":
        batches.add(name, [10], 0.0)
    assert len(batches.take().texts) == 4
    batches.add("e", [10], 1.0)
    assert batches.joins_until(1.0) == 1.0 + JOIN_S
    batches.add("f", [10], 1.001)
    assert batches.joins_until(1.001) == 1.0 + JOIN_S
    assert batches.joins_until(1.0 + JOIN_S) is None
    batches.add("g", [1000], 1.001)
    assert batches.joins_until(1.001) is None  # the batch is full
    drain(batches)
    batches.add("h", [10], 2.0)
    batches.take()
    batches.add("h", [10], 3.0)
    assert batches.joins_until(3.0) is None


def test_a_request_that_is_removed_is_gone() -> None:
    batches = Batches[str](100)
    batches.add("a", [10, 20], 0.0)
    batches.add("b", [10], 0.0)
    batches.remove("a")
    assert drain(batches) == [[("b", 0)]]
