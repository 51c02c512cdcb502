from penstock.tools.pages import html_table


def test_a_table_is_escaped() -> None:
    text = html_table(("a & b", "holds"), [("<1", "no"), ("2", "yes")])

    assert "<th>a &amp; b</th>" in text
    assert "<td>&lt;1</td>" in text
