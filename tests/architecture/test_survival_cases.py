from __future__ import annotations

import case_table

ALL = range(1, case_table.NUM_CASES + 1)


def test_every_case_has_a_test() -> None:
    written = case_table.written_tests()

    assert [number for number in ALL if number not in written] == []
    assert [number for number in written if number not in ALL] == []


def test_the_table_has_every_case_once_and_in_order() -> None:
    assert list(case_table.listed_tests()) == list(ALL)


def test_the_table_lists_the_existing_tests() -> None:
    reported, written = case_table.listed_tests(), case_table.written_tests()
    wrong = {
        number: (sorted(reported[number]), sorted(written.get(number, ())))
        for number in reported
        if reported[number] != written.get(number, frozenset())
    }

    assert wrong == {}, "make cases writes the table's last column anew"
